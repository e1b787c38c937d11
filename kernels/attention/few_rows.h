// Few rows (decode): keys and values are used as they lie, for reading them is the work.
#pragma once
#include "view.h"

constexpr int64_t FEW_ROWS = 8;
constexpr int64_t KEY_BLOCK = 64;  // keys handled at once, cut at absolute multiples
constexpr int64_t KEY_TILES = KEY_BLOCK / LANES;

template <class T>
struct Pair;  // products of vectors of T, 64 bytes at a time
template <>
struct Pair<float> {
    static constexpr int WIDTH = LANES;
    typedef vf V;
    METHOD static V get(const float* p) { return load(p); }
    METHOD static vf add(vf total, V a, V b) { return total + a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Pair<bf16> {
    static constexpr int WIDTH = 2 * LANES;
    typedef __m512bh V;
    METHOD static V get(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    METHOD static vf add(vf total, V a, V b) { return (vf)_mm512_dpbf16_ps((__m512)total, a, b); }
};
#else
template <>
struct Pair<bf16> {
    static constexpr int WIDTH = LANES;
    typedef vf V;
    METHOD static V get(const bf16* p) { return load(p); }
    METHOD static vf add(vf total, V a, V b) { return total + a * b; }
};
#endif

constexpr int64_t AHEAD_BYTES = 8192;  // of keys, and as much of values: 16 keys of 256 bfloat16; more was slower

// Blocks lie anywhere, so the processor can't guess where the next keys are: each line that is read asks for the one
// `ahead` of it. One by one, for a burst of requests would hold up the work that they should run beside.
template <class T>
INLINE void prefetch(const T* line, int64_t ahead) {
    __builtin_prefetch((const char*)line + ahead, 0, 2);
}

// Scores of R rows with 16 / R keys that lie k_slot apart, of which `there` exist: scores[row * KEY_BLOCK + key].
template <int R, class T>
INLINE void score_keys(const T* q, const T* k, int64_t k_slot, int64_t there, int64_t ahead, int64_t size,
                       float* scores) {
    typedef Pair<T> P;
    constexpr int KEYS = LANES / R;
    const T* key[KEYS];
    for (int i = 0; i < KEYS; i++) key[i] = k + std::min<int64_t>(i, there - 1) * k_slot;
    vf total[R * KEYS] = {};
    int64_t d = 0;
    for (; d + P::WIDTH <= size; d += P::WIDTH) {
        typename P::V row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) row[r] = P::get(q + r * size + d);
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) {
            typename P::V x = P::get(key[i] + d);
            prefetch(key[i] + d, ahead);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) total[r * KEYS + i] = P::add(total[r * KEYS + i], x, row[r]);
        }
    }
    if (d < size)  // sixteen left of a size such as 80
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) total[r * KEYS + i] += load(key[i] + d) * load(q + r * size + d);
    float found[LANES];
    store(found, sums(total));
    for (int r = 0; r < R; r++) memcpy(scores + r * KEY_BLOCK, found + r * KEYS, there * sizeof(float));
}

// N tiles of sums[R][size] += weights[R][KEY_BLOCK] times values that lie v_slot apart.
template <int R, int N, class T>
INLINE void weigh_tiles(const T* weights, const T* v, int64_t v_slot, int64_t num_keys, int64_t ahead, int64_t size,
                        float* sums) {
    typedef Line<T> L;
    vf total[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) total[r][n] = load(sums + r * size + n * LANES);
    auto add_keys = [&](int64_t i, const T* second, const T* weight, int64_t weight_stride) METHOD {
        for (int key = 0; key < L::DEPTH; key++)
            for (int byte = 0; byte < N * LANES * (int)sizeof(T); byte += 64)
                prefetch((const char*)(v + (i + key) * v_slot) + byte, ahead);
        typename L::Weights x[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            vu line = value_line(v + i * v_slot, second, n * LANES);
            x[n] = L::weights((const T*)&line);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            typename L::Input w = L::input(weight + r * weight_stride);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) total[r][n] = L::add(total[r][n], x[n], w);
        }
    };
    int64_t i = 0;
    for (; i + L::DEPTH <= num_keys; i += L::DEPTH)
        add_keys(i, v + (i + L::DEPTH - 1) * v_slot, weights + i, KEY_BLOCK);
    if (i < num_keys) {  // one key left of a pair
        T last[R][L::DEPTH] = {};
        for (int r = 0; r < R; r++) last[r][0] = weights[r * KEY_BLOCK + i];
        add_keys(i, nullptr, last[0], L::DEPTH);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(sums + r * size + n * LANES, total[r][n]);
}

