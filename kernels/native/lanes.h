// Sixteen lanes of 32 bits, on any processor: vf, vi and vu hold floats, int32 and uint32.
//
// With AVX-512 they are one register and the compiler's own vectors. Elsewhere they are Halves, down to what a register
// holds: of longer vectors GCC takes comparisons, choices and shuffles apart lane by lane and keeps all of them in memory,
// at a tenth of the speed. Operators work on both alike; what C++ lets no class have is a function: select() for ?:,
// read() and write() for memcpy(), which would put Halves into memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define METHOD __attribute__((always_inline))
#define INLINE static inline METHOD

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int REGISTER_LANES = REGISTER_BYTES / 4, REGISTERS = LANES / REGISTER_LANES;

// What one register holds.
typedef float rf __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t ri __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t ru __attribute__((vector_size(REGISTER_BYTES)));

template <class Half>
struct Halves {
    typedef std::decay_t<decltype(std::declval<Half&>()[0])> Element;
    static constexpr int HALF_LANES = sizeof(Half) / sizeof(Element);
    Half low, high;

    METHOD Element operator[](int i) const { return i < HALF_LANES ? low[i] : high[i - HALF_LANES]; }
    METHOD Halves operator-() const { return {-low, -high}; }
    template <class Other>
    METHOD explicit operator Halves<Other>() const {  // the same bits
        return {(Other)low, (Other)high};
    }
};

template <class Register>
using Sixteen = std::conditional_t<REGISTERS == 1, Register,
                                   std::conditional_t<REGISTERS == 2, Halves<Register>, Halves<Halves<Register>>>>;
typedef Sixteen<rf> vf;
typedef Sixteen<ri> vi;
typedef Sixteen<ru> vu;

template <class V>
constexpr bool IS_HALVES = false;
template <class Half>
constexpr bool IS_HALVES<Halves<Half>> = true;

// What comparing gives: -1 where it is so, else 0.
template <class V>
struct Mask {
    typedef ri Type;
};
template <class Half>
struct Mask<Halves<Half>> {
    typedef Halves<typename Mask<Half>::Type> Type;
};
template <class V>
using MaskOf = typename Mask<V>::Type;

#define OF_HALVES(op, Result)                                               \
    template <class H>                                                      \
    INLINE Result operator op(Halves<H> a, Halves<H> b) {                   \
        typedef decltype(Result::low) Half;                                 \
        return {(Half)(a.low op b.low), (Half)(a.high op b.high)};          \
    }                                                                       \
    template <class H>                                                      \
    INLINE Result operator op(Halves<H> a, typename Halves<H>::Element b) { \
        typedef decltype(Result::low) Half;                                 \
        return {(Half)(a.low op b), (Half)(a.high op b)};                   \
    }                                                                       \
    template <class H>                                                      \
    INLINE Result operator op(typename Halves<H>::Element a, Halves<H> b) { \
        typedef decltype(Result::low) Half;                                 \
        return {(Half)(a op b.low), (Half)(a op b.high)};                   \
    }
#define ARITHMETIC(op)                                    \
    OF_HALVES(op, Halves<H>)                              \
    template <class H, class X>                           \
    INLINE Halves<H>& operator op##=(Halves<H>& a, X b) { \
        return a = a op b;                                \
    }
#define COMPARISON(op) OF_HALVES(op, MaskOf<Halves<H>>)
ARITHMETIC(+)
ARITHMETIC(-)
ARITHMETIC(*)
ARITHMETIC(/)
ARITHMETIC(&)
ARITHMETIC(|)
ARITHMETIC(^)
ARITHMETIC(<<)
ARITHMETIC(>>)
COMPARISON(<)
COMPARISON(<=)
COMPARISON(>)
COMPARISON(>=)
COMPARISON(==)
COMPARISON(!=)
#undef COMPARISON
#undef ARITHMETIC
#undef OF_HALVES

// a where the mask is set, else b.
template <class M, class V>
INLINE V select(M mask, V a, V b) {
    if constexpr (IS_HALVES<V>)
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// The same number in all lanes.
template <int... I>
INLINE rf register_of(float x, std::integer_sequence<int, I...>) {
    return rf{((void)I, x)...};
}
template <class V = vf>
INLINE V set1(float x) {
    if constexpr (IS_HALVES<V>)
        return {set1<decltype(V::low)>(x), set1<decltype(V::low)>(x)};
    else if constexpr (REGISTERS == 1)
        return V{} + x;
    else
        return register_of(x, std::make_integer_sequence<int, REGISTER_LANES>{});
}

// Of 64 bytes that lie anywhere.
template <class V>
INLINE V read(const void* p) {
    if constexpr (IS_HALVES<V>) {
        typedef decltype(V::low) Half;
        return {read<Half>(p), read<Half>((const char*)p + sizeof(Half))};
    } else {
        V x;
        memcpy(&x, p, sizeof x);
        return x;
    }
}
template <class V>
INLINE void write(void* p, V x) {
    if constexpr (IS_HALVES<V>) {
        write(p, x.low);
        write((char*)p + sizeof x.low, x.high);
    } else {
        memcpy(p, &x, sizeof x);
    }
}

// Sixteen numbers of 16 bits, each to a lane, and back of lanes below 2^16.
template <class V = vu>
INLINE V widen(const void* p) {
    if constexpr (IS_HALVES<V>) {
        typedef decltype(V::low) Half;
        return {widen<Half>(p), widen<Half>((const char*)p + sizeof(Half) / 2)};
    } else {
#if defined(__AVX512F__)
        return (V)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
        typedef uint16_t Narrow __attribute__((vector_size(REGISTER_BYTES / 2)));
        return __builtin_convertvector(read<Narrow>(p), V);
#endif
    }
}
template <class V>
INLINE void narrow(void* p, V x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i quarters = _mm256_packus_epi32((__m256i)x.low, (__m256i)x.high);  // in the order 0, 2, 1, 3
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(quarters, 0xd8));
#else
    if constexpr (IS_HALVES<V>) {
        narrow(p, x.low);
        narrow((char*)p + sizeof x.low / 2, x.high);
    } else {
        typedef uint16_t Narrow __attribute__((vector_size(REGISTER_BYTES / 2)));
        write(p, __builtin_convertvector(x, Narrow));
    }
#endif
}

// The same to bytes, of lanes below 2^8.
INLINE void narrow_to_bytes(uint8_t* p, vi x) {
#if defined(__AVX512F__)
    typedef uint8_t Narrow __attribute__((vector_size(LANES)));
    write(p, __builtin_convertvector(x, Narrow));
#else
    uint16_t words[LANES];
    narrow(words, (vu)x);
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)words[i];
#endif
}

// 0 to 15.
template <int FIRST, int... I>
INLINE ri numbers_from(std::integer_sequence<int, I...>) {
    return ri{FIRST + I...};
}
template <class V = vi, int FIRST = 0>
INLINE V lane_numbers() {
    if constexpr (IS_HALVES<V>) {
        typedef decltype(V::low) Half;
        return {lane_numbers<Half, FIRST>(), lane_numbers<Half, FIRST + V::HALF_LANES>()};
    } else {
        return numbers_from<FIRST>(std::make_integer_sequence<int, REGISTER_LANES>{});
    }
}

// Integers to floats.
template <class V = vf, class Integers>
INLINE V to_floats(Integers x) {
    if constexpr (IS_HALVES<V>) {
        typedef decltype(V::low) Half;
        return {to_floats<Half>(x.low), to_floats<Half>(x.high)};
    } else {
        return __builtin_convertvector(x, V);
    }
}
