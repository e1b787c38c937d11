// The selective scan: every channel has N states, each with a decay of its own.
//
// Sixteen channels go through tokens together, one in each lane, so that nothing is summed across lanes. A task has up
// to 128 channels of a request, and takes them over a tile of tokens one sixteen after another: rows of tokens lie so far
// apart that visiting each for 32 bytes would cost more than the arithmetic. The order of operations of a channel is that
// of the tokens: a sequence gives the same bits however it was split.
#pragma once
#include "batch.h"

constexpr int64_t MAX_STATES = 256;

struct Mamba1 {
    Rows x, dt, z, out;  // z.data is null where there is no gate
    const float *A, *B, *C, *D, *dt_bias;  // [channels, states], rows of states, rows, [channels], [channels] or null
    int64_t B_stride, C_stride;
    float* states;  // [channels, states] for each slot
    int64_t slot_stride, channels, num_states;
};

// [channels, states] to a vector of channels for each state.
INLINE void load_columns(const float* rows, int64_t num_states, int n, vf* to) {
    if (num_states == LANES && n == LANES) {
        for (int c = 0; c < LANES; c++) to[c] = load(rows + c * LANES);
        return transpose(to);
    }
    for (int64_t k = 0; k < num_states; k++) {
        alignas(64) float column[LANES] = {};
        for (int c = 0; c < n; c++) column[c] = rows[c * num_states + k];
        to[k] = load(column);
    }
}
INLINE void store_columns(const vf* from, int64_t num_states, int n, float* rows) {
    if (num_states == LANES && n == LANES) {
        vf turned[LANES];
        std::copy_n(from, LANES, turned);
        transpose(turned);
        for (int c = 0; c < LANES; c++) store(rows + c * LANES, turned[c]);
        return;
    }
    for (int64_t k = 0; k < num_states; k++) {
        alignas(64) float column[LANES];
        store(column, from[k]);
        for (int c = 0; c < n; c++) rows[c * num_states + k] = column[c];
    }
}

constexpr int SCAN_GROUPS = 8;  // of sixteen channels, in a task
constexpr int SCAN_TOKENS = 8;
#if defined(__AVX512F__)
constexpr int SCAN_STATES = 8;  // states that are in registers together
#else
constexpr int SCAN_STATES = 4;
#endif

// Up to SCAN_TOKENS tokens of sixteen channels.
struct ScanTile {
    vf dt[SCAN_TOKENS], added[SCAN_TOKENS], y[SCAN_TOKENS];
    const float *B, *C;  // of the first token
    int64_t B_stride, C_stride;
    int num_tokens;
};

// STATES states from the k-th. Not inlined: they must stay in registers.
template <int STATES>
__attribute__((noinline)) void advance_states(ScanTile& tile, int64_t k, const vf* a, vf* states) {
    vf h[STATES];
    for (int i = 0; i < STATES; i++) h[i] = states[k + i];
    const float *B = tile.B + k, *C = tile.C + k;
    for (int t = 0; t < tile.num_tokens; t++, B += tile.B_stride, C += tile.C_stride) {
        const vf dt = tile.dt[t], added = tile.added[t];
        vf y = tile.y[t];
#pragma GCC unroll 8
        for (int i = 0; i < STATES; i++) {
            h[i] = h[i] * exp2_of_finite(a[k + i] * dt) + added * B[i];  // where most of the time goes
            y += h[i] * C[i];
        }
        tile.y[t] = y;
    }
    for (int i = 0; i < STATES; i++) states[k + i] = h[i];
}

// Tokens [begin, end), at most SCAN_TOKENS, of n channels.
INLINE void run_tile(const Mamba1& s, int64_t channel, int n, int64_t begin, int64_t end, const vf* a, vf* states) {
    ScanTile tile;
    tile.B = s.B + begin * s.B_stride, tile.C = s.C + begin * s.C_stride;
    tile.B_stride = s.B_stride, tile.C_stride = s.C_stride;
    tile.num_tokens = (int)(end - begin);
    const vf bias = load_or_zero(s.dt_bias, channel, n), skip = load_first(s.D + channel, n);
    for (int t = 0; t < tile.num_tokens; t++) {
        for (const Rows& rows : {s.dt, s.x, s.z, s.out}) rows.ask_for(end + t, channel);  // of the next tile
        const vf x = s.x.at(begin + t, channel, n), dt = softplus(s.dt.at(begin + t, channel, n) + bias);
        tile.dt[t] = dt, tile.added[t] = dt * x, tile.y[t] = skip * x;
    }
    int64_t k = 0;
    for (; k + SCAN_STATES <= s.num_states; k += SCAN_STATES) advance_states<SCAN_STATES>(tile, k, a, states);
    for (; k < s.num_states; k++) advance_states<1>(tile, k, a, states);
    for (int t = 0; t < tile.num_tokens; t++) {
        const vf gate = s.z.data ? silu(s.z.at(begin + t, channel, n)) : set1(1);
        s.out.put(begin + t, channel, tile.y[t] * gate, n);
    }
}

// `size` channels of a request, at most SCAN_GROUPS * LANES.
INLINE void scan_channels(const Mamba1& s, const Batch& batch, int64_t r, int64_t first, int64_t size) {
    vf a[SCAN_GROUPS * MAX_STATES], h[SCAN_GROUPS * MAX_STATES];  // [groups, states]
    auto each_group = [&](auto body) METHOD {
        vf *a_of = a, *h_of = h;
        for (int64_t i = 0; i < size; i += LANES, a_of += s.num_states, h_of += s.num_states)
            body(first + i, (int)std::min<int64_t>(LANES, size - i), a_of, h_of);
    };
    auto in_slot = [&](int64_t slot, int64_t channel) {
        return s.states + slot * s.slot_stride + channel * s.num_states;
    };
    each_group([&](int64_t channel, int n, vf* a, vf* h) {
        load_columns(s.A + channel * s.num_states, s.num_states, n, a);
        for (int64_t k = 0; k < s.num_states; k++) a[k] *= LOG2E, h[k] = vf{};
        if (batch.has_history[r]) load_columns(in_slot(batch.slots[r], channel), s.num_states, n, h);
    });
    auto run = [&](int64_t begin, int64_t end) {
        each_group([&](int64_t channel, int n, vf* a, vf* h) { run_tile(s, channel, n, begin, end, a, h); });
    };
    auto keep = [&](int64_t slot) {
        each_group([&](int64_t channel, int n, vf*, vf* h) {
            store_columns(h, s.num_states, n, in_slot(slot, channel));
        });
    };
    batch.walk(r, SCAN_TOKENS, run, keep);
    keep(batch.slots[r]);
}

void mamba1(const Mamba1& s, const Batch& batch, int num_threads) {
    const int64_t groups = (s.channels + LANES - 1) / LANES, shared = groups * batch.num_requests / (4 * num_threads);
    const int64_t size = std::clamp<int64_t>(shared, 1, SCAN_GROUPS) * LANES;
    const bool is_much = batch.num_tokens() * s.channels * s.num_states > SERIAL_WORK;
    each_of_batch(batch, (s.channels + size - 1) / size, num_threads, is_much, [&](int64_t r, int64_t piece) {
        scan_channels(s, batch, r, piece * size, std::min(size, s.channels - piece * size));
    });
}
