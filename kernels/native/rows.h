// What is done to one row of a tensor: RMSNorm and rotation.
#pragma once
#include <cmath>

#include "vec.h"

constexpr int64_t MAX_HEAD_SIZE = 1024;

// The weight of a norm, or of none when data is null.
struct Weight {
    const void* data;
    bool is_bf16;
    float shift;  // 1 when the weight is stored around zero
    METHOD vf at(int64_t i, int n) const {
        return shift + (is_bf16 ? load_first((const bf16*)data + i, n) : load_first((const float*)data + i, n));
    }
};

// Calls body(i, n) for pieces of n <= LANES elements at i.
template <class Body>
INLINE void for_pieces(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, (int)(size - i));
}

// 1 / rms of a row of `size` elements whose squares are added up in lanes.
INLINE float rms_scale(vf squares, int64_t size, float eps) { return 1 / std::sqrt(sum(squares) / (float)size + eps); }

// to = x / rms(x) * weight; x and to may be the same row.
template <class T, class Out>
INLINE void norm_row(const T* x, Out* to, const Weight& weight, int64_t size, float eps) {
    vf squares = vf{};
    for_pieces(size, [&](int64_t i, int n) METHOD {
        vf piece = load_first(x + i, n);
        squares += piece * piece;
    });
    const float scale = rms_scale(squares, size, eps);
    for_pieces(size, [&](int64_t i, int n) METHOD {
        store_first(to + i, load_first(x + i, n) * scale * weight.at(i, n), n);
    });
}

// Element i of the first `rotary` turns with element i + rotary / 2; the rest pass.
template <class T, class Out>
INLINE void rotate_row(const T* x, Out* to, const float* cos, const float* sin, int64_t size, int64_t rotary) {
    const int64_t half = rotary / 2;
    for_pieces(half, [&](int64_t i, int n) METHOD {
        vf low = load_first(x + i, n), high = load_first(x + half + i, n);
        vf turned_low = low * load_first(cos + i, n) - high * load_first(sin + i, n);
        vf turned_high = high * load_first(cos + half + i, n) + low * load_first(sin + half + i, n);
        store_first(to + i, turned_low, n);
        store_first(to + half + i, turned_high, n);
    });
    for_pieces(size - rotary, [&](int64_t i, int n) METHOD {
        store_first(to + rotary + i, load_first(x + rotary + i, n), n);
    });
}
