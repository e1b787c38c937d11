// Many rows (prefill): keys and values of a block are laid in lines once, then multiplied tile by tile.
#pragma once
#include "amx.h"
#include "view.h"

constexpr int64_t MANY_KEYS = 256;  // keys handled at once, cut at absolute multiples: more would leave the cache,
                                    // with fewer adding up what they give takes longer than they do
constexpr int64_t KEY_STEP = 32;    // and those at its ends that no row sees are left out in so many at a time

// Keys [start, start + num_keys) of a task, and where each lies: null where no row of the task sees it.
template <class T>
struct KeyBlock {
    int64_t start, num_keys;
    const T* k[MANY_KEYS];
    const T* v[MANY_KEYS];

    // The block that `key` is in, which a row of the task sees.
    KeyBlock(const View<T>& view, const Task& task, int64_t key) : k{}, v{} {
        const int64_t end = std::min((key / MANY_KEYS + 1) * MANY_KEYS, task.end_key);
        start = key / KEY_STEP * KEY_STEP;
        num_keys = (end - start + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
        while (key < end) {
            const Segment segment = segment_at(view, task, key, end);
            for (int64_t i = 0; i < segment.num_keys; i++) {
                k[key - start + i] = view.k + segment.k_offset + i * view.k_slot;
                v[key - start + i] = view.v + segment.v_offset + i * view.v_slot;
            }
            key += segment.num_keys;
        }
    }
};

// Lines (tile.h) of a matrix, in panels of PANEL_TILES tiles that stay in the nearest cache while all rows meet them:
// [panels][inputs / DEPTH][tiles of the panel][LANES][DEPTH].
constexpr int64_t PANEL_TILES = 4;
struct Panels {
    int64_t steps, num_tiles;  // steps: inputs / DEPTH
    int64_t tiles_of(int64_t panel) const { return std::min(PANEL_TILES, num_tiles - panel * PANEL_TILES); }
    // In 32-bit words.
    int64_t stride_of(int64_t tile) const { return tiles_of(tile / PANEL_TILES) * LANES; }
    int64_t place_of(int64_t tile) const {
        return tile / PANEL_TILES * PANEL_TILES * LANES * steps + tile % PANEL_TILES * LANES;
    }
};

// Panels of keys: of each word of a key a line, which is a transpose of 32-bit words.
template <class T>
void lay_keys(const KeyBlock<T>& block, uint32_t* lines, const Panels& panels) {
    const int64_t words = panels.steps;
    for (int64_t tile = 0; tile < panels.num_tiles; tile++) {
        uint32_t* to = lines + panels.place_of(tile);
        const int64_t stride = panels.stride_of(tile);
        for (int64_t word = 0; word < words; word += LANES) {
            vf v[LANES];
            const int there = (int)std::min<int64_t>(LANES, words - word);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const T* row = block.k[tile * LANES + i];
                v[i] = row ? load_first((const float*)row + word, there) : vf{};
            }
            transpose(v);
            for (int i = 0; i < there; i++) write(to + (word + i) * stride, v[i]);
        }
    }
}

// Panels of values: of each DEPTH keys a line.
template <class T>
void lay_values(const KeyBlock<T>& block, uint32_t* lines, const Panels& panels) {
    constexpr int depth = Line<T>::DEPTH;
    for (int64_t step = 0; step < panels.steps; step++)
        for (int64_t tile = 0; tile < panels.num_tiles; tile++) {
            vu line = value_line(block.v[step * depth], block.v[step * depth + depth - 1], tile * LANES);
            write(lines + panels.place_of(tile) + step * panels.stride_of(tile), line);
        }
}

template <bool ADDS>
struct Sums {
    float* sums;
    int64_t stride;
    METHOD vf start(int64_t row, int64_t tile) { return ADDS ? load(sums + row * stride + tile * LANES) : vf{}; }
    METHOD void finish(int64_t row, int64_t tile, vf x) { store(sums + row * stride + tile * LANES, x); }
};

