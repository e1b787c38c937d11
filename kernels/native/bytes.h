// Lines of 4 int8 weights an output, times 4 bytes of a row: sums of integers, exact in any order.
//
// The bytes of a row are 0 … 255, those of weights -127 … 127: what the processors' instructions multiply.
#pragma once
#include "tile.h"

#if defined(__AVX512VNNI__)
template <>
struct Line<int8_t> {
    static constexpr int DEPTH = 4;
    typedef __m512i Sum;
    typedef __m512i Weights;
    typedef __m512i Input;
    METHOD static Weights weights(const int8_t* p) { return _mm512_loadu_si512(p); }
    METHOD static Input input(const int8_t* p) {
        int32_t four;
        memcpy(&four, p, sizeof four);
        return _mm512_set1_epi32(four);
    }
    METHOD static Sum add(Sum total, Weights w, Input x) { return _mm512_dpbusd_epi32(total, x, w); }
    METHOD static vi sum(Sum total) { return (vi)total; }
};
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
template <>
struct Line<int8_t> {
    static constexpr int DEPTH = 4;
    struct Weights {
        __m256i low, high;
    };
    typedef Weights Sum;
    typedef __m256i Input;
    METHOD static Weights weights(const int8_t* p) {
        return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
    }
    METHOD static Input input(const int8_t* p) {
        int32_t four;
        memcpy(&four, p, sizeof four);
        return _mm256_set1_epi32(four);
    }
    METHOD static Sum add(Sum total, Weights w, Input x) {
        return {_mm256_dpbusd_avx_epi32(total.low, x, w.low), _mm256_dpbusd_avx_epi32(total.high, x, w.high)};
    }
    METHOD static vi sum(const Sum& total) { return read<vi>(&total); }
};
#else
// vpmaddubsw would saturate: two products of bytes don't fit 16 bits. So both sides are widened to 16 bits first.
template <>
struct Line<int8_t> {
    static constexpr int DEPTH = 4;
    struct Weights {
        __m256i quarters[4];  // of 4 outputs each
    };
    typedef Weights Sum;  // of an output two parts, side by side
    typedef __m256i Input;
    METHOD static Weights weights(const int8_t* p) {
        Weights w;
        for (int i = 0; i < 4; i++) w.quarters[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + i));
        return w;
    }
    METHOD static Input input(const int8_t* p) {
        int32_t four;
        memcpy(&four, p, sizeof four);
        return _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
    }
    METHOD static Sum add(Sum total, const Weights& w, Input x) {
        for (int i = 0; i < 4; i++)
            total.quarters[i] = _mm256_add_epi32(total.quarters[i], _mm256_madd_epi16(w.quarters[i], x));
        return total;
    }
    METHOD static vi sum(const Sum& total) {
        __m256i halves[2];
        for (int i = 0; i < 2; i++) {
            const __m256i sums = _mm256_hadd_epi32(total.quarters[2 * i], total.quarters[2 * i + 1]);
            halves[i] = _mm256_permute4x64_epi64(sums, 0xd8);  // from the order 0, 2, 1, 3
        }
        return read<vi>(halves);
    }
};
#endif
#else
template <>
struct Line<int8_t> {
    static constexpr int DEPTH = 4;
    typedef vi Sum;
    struct Weights {
        vi part[4];
    };
    typedef Weights Input;
    METHOD static Weights weights(const int8_t* p) {
        vi lanes = load((const int32_t*)p);  // the first input of each output in its lowest byte
        return {{lanes << 24 >> 24, lanes << 16 >> 24, lanes << 8 >> 24, lanes >> 24}};
    }
    METHOD static Input input(const int8_t* p) {
        const uint8_t* bytes = (const uint8_t*)p;
        return {{vi{} + bytes[0], vi{} + bytes[1], vi{} + bytes[2], vi{} + bytes[3]}};
    }
    METHOD static Sum add(Sum total, const Weights& w, const Input& x) {
        for (int i = 0; i < 4; i++) total += w.part[i] * x.part[i];
        return total;
    }
    METHOD static vi sum(Sum total) { return total; }
};
#endif
