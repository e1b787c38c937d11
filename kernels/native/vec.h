// Formulas on sixteen floats at a time, and their places in memory.
#pragma once
#include "shuffles.h"

// A bfloat16 in memory. Arithmetic is in float.
struct bf16 {
    uint16_t bits;
};

INLINE vf load(const float* p) { return read<vf>(p); }
INLINE vf load(const bf16* p) { return (vf)(widen(p) << 16); }
INLINE vi load(const int32_t* p) { return read<vi>(p); }
INLINE void store(float* p, vf x) { write(p, x); }
INLINE void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    write(p, _mm512_cvtneps_pbh((__m512)x));
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    vu quiet = (bits >> 16) | 0x40;
    narrow(p, select(x == x, rounded, quiet));
#endif
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The first n lanes of p, zeros after.
template <class T>
INLINE vf load_first(const T* p, int n) {
    if (n == LANES) return load(p);
    T buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}
template <class T>
INLINE void store_first(T* p, vf x, int n) {
    if (n == LANES) return store(p, x);
    T buffer[LANES];
    store(buffer, x);
    memcpy(p, buffer, n * sizeof(T));
}

// 2^x to 3 units in the last place; 0 below -126, for processors are slow with what is smaller than normal numbers.
#if defined(__AVX512DQ__)
// The power of the fraction in [0, 1) is 1 + x * (best of degree 4 by relative error), so that 2^0 is 1; scalef takes the
// whole part of x itself.
INLINE vf exp2_of_normal(vf x) {
    vf rest = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    vf y = set1(1.86713005e-3f);
    y = y * rest + 9.01703071e-3f;
    y = y * rest + 5.57999127e-2f;
    y = y * rest + 2.40164444e-1f;
    y = y * rest + 6.93151295e-1f;
    y = y * rest + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)x);
}
// Of a finite x; what is smaller than normal numbers is not zero here.
INLINE vf exp2_of_finite(vf x) { return exp2_of_normal(x); }
#else
INLINE vf exp2_of_normal(vf x) {
    vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf whole = x + magic;
    vf rest = x - (whole - magic);
    vf power = (vf)(((vi)whole << 23) + 0x3f800000);
    vf y = set1(1.5403530e-4f);
    y = y * rest + 1.3333558e-3f;
    y = y * rest + 9.6181291e-3f;
    y = y * rest + 5.5504109e-2f;
    y = y * rest + 2.4022651e-1f;
    y = y * rest + 6.9314718e-1f;
    y = y * rest + 1.0f;
    return y * power;
}
// Of a finite x; what is smaller than normal numbers is zero from -126.5 down: the power's bits are, at -127.
INLINE vf exp2_of_finite(vf x) { return exp2_of_normal(min(set1(126.0f), max(set1(-127.0f), x))); }
#endif
// Of an x that is at most 126, or NaN.
INLINE vf exp2_of_low(vf x) {
    vf power = exp2_of_normal(max(set1(-126.0f), x));  // in this order a NaN stays one
    return select(x < -126.0f, vf{}, power);
}
// Of any x; 2^126 of more.
INLINE vf exp2(vf x) { return exp2_of_low(min(set1(126.0f), x)); }
constexpr float LOG2E = 1.44269504088896340736f;
INLINE vf exp(vf x) { return exp2(x * LOG2E); }

// a / b to 2 units in the last place, for b from 2^-126 to 2^126: processors divide slowly.
INLINE vf quotient(vf a, vf b) {
#if defined(__AVX512F__)
    vf inverse = (vf)_mm512_rcp14_ps((__m512)b);
    return a * (inverse * (2.0f - b * inverse));
#else
    return a / b;
#endif
}
INLINE vf sigmoid(vf x) { return quotient(set1(1.0f), 1.0f + exp(-x)); }
INLINE vf silu(vf x) { return quotient(x, 1.0f + exp(-x)); }
INLINE vf tanh(vf x) { return 1.0f - quotient(set1(2.0f), 1.0f + exp(2.0f * x)); }
