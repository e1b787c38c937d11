// What moves numbers from lane to lane: sums and highest of a vector's lanes, transposes.
#pragma once
#include "lanes.h"

// The lanes of two registers in another order: those of b count on from a's.
template <class R, int... I>
INLINE R pick(R a, R b, std::integer_sequence<int, I...>) {
    return __builtin_shuffle(a, b, ri{I...});
}
template <class Order>
struct Lanes;
template <int... I>
struct Lanes<std::integer_sequence<int, I...>> {
    // Blocks of WIDTH lanes: the first of each two, then the second of each two.
    template <int WIDTH>
    using Firsts = std::integer_sequence<int, I / WIDTH * 2 * WIDTH + I % WIDTH...>;
    template <int WIDTH>
    using Seconds = std::integer_sequence<int, I / WIDTH * 2 * WIDTH + I % WIDTH + WIDTH...>;
    // Of each two, those of b change places with a's before them.
    template <int WIDTH>
    using Upper = std::integer_sequence<int, (I & WIDTH ? I - WIDTH + REGISTER_LANES : I)...>;
    template <int WIDTH>
    using Lower = std::integer_sequence<int, (I & WIDTH ? I + REGISTER_LANES : I + WIDTH)...>;
    // Each WIDTH further on.
    template <int WIDTH>
    using Turned = std::integer_sequence<int, (I + WIDTH) % REGISTER_LANES...>;
};
typedef Lanes<std::make_integer_sequence<int, REGISTER_LANES>> Order;

// The sum of all lanes: halves, then halves of these.
template <int WIDTH = REGISTER_LANES / 2>
INLINE float sum(rf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    if constexpr (WIDTH == 0)
        return x[0];
    else
        return sum<WIDTH / 2>(x + pick(x, x, Order::Turned<WIDTH>{}));
#endif
}
template <class H>
INLINE float sum(Halves<H> x) {
    return sum(x.low + x.high);
}

INLINE rf max(rf a, rf b) {
#if defined(__AVX512F__)
    return (rf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INLINE rf min(rf a, rf b) {
#if defined(__AVX512F__)
    return (rf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
template <class H>
INLINE Halves<H> max(Halves<H> a, Halves<H> b) {
    return {max(a.low, b.low), max(a.high, b.high)};
}
template <class H>
INLINE Halves<H> min(Halves<H> a, Halves<H> b) {
    return {min(a.low, b.low), min(a.high, b.high)};
}

template <int WIDTH = REGISTER_LANES / 2>
INLINE float highest(rf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    if constexpr (WIDTH == 0)
        return x[0];
    else
        return highest<WIDTH / 2>(max(x, pick(x, x, Order::Turned<WIDTH>{})));
#endif
}
template <class H>
INLINE float highest(Halves<H> x) {
    return highest(max(x.low, x.high));
}

// Whether a mask is set anywhere.
INLINE bool any(ri mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    int32_t all = 0;
    for (int i = 0; i < REGISTER_LANES; i++) all |= mask[i];
    return all;
#endif
}
template <class H>
INLINE bool any(Halves<H> mask) {
    return any(mask.low | mask.high);
}

// The sums of sixteen vectors, in their order. `registers`: all that they are in.
template <int WIDTH = LANES / 2>
INLINE void sum_in_pairs(rf* registers) {
#pragma GCC unroll 64
    for (int i = 0; i < WIDTH * REGISTERS; i++) {
        const rf a = registers[2 * i], b = registers[2 * i + 1];
        if constexpr (WIDTH >= REGISTER_LANES)
            registers[i] = a + b;
        else
            registers[i] = pick(a, b, Order::Firsts<WIDTH>{}) + pick(a, b, Order::Seconds<WIDTH>{});
    }
    if constexpr (WIDTH > 1) sum_in_pairs<WIDTH / 2>(registers);
}
INLINE vf sums(vf* v) {
    sum_in_pairs((rf*)v);
    return v[0];
}

// Rows of a square of registers become columns: halves, quarters and so on change places across the diagonal.
template <int WIDTH = REGISTER_LANES / 2>
INLINE void transpose_block(rf* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < REGISTER_LANES; i++) {
        if (i & WIDTH) continue;
        const rf a = rows[i], b = rows[i + WIDTH];
        rows[i] = pick(a, b, Order::Upper<WIDTH>{});
        rows[i + WIDTH] = pick(a, b, Order::Lower<WIDTH>{});
    }
    if constexpr (WIDTH > 1) transpose_block<WIDTH / 2>(rows);
}

// Sixteen rows of sixteen become columns.
INLINE void transpose(vf* rows) {
    if constexpr (REGISTERS == 1) return transpose_block((rf*)rows);
    rf* all = (rf*)rows;  // [LANES][REGISTERS]
    for (int i = 0; i < REGISTERS; i++)
        for (int j = 0; j <= i; j++) {
            rf *first = all + i * REGISTER_LANES * REGISTERS + j, *second = all + j * REGISTER_LANES * REGISTERS + i;
            rf a[REGISTER_LANES], b[REGISTER_LANES];
            for (int k = 0; k < REGISTER_LANES; k++) a[k] = first[k * REGISTERS], b[k] = second[k * REGISTERS];
            transpose_block(a);
            transpose_block(b);
            for (int k = 0; k < REGISTER_LANES; k++) first[k * REGISTERS] = b[k], second[k * REGISTERS] = a[k];
        }
}
