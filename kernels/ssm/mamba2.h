// Mamba-2's scan: a head of D rows has N states a row and one decay.
//
// The recurrence itself, not its form of matrix products: with a piece of a row's states in registers over a few tokens
// it takes a fifth more arithmetic, no scratch, and gives the same bits however a sequence was split. Single tokens take
// the same path.
#pragma once
#include "batch.h"

constexpr int TILE_TOKENS = 8;  // whose B and C stay in the nearest cache while all rows of the head go over them
constexpr int PIECE = 8;  // vectors of a row's states that are in registers together

struct Mamba2 {
    Rows x, dt, out;
    const float *A, *B, *C, *D, *dt_bias;  // [heads], [tokens, groups, states] twice, [heads], [heads] or null
    float lowest_dt, highest_dt;
    float* states;  // [heads, head_size, states] for each slot
    int64_t slot_stride, heads, head_size, groups, num_states;
};

// Up to TILE_TOKENS tokens of one head and up to LANES of its rows.
struct Tile {
    int64_t num_tokens;
    float decay[LANES];  // by token
    alignas(64) float added[TILE_TOKENS][LANES];  // dt * x, by token and row
    vf sums[TILE_TOKENS][LANES];  // of state * C, by token and row, not yet summed across lanes
    const float *B, *C;  // of the first token, at the first state of the piece
    int64_t stride;  // from token to token
};

// ROWS rows, whose states are row_stride apart, in pieces of VECTORS vectors, the last with `last` lanes. `from` is null
// for states of zero. Not inlined: the states must stay in registers.
template <int VECTORS, int ROWS>
__attribute__((noinline)) void advance(Tile& tile, int row, const float* from, float* to, int64_t row_stride, int last) {
    vf h[ROWS][VECTORS];
    auto lanes = [&](int v) METHOD { return v == VECTORS - 1 ? last : LANES; };
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            h[i][v] = from ? load_first(from + i * row_stride + v * LANES, lanes(v)) : vf{};
    const float *B = tile.B, *C = tile.C;
    for (int64_t t = 0; t < tile.num_tokens; t++, B += tile.stride, C += tile.stride) {
        const vf decay = set1(tile.decay[t]);
        vf added[ROWS], sum[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) added[i] = set1(tile.added[t][row + i]), sum[i] = tile.sums[t][row + i];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            vf b = load_first(B + v * LANES, lanes(v)), c = load_first(C + v * LANES, lanes(v));
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                h[i][v] = h[i][v] * decay + added[i] * b;
                sum[i] += h[i][v] * c;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) tile.sums[t][row + i] = sum[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_first(to + i * row_stride + v * LANES, h[i][v], lanes(v));
}

template <int VECTORS>
void advance_rows(Tile& tile, int num_rows, const float* from, float* to, int64_t row_stride, int last) {
    constexpr int ROWS = VECTORS > 4 ? 2 : 4;
    int row = 0;
    for (; row + ROWS <= num_rows; row += ROWS)
        advance<VECTORS, ROWS>(tile, row, from ? from + row * row_stride : from, to + row * row_stride, row_stride, last);
    for (; row < num_rows; row++)
        advance<VECTORS, 1>(tile, row, from ? from + row * row_stride : from, to + row * row_stride, row_stride, last);
}

// One piece of the states of the tile's rows.
template <int VECTORS>
void advance_piece(int vectors, Tile& tile, int num_rows, const float* from, float* to, int64_t row_stride, int last) {
    if constexpr (VECTORS > 1)
        if (vectors < VECTORS)
            return advance_piece<VECTORS - 1>(vectors, tile, num_rows, from, to, row_stride, last);
    advance_rows<VECTORS>(tile, num_rows, from, to, row_stride, last);
}

struct Head {
    const Mamba2& s;
    int64_t head;

    float* states(int64_t slot) const { return s.states + slot * s.slot_stride + head * size(); }
    int64_t size() const { return s.head_size * s.num_states; }

    // Tokens [begin, end), at most TILE_TOKENS; `from` is null for states of zero, else may be `to`.
    void run(int64_t begin, int64_t end, const float* from, float* to) const {
        Tile tile;
        tile.num_tokens = end - begin;
        tile.stride = s.groups * s.num_states;
        alignas(64) float dt[LANES] = {};
        for (int64_t t = begin; t < end; t++) dt[t - begin] = s.dt.at(t, head);
        vf step = softplus(load(dt) + (s.dt_bias ? s.dt_bias[head] : 0));
        step = select(step < s.lowest_dt, set1(s.lowest_dt), step);
        step = select(step > s.highest_dt, set1(s.highest_dt), step);
        store(dt, step);
        store(tile.decay, exp(step * s.A[head]));
        for (int64_t row = 0; row < s.head_size; row += LANES) {
            int num_rows = (int)std::min<int64_t>(LANES, s.head_size - row);
            int64_t column = head * s.head_size + row, offset = row * s.num_states;
            for (int64_t t = 0; t < tile.num_tokens; t++) {
                store(tile.added[t], dt[t] * s.x.at(begin + t, column, num_rows));
                for (vf& sum : tile.sums[t]) sum = vf{};
            }
            run_rows(tile, begin, num_rows, from ? from + offset : from, to + offset);
            for (int64_t t = 0; t < tile.num_tokens; t++) {
                vf skip = s.D[head] * s.x.at(begin + t, column, num_rows);
                s.out.put(begin + t, column, skip + sums(tile.sums[t]), num_rows);
            }
        }
    }

    void run_rows(Tile& tile, int64_t begin, int num_rows, const float* from, float* to) const {
        const int64_t group = (begin * s.groups + head / (s.heads / s.groups)) * s.num_states;
        for (int64_t k = 0; k < s.num_states; k += PIECE * LANES) {
            int64_t left = std::min<int64_t>(PIECE * LANES, s.num_states - k), vectors = (left + LANES - 1) / LANES;
            tile.B = s.B + group + k;
            tile.C = s.C + group + k;
            advance_piece<PIECE>((int)vectors, tile, num_rows, from ? from + k : from, to + k, s.num_states,
                                 (int)(left - (vectors - 1) * LANES));
        }
    }
};

void mamba2(const Mamba2& s, const Batch& batch, int num_threads) {
    const bool is_much = batch.num_tokens() * s.heads * s.head_size * s.num_states > SERIAL_WORK;
    each_of_batch(batch, s.heads, num_threads, is_much, [&](int64_t r, int64_t h) {
        Head head{s, h};
        float* states = head.states(batch.slots[r]);
        const float* from = batch.has_history[r] ? states : nullptr;
        auto run = [&](int64_t begin, int64_t end) {
            head.run(begin, end, from, states);
            from = states;
        };
        auto keep = [&](int64_t slot) { memcpy(head.states(slot), states, head.size() * sizeof(float)); };
        batch.walk(r, TILE_TOKENS, run, keep);
    });
}
