// What one call of attention works on, and who sees what.
#pragma once
#include <algorithm>
#include <cmath>

#include "tile.h"

constexpr int64_t SPLIT_KEYS = 512;  // where keys are split among tasks, at absolute multiples

template <class T>
struct View {
    const T* q;  // [tokens, heads, size], strides of the first two below
    const T* k;  // [blocks, kv heads, slots, size], strides of the first three below
    const T* v;  // [blocks, kv heads, slots, value_size]
    T* out;      // [tokens, heads, value_size], contiguous
    const int32_t* query_starts;
    const int32_t* num_keys;
    const int32_t* tables;
    const float* sinks;  // or null
    const int32_t* shared;  // [num_shared, SHARED_COLUMNS], see shared.py; or null
    int64_t num_requests, num_heads, num_blocks, num_kv_heads, block_size, size, value_size;
    int64_t q_token, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot, table_stride, table_width, num_shared;
    int64_t window, chunk;  // 0: none
    float scale, softcap;   // softcap 0: none
    bool is_exact;          // a query gives the same bits wherever it is computed: one way for all tasks, and all keys
                            // summed split by split
    float* partials = nullptr;
    const struct Span* spans = nullptr;  // of tasks for several requests

    int64_t share() const { return num_heads / num_kv_heads; }  // query heads on one kv head
    int64_t lowest(int64_t position) const {
        int64_t key = window ? std::max<int64_t>(0, position - window + 1) : 0;
        return chunk ? std::max(key, position / chunk * chunk) : key;
    }
};

// Consecutive tokens of one request in the packed batch.
struct Span {
    int64_t token, num_tokens;
};

// Some consecutive tokens of a request with the query heads of one kv head, against keys [first_key, end_key).
// Row r is token r / share, head r % share, so that rows with equal sight stand together.
// Or tokens of several requests, span after span, against keys that all of them see: `request` is any of them.
struct Task {
    int64_t request, kv_head, token, num_tokens, position;  // token: in the packed batch; position: of that token
    int64_t first_key, end_key;
    bool is_few;      // run as few rows, not as many
    bool is_split;    // other tasks have other keys of these rows,
    int64_t partial;  // so the state goes to this place among the view's partials
    int64_t first_span, end_span;  // among the view's spans; equal where the tokens are one request's
};

// A cut of keys that lie in one block.
struct Segment {
    int64_t key, num_keys, k_offset, v_offset;
};

template <class T>
INLINE Segment segment_at(const View<T>& view, const Task& task, int64_t key, int64_t end) {
    int64_t slot = key % view.block_size;
    int64_t block = view.tables[task.request * view.table_stride + key / view.block_size];
    return {key, std::min(view.block_size - slot, end - key),
            block * view.k_block + task.kv_head * view.k_head + slot * view.k_slot,
            block * view.v_block + task.kv_head * view.v_head + slot * view.v_slot};
}

// Sixteen elements of the values of one key, or of two keys side by side where lines hold pairs; null rows count as zero.
INLINE vu value_line(const float* row, const float*, int64_t d) { return row ? (vu)load(row + d) : vu{}; }
INLINE vu value_line(const bf16* first, const bf16* second, int64_t d) {
    vu low = first ? (vu)load(first + d) >> 16 : vu{};
    return second ? low | (vu)load(second + d) : low;
}

// Running softmax of some rows: weights sum to `total` relative to 2^high, `sums` are the weighed values.
struct State {
    float *high, *total, *sums;
    int64_t value_size;

    static int64_t num_floats(int64_t rows, int64_t value_size) { return rows * (2 + value_size); }
    static State at(float* memory, int64_t rows, int64_t value_size) {
        return {memory + rows * value_size, memory + rows * (value_size + 1), memory, value_size};
    }
    void clear(int64_t rows) {
        memset(sums, 0, rows * value_size * sizeof(float));
        for (int64_t r = 0; r < rows; r++) high[r] = -INFINITY, total[r] = 0;
    }
};

