// Sixteen floats at a time, for any processor: the compiler cuts the vectors to what it has.
// Only where plain code would lose much are intrinsics named.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define METHOD __attribute__((always_inline))
#define INLINE static inline METHOD

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

// A bfloat16 in memory. Arithmetic is in float.
struct bf16 {
    uint16_t bits;
};

INLINE vf set1(float x) { return vf{} + x; }

INLINE vf load(const float* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE vf load(const bf16* p) {
    vh half;
    memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (vf)(__builtin_convertvector(half, vu) << 16);
#endif
}
INLINE vi load(const int32_t* p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
INLINE void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &half, sizeof half);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    vu quiet = (bits >> 16) | 0x40;
    vh half = __builtin_convertvector((vu)(x == x ? (vi)rounded : (vi)quiet), vh);
    memcpy(p, &half, sizeof half);
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

INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
INLINE float sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}
INLINE float highest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// 2^x to 2 units in the last place; 0 below -126, for processors are slow with what is smaller than normal numbers.
#if defined(__AVX512DQ__)
// Of a finite x; what is smaller than normal numbers is not zero here. The power of the fraction in [0, 1) is 1 + x * (best
// of degree 4 by relative error), so that 2^0 is 1; scalef takes the whole part of x itself.
INLINE vf exp2_of_finite(vf x) {
    vf rest = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    vf y = set1(1.86713005e-3f);
    y = y * rest + 9.01703071e-3f;
    y = y * rest + 5.57999127e-2f;
    y = y * rest + 2.40164444e-1f;
    y = y * rest + 6.93151295e-1f;
    y = y * rest + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)x);
}
// Of an x that is at most 126, or NaN.
INLINE vf exp2_of_low(vf x) {
    vf power = exp2_of_finite(max(set1(-126.0f), x));  // in this order a NaN stays one
    return x < -126.0f ? vf{} : power;
}
// Of any x; 2^126 of more.
INLINE vf exp2(vf x) { return exp2_of_low(min(set1(126.0f), x)); }
#else
INLINE vf exp2(vf x) {
    vi is_low = x < -126.0f;
    x = max(set1(-126.0f), x);  // in this order a NaN stays one
    x = min(set1(126.0f), x);
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
    return is_low ? vf{} : y * power;
}
INLINE vf exp2_of_low(vf x) { return exp2(x); }
INLINE vf exp2_of_finite(vf x) { return exp2(x); }
#endif
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

// The sums of sixteen vectors, in their order.
INLINE vf sums(vf* v) {
#define HALVE(width, ...) \
    for (int i = 0; i < width; i++) { \
        vi low = {__VA_ARGS__}; \
        vi high = low + width; \
        v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], low) + __builtin_shuffle(v[2 * i], v[2 * i + 1], high); \
    }
    HALVE(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    HALVE(4, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
    HALVE(2, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
    HALVE(1, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#undef HALVE
    return v[0];
}