template <int R, class T>
INLINE void weigh_values(const T* weights, const T* v, int64_t v_slot, int64_t num_keys, int64_t ahead, int64_t size,
                         float* sums) {
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES)
        weigh_tiles<R, 4>(weights, v + d, v_slot, num_keys, ahead, size, sums + d);
    for (; d < size; d += LANES) weigh_tiles<R, 1>(weights, v + d, v_slot, num_keys, ahead, size, sums + d);
}

// R rows from `row` on, against one key block.
template <int R, class T>
__attribute__((noinline)) void attend_block(const View<T>& view, const Task& task, const T* q, int64_t row,
                                            int64_t key, const State& state) {
    const int64_t size = view.size, value_size = view.value_size;
    const int64_t end = std::min(key + KEY_BLOCK, task.end_key), start = std::max(key, task.first_key);
    const int64_t ahead_keys = std::max<int64_t>(1, AHEAD_BYTES / (size * sizeof(T)));
    constexpr int WIDE = R == 3 ? 4 : R;  // rows scored at once
    alignas(64) float scores[WIDE * KEY_BLOCK];
    alignas(64) T weights[R * KEY_BLOCK];
    for (int64_t next = start; next < end;) {
        Segment at = segment_at(view, task, next, end);
        Segment ahead = next + ahead_keys < task.end_key ? segment_at(view, task, next + ahead_keys, task.end_key) : at;
        for (int64_t i = 0; i < at.num_keys; i += LANES / WIDE)
            score_keys<WIDE>(q + row * size, view.k + at.k_offset + i * view.k_slot, view.k_slot,
                             std::min<int64_t>(LANES / WIDE, at.num_keys - i),
                             (ahead.k_offset - at.k_offset) * sizeof(T), size, scores + next - key + i);
        next += at.num_keys;
    }
    for (int64_t r = 0; r < R; r++) {
        int64_t first, last;
        sight(view, task, row + r, key, first, last);
        float keep = soften<KEY_TILES>(scores + r * KEY_BLOCK, weights + r * KEY_BLOCK, KEY_TILES, first, last,
                                       view.scale, view.softcap, state.high[row + r], state.total[row + r]);
        if (keep != 1) scale(state.sums + (row + r) * value_size, keep, value_size);
    }
    for (int64_t next = start; next < end;) {
        Segment at = segment_at(view, task, next, end);
        Segment ahead = next + ahead_keys < task.end_key ? segment_at(view, task, next + ahead_keys, task.end_key) : at;
        weigh_values<R>(weights + next - key, view.v + at.v_offset, view.v_slot, at.num_keys,
                        (ahead.v_offset - at.v_offset) * sizeof(T), value_size, state.sums + row * value_size);
        next += at.num_keys;
    }
}

template <class T>
struct FewRowsScratch {
    // One row more than used, for three rows are scored as four.
    static int64_t num_bytes(int64_t rows, int64_t size, int64_t value_size) {
        return (rows + 1) * size * sizeof(T) + State::num_floats(rows, value_size) * 4;
    }
};

template <class T>
void attend_few_rows(const View<T>& view, const Task& task, char* memory) {
    const int64_t rows = task.num_tokens * view.share(), size = view.size;
    float* state_memory = (float*)memory;
    T* q = (T*)(state_memory + State::num_floats(rows, view.value_size));
    State state = State::at(task.is_split ? view.partials + task.partial : state_memory, rows, view.value_size);
    state.clear(rows);
    memset(q + rows * size, 0, size * sizeof(T));
    gather_queries(view, task, q);
    for (int64_t key = task.first_key / KEY_BLOCK * KEY_BLOCK; key < task.end_key; key += KEY_BLOCK)
        for (int64_t row = 0; row < rows;) {
            int64_t left = rows - row;
            if (left >= 4) attend_block<4>(view, task, q, row, key, state), row += 4;
            else if (left == 3) attend_block<3>(view, task, q, row, key, state), row += 3;
            else if (left == 2) attend_block<2>(view, task, q, row, key, state), row += 2;
            else attend_block<1>(view, task, q, row, key, state), row += 1;
        }
    if (!task.is_split) finish_rows(view, task, state);
}