// Take the state of further keys in. One function for all who do: what the compiler makes of it rounds in one way.
__attribute__((noinline)) inline void fold(State into, State part, int64_t into_row, int64_t part_row) {
    const int64_t size = into.value_size;
    const float part_high = part.high[part_row];
    if (part_high == -INFINITY) return;  // none of them is seen
    const float high = std::max(into.high[into_row], part_high);
    const float keep = std::exp2(into.high[into_row] - high), share = std::exp2(part_high - high);
    into.high[into_row] = high;
    into.total[into_row] = into.total[into_row] * keep + part.total[part_row] * share;
    float *to = into.sums + into_row * size, *from = part.sums + part_row * size;
    for (int64_t d = 0; d < size; d += LANES) store(to + d, load(to + d) * keep + load(from + d) * share);
}

// Turn one row's scores of num_tiles (at most MOST) tiles of keys into weights, of which [first, last) are seen, and move
// the running softmax on. Returns what the row's former sums must be multiplied by. Other weights are zero.
template <int MOST, class T>
INLINE float soften(const float* scores, T* weights, int64_t num_tiles, int64_t first, int64_t last, float scale,
                    float softcap, float& high, float& total) {
    const vi lane = lane_numbers();
    const vf unseen = set1(-INFINITY);
    vf s[MOST];
    vf most = unseen;
    for (int64_t t = 0; t < num_tiles; t++) {
        vf x = load(scores + t * LANES) * (scale * (softcap != 0 ? 1 : LOG2E));
        if (softcap != 0) x = tanh(x / softcap) * (softcap * LOG2E);
        vi key = lane + (int32_t)(t * LANES);
        s[t] = select((key >= (int32_t)first) & (key < (int32_t)last), x, unseen);
        most = max(most, s[t]);
    }
    float now = std::max(high, highest(most));
    if (now == -INFINITY) {  // nothing seen yet
        for (int64_t t = 0; t < num_tiles; t++) store(weights + t * LANES, vf{});
        return 1;
    }
    vf sum_of = vf{};
    for (int64_t t = 0; t < num_tiles; t++) {
        vf w = exp2_of_low(s[t] - now);
        sum_of += w;
        store(weights + t * LANES, w);
    }
    const float keep = now == high ? 1 : std::exp2(high - now);
    total = total * keep + sum(sum_of);
    high = now;
    return keep;
}

INLINE void scale(float* sums, float factor, int64_t size) {
    for (int64_t d = 0; d < size; d += LANES) store(sums + d, load(sums + d) * factor);
}

// One row's result from its running softmax.
template <class T>
INLINE void finish_row(const View<T>& view, int64_t token, int64_t head, float high, float total, const float* sums) {
    if (view.sinks) total += std::exp2(view.sinks[head] * LOG2E - high);
    T* out = view.out + (token * view.num_heads + head) * view.value_size;
    float scale = 1 / total;
    for (int64_t d = 0; d < view.value_size; d += LANES) store(out + d, load(sums + d) * scale);
}

template <class T>
INLINE void finish_rows(const View<T>& view, const Task& task, const State& state) {
    int64_t share = view.share();
    for (int64_t r = 0; r < task.num_tokens * share; r++)
        finish_row(view, task.token + r / share, task.kv_head * share + r % share, state.high[r], state.total[r],
                   state.sums + r * view.value_size);
}

template <class T>
INLINE void gather_span(const View<T>& view, int64_t kv_head, Span span, T* rows) {
    int64_t share = view.share();
    for (int64_t r = 0; r < span.num_tokens * share; r++)
        memcpy(rows + r * view.size,
               view.q + (span.token + r / share) * view.q_token + (kv_head * share + r % share) * view.q_head,
               view.size * sizeof(T));
}

// The task's queries as contiguous rows.
template <class T>
INLINE void gather_queries(const View<T>& view, const Task& task, T* rows) {
    if (task.first_span == task.end_span) return gather_span(view, task.kv_head, {task.token, task.num_tokens}, rows);
    for (int64_t i = task.first_span; i < task.end_span; i++) {
        gather_span(view, task.kv_head, view.spans[i], rows);
        rows += view.spans[i].num_tokens * view.share() * view.size;
    }
}

// Keys [first, last) of the block at `key` that row r sees, relative to the block.
template <class T>
INLINE void sight(const View<T>& view, const Task& task, int64_t r, int64_t key, int64_t& first, int64_t& last) {
    first = task.first_key - key, last = task.end_key - key;
    if (task.first_span != task.end_span) return;
    int64_t position = task.position + r / view.share();
    first = std::max(view.lowest(position) - key, first);
    last = std::min(position + 1 - key, last);
}
