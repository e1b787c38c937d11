// What comes before attention in a layer: norm and rotate heads, store keys and values.
#pragma once
#include <algorithm>

#include "rows.h"
#include "team.h"

template <class T>
struct Projected {
    const T* qkv;  // [tokens, (heads + kv heads) * size + kv heads * value_size], rows qkv_token apart
    T *q, *k_cache, *v_cache;  // q [tokens, heads, size]
    const int64_t* slots;
    const float *cos, *sin;  // [tokens, rotary]
    Weight q_norm, k_norm;
    int64_t num_tokens, num_heads, num_blocks, num_kv_heads, block_size, size, value_size, rotary;
    int64_t qkv_token, k_block, k_head, k_slot, v_block, v_head, v_slot;
    float eps;
};

// One head: to float, norm, rotate, store.
template <class T>
INLINE void norm_rope_head(const T* from, T* to, const Weight& norm, const float* cos, const float* sin,
                           const Projected<T>& p, float* row) {
    for (int64_t d = 0; d < p.size; d += LANES) store(row + d, load(from + d));
    if (norm.data) norm_row(row, row, norm, p.size, p.eps);
    rotate_row(row, to, cos, sin, p.size, p.rotary);
}

// The same of a head of N vectors that is rotated as a whole, with the same bits: it stays in registers.
template <int N, class T>
INLINE void norm_rope_whole_head(const T* from, T* to, const Weight& norm, const float* cos, const float* sin,
                                 float eps) {
    vf x[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = load(from + i * LANES);
    if (norm.data) {
        vf squares = vf{};
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) squares += x[i] * x[i];
        const float scale = rms_scale(squares, N * LANES, eps);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) x[i] = x[i] * scale * norm.at(i * LANES, LANES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; i++) {
        const int64_t low = i * LANES, high = (i + N / 2) * LANES;
        store(to + low, x[i] * load(cos + low) - x[i + N / 2] * load(sin + low));
        store(to + high, x[i + N / 2] * load(cos + high) + x[i] * load(sin + high));
    }
}

template <class T>
INLINE void norm_rope_any_head(const T* from, T* to, const Weight& norm, const float* cos, const float* sin,
                               const Projected<T>& p, float* row) {
    switch (p.rotary == p.size ? p.size / LANES : 0) {
        case 4: return norm_rope_whole_head<4>(from, to, norm, cos, sin, p.eps);
        case 8: return norm_rope_whole_head<8>(from, to, norm, cos, sin, p.eps);
        case 16: return norm_rope_whole_head<16>(from, to, norm, cos, sin, p.eps);
        default: return norm_rope_head(from, to, norm, cos, sin, p, row);
    }
}

template <class T>
void norm_rope_write(const Projected<T>& p, int num_threads) {
    const bool is_much = p.num_tokens * p.size * (p.num_heads + p.num_kv_heads) > 1 << 15;
    each_task(p.num_tokens, num_threads, is_much, [&](int64_t t) {
        alignas(64) float row[MAX_HEAD_SIZE];
        const T* from = p.qkv + t * p.qkv_token;
        const float *cos = p.cos + t * p.rotary, *sin = p.sin + t * p.rotary;
        const int64_t block = p.slots[t] / p.block_size, slot = p.slots[t] % p.block_size;
        for (int64_t h = 0; h < p.num_heads; h++, from += p.size)
            norm_rope_any_head(from, p.q + (t * p.num_heads + h) * p.size, p.q_norm, cos, sin, p, row);
        for (int64_t h = 0; h < p.num_kv_heads; h++, from += p.size)
            norm_rope_any_head(from, p.k_cache + block * p.k_block + h * p.k_head + slot * p.k_slot, p.k_norm, cos, sin,
                               p, row);
        for (int64_t h = 0; h < p.num_kv_heads; h++, from += p.value_size)
            memcpy(p.v_cache + block * p.v_block + h * p.v_head + slot * p.v_slot, from, p.value_size * sizeof(T));
    });
}

#define QKV_NORM_ROPE_WRITE(name, T)                                                                                  \
    bool name(const T* qkv, T* q, T* k_cache, T* v_cache, const int64_t* slots, const float* cos, const float* sin,   \
              const void* q_norm, const void* k_norm, int32_t is_norm_bf16, int32_t is_zero_centered,                 \
              int64_t num_tokens, int64_t num_heads, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,    \
              int64_t size, int64_t value_size, int64_t rotary, int64_t qkv_token, int64_t k_block, int64_t k_head,   \
              int64_t k_slot, int64_t v_block, int64_t v_head, int64_t v_slot, float eps, int32_t num_threads) {      \
        if (!are_slots(slots, num_tokens, num_blocks * block_size)) return false;                                     \
        float shift = is_zero_centered ? 1 : 0;                                                                       \
        norm_rope_write(Projected<T>{qkv, q, k_cache, v_cache, slots, cos, sin, {q_norm, is_norm_bf16 != 0, shift},   \
                                     {k_norm, is_norm_bf16 != 0, shift}, num_tokens, num_heads, num_blocks,           \
                                     num_kv_heads, block_size, size, value_size, rotary, qkv_token, k_block, k_head,  \
                                     k_slot, v_block, v_head, v_slot, eps},                                           \
                        num_threads);                                                                                 \
        return true;                                                                                                  \
    }