// sums[num_rows][num_tiles][LANES] = rows, x_stride apart, times panels; added to what is there where ADDS.
template <bool ADDS, class T>
void multiply_panels(const T* x, int64_t x_stride, int64_t num_rows, const uint32_t* lines, const Panels& panels,
                     float* sums) {
    const int64_t stride = panels.num_tiles * LANES;
    for (int64_t tile = 0; tile < panels.num_tiles; tile += PANEL_TILES) {
        const int64_t num_tiles = panels.tiles_of(tile / PANEL_TILES);
        Product<T> p{x, x_stride, (const T*)(lines + panels.place_of(tile)), panels.stride_of(tile) * Line<T>::DEPTH,
                     panels.steps};
        Sums<ADDS> sink{sums + tile * LANES, stride};
#if defined(HAS_AMX)
        if constexpr (std::is_same_v<T, bf16>)
            if (may_use_amx()) {
                AmxRegisters registers;
                for (int64_t row = 0; row < num_rows; row += AMX_ROWS, p.x += AMX_ROWS * p.row_stride)
                    accumulate_by_amx<ADDS ? 0 : FROM_ZERO>(p, (int)std::min<int64_t>(AMX_ROWS, num_rows - row),
                                                            num_tiles, sink.sums + row * stride,
                                                            stride * sizeof(float), registers);
                continue;
            }
#endif
        multiply(p, num_rows, num_tiles, sink);
    }
}

// Memory of one thread for tasks of up to `rows` rows.
template <class T>
struct ManyRowsScratch {
    T *q, *weights;
    uint32_t *keys, *values;
    float *scores, *state, *folded;

    static int64_t num_bytes(int64_t rows, int64_t size, int64_t value_size) {
        return at(nullptr, rows, size, value_size).second;
    }
    static std::pair<ManyRowsScratch, int64_t> at(char* memory, int64_t rows, int64_t size, int64_t value_size) {
        int64_t used = 0;
        auto take = [&](int64_t bytes) { return memory + std::exchange(used, used + (bytes + 63) / 64 * 64); };
        ManyRowsScratch s;
        s.q = (T*)take(rows * size * sizeof(T));
        s.weights = (T*)take(rows * MANY_KEYS * sizeof(T));
        s.keys = (uint32_t*)take(MANY_KEYS * size * sizeof(T));
        s.values = (uint32_t*)take(MANY_KEYS * value_size * sizeof(T));
        s.scores = (float*)take(rows * MANY_KEYS * 4);
        s.state = (float*)take(State::num_floats(rows, value_size) * 4);
        s.folded = (float*)take(State::num_floats(rows, value_size) * 4);
        return {s, used};
    }
};

template <class T>
void attend_many_rows(const View<T>& view, const Task& task, char* memory) {
    const int64_t rows = task.num_tokens * view.share(), size = view.size, value_size = view.value_size;
    constexpr int64_t depth = Line<T>::DEPTH;
    auto scratch = ManyRowsScratch<T>::at(memory, rows, size, value_size).first;
    State state = State::at(task.is_split ? view.partials + task.partial : scratch.state, rows, value_size);
    State folded = State::at(scratch.folded, rows, value_size);
    state.clear(rows);
    if (view.is_exact) folded.clear(rows);
    gather_queries(view, task, scratch.q);
    for (int64_t key = task.first_key; key < task.end_key;) {
        const KeyBlock<T> block(view, task, key);
        const int64_t num_keys = block.num_keys;
        const Panels keys{size / depth, num_keys / LANES}, values{num_keys / depth, value_size / LANES};
        lay_keys(block, scratch.keys, keys);
        multiply_panels<false>(scratch.q, size, rows, scratch.keys, keys, scratch.scores);
        for (int64_t r = 0; r < rows; r++) {
            int64_t first, last;
            sight(view, task, r, block.start, first, last);
            const float keep =
                soften<MANY_KEYS / LANES>(scratch.scores + r * num_keys, scratch.weights + r * num_keys,
                                          num_keys / LANES, first, last, view.scale, view.softcap, state.high[r],
                                          state.total[r]);
            if (keep != 1) scale(state.sums + r * value_size, keep, value_size);
        }
        lay_values(block, scratch.values, values);
        multiply_panels<true>(scratch.weights, num_keys, rows, scratch.values, values, state.sums);
        key = (key / MANY_KEYS + 1) * MANY_KEYS;
        if (view.is_exact && !task.is_split && (key % SPLIT_KEYS == 0 || key >= task.end_key)) {
            for (int64_t r = 0; r < rows; r++) fold(folded, state, r, r);
            state.clear(rows);
        }
    }
    if (!task.is_split) finish_rows(view, task, view.is_exact ? folded : state);
}
