// Many rows (prefill): keys and values of a block are laid in lines once, then multiplied tile by tile.
#pragma once
#include "view.h"

// A 16 x 16 transpose of 32-bit words, by swapping ever larger blocks.
INLINE void transpose(vu* v) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        vi is_odd = (lane & step) != 0;
        vi low = is_odd ? lane + (LANES - step) : lane, high = is_odd ? lane + LANES : lane + step;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                vu a = v[i], b = v[i + step];
                v[i] = __builtin_shuffle(a, b, low);
                v[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

// Rows of the key block's keys, null where no row of the task sees one.
template <class T>
struct BlockRows {
    const T* k[KEY_BLOCK];
    const T* v[KEY_BLOCK];
};

template <class T>
INLINE BlockRows<T> find_rows(const View<T>& view, const Task& task, int64_t key) {
    BlockRows<T> rows = {};
    int64_t end = std::min(key + KEY_BLOCK, task.end_key);
    for (int64_t next = std::max(key, task.first_key); next < end;) {
        Segment segment = segment_at(view, task, next, end);
        for (int64_t i = 0; i < segment.num_keys; i++) {
            rows.k[next - key + i] = view.k + segment.k_offset + i * view.k_slot;
            rows.v[next - key + i] = view.v + segment.v_offset + i * view.v_slot;
        }
        next += segment.num_keys;
    }
    return rows;
}

// Lines for the product with queries: [size / DEPTH][keys][DEPTH], which is a transpose of 32-bit words.
template <class T>
void lay_keys(const BlockRows<T>& rows, uint32_t* lines, int64_t size) {
    const int64_t words = size * sizeof(T) / 4;
    for (int64_t tile = 0; tile < KEY_TILES; tile++)
        for (int64_t word = 0; word < words; word += LANES) {
            vu v[LANES] = {};
            int64_t there = std::min<int64_t>(LANES, words - word);
            for (int i = 0; i < LANES; i++) {
                const T* row = rows.k[tile * LANES + i];
                if (row) memcpy(&v[i], (const uint32_t*)row + word, there * 4);
            }
            transpose(v);
            for (int64_t i = 0; i < there; i++) memcpy(lines + (word + i) * KEY_BLOCK + tile * LANES, &v[i], sizeof v[i]);
        }
}

// Lines for the product with weights: [keys / DEPTH][size][DEPTH].
template <class T>
void lay_values(const BlockRows<T>& rows, T* lines, int64_t size) {
    constexpr int depth = Line<T>::DEPTH;
    for (int64_t i = 0; i < KEY_BLOCK; i += depth)
        for (int64_t d = 0; d < size; d += LANES) {
            vu line = value_line(rows.v[i], rows.v[i + depth - 1], d);
            memcpy(lines + i * size + d * depth, &line, sizeof line);
        }
}

struct ScoreSink {
    float* scores;
    METHOD vf start(int64_t, int64_t) { return vf{}; }
    METHOD void finish(int64_t row, int64_t tile, vf x) { store(scores + row * KEY_BLOCK + tile * LANES, x); }
};

struct SumSink {
    float* sums;
    int64_t size;
    const float* keep;
    METHOD vf start(int64_t row, int64_t tile) { return load(sums + row * size + tile * LANES) * keep[row]; }
    METHOD void finish(int64_t row, int64_t tile, vf x) { store(sums + row * size + tile * LANES, x); }
};

// Memory of one thread for tasks of up to `rows` rows.
template <class T>
struct ManyRowsScratch {
    T *q, *weights, *keys, *values;
    float *scores, *keep, *state, *folded;

    static int64_t num_bytes(int64_t rows, int64_t size, int64_t value_size) {
        return at(nullptr, rows, size, value_size).second;
    }
    static std::pair<ManyRowsScratch, int64_t> at(char* memory, int64_t rows, int64_t size, int64_t value_size) {
        int64_t used = 0;
        auto take = [&](int64_t bytes) { return memory + std::exchange(used, used + (bytes + 63) / 64 * 64); };
        ManyRowsScratch s;
        s.q = (T*)take(rows * size * sizeof(T));
        s.weights = (T*)take(rows * KEY_BLOCK * sizeof(T));
        s.keys = (T*)take(KEY_BLOCK * size * sizeof(T));
        s.values = (T*)take(KEY_BLOCK * value_size * sizeof(T));
        s.scores = (float*)take(rows * KEY_BLOCK * 4);
        s.keep = (float*)take(rows * 4);
        s.state = (float*)take(State::num_floats(rows, value_size) * 4);
        s.folded = (float*)take(State::num_floats(rows, value_size) * 4);
        return {s, used};
    }
};

template <class T>
void attend_many_rows(const View<T>& view, const Task& task, char* memory) {
    const int64_t rows = task.num_tokens * view.share(), size = view.size, value_size = view.value_size;
    const int64_t depth = Line<T>::DEPTH;
    auto scratch = ManyRowsScratch<T>::at(memory, rows, size, value_size).first;
    State state = State::at(task.is_split ? view.partials + task.partial : scratch.state, rows, value_size);
    State folded = State::at(scratch.folded, rows, value_size);
    state.clear(rows);
    if (view.is_exact) folded.clear(rows);
    gather_queries(view, task, scratch.q);
    for (int64_t key = task.first_key / KEY_BLOCK * KEY_BLOCK; key < task.end_key; key += KEY_BLOCK) {
        BlockRows<T> found = find_rows(view, task, key);
        lay_keys(found, (uint32_t*)scratch.keys, size);
        ScoreSink score_sink{scratch.scores};
        multiply(Product<T>{scratch.q, size, scratch.keys, KEY_BLOCK * depth, size / depth}, rows, KEY_TILES, score_sink);
        for (int64_t r = 0; r < rows; r++) {
            int64_t first, last;
            sight(view, task, r, key, first, last);
            scratch.keep[r] = soften(scratch.scores + r * KEY_BLOCK, scratch.weights + r * KEY_BLOCK, first, last,
                                     view.scale, view.softcap, state.high[r], state.total[r]);
        }
        lay_values(found, scratch.values, value_size);
        SumSink sum_sink{state.sums, value_size, scratch.keep};
        multiply(Product<T>{scratch.weights, KEY_BLOCK, scratch.values, value_size * depth, KEY_BLOCK / depth}, rows,
                 value_size / LANES, sum_sink);
        const int64_t next = key + KEY_BLOCK;
        if (view.is_exact && !task.is_split && (next % SPLIT_KEYS == 0 || next >= task.end_key)) {
            for (int64_t r = 0; r < rows; r++) fold(folded, state, r, r);
            state.clear(rows);
        }
    }
    if (!task.is_split) finish_rows(view, task, view.is_exact ? folded : state);
}
