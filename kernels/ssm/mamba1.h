// The selective scan: every channel has N states, each with a decay of its own.
//
// Sixteen channels go through a request's tokens together, one in each lane, so that nothing is summed across lanes; the
// 16 states that they usually have stay in registers. The order of operations is that of the tokens: a sequence gives
// the same bits however it was split.
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

// Sixteen rows of sixteen become columns: halves, quarters, eighths and sixteenths change places across the diagonal.
INLINE void transpose(vf* rows) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2) {
        const vi upper = (lane & width) != 0, low = upper ? lane - width + LANES : lane, high = low + width;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & width) continue;
            const vf a = rows[i], b = rows[i + width];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + width] = __builtin_shuffle(a, b, high);
        }
    }
}

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
        memcpy(turned, from, sizeof turned);
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

constexpr int64_t AHEAD_TOKENS = 8;

// Tokens [begin, end) for n channels. NUM is the number of states, or 0: any. Not inlined: the states must stay in
// registers.
template <int NUM>
__attribute__((noinline)) void advance(const Mamba1& s, int64_t channel, int n, int64_t begin, int64_t end, const vf* a,
                                       vf* states) {
    const int64_t num_states = NUM ? NUM : s.num_states;
    vf held[NUM ? NUM : 1];
    vf* h = NUM ? held : states;
    for (int k = 0; k < NUM; k++) held[k] = states[k];
    const vf bias = load_or_zero(s.dt_bias, channel, n), skip = load_first(s.D + channel, n);
    auto step_of = [&](int64_t t) METHOD { return softplus(s.dt.at(t, channel, n) + bias); };
    vf next = begin < end ? step_of(begin) : vf{};
    for (int64_t t = begin; t < end; t++) {
        for (const Rows& rows : {s.dt, s.x, s.z}) rows.ask_for(t + AHEAD_TOKENS, channel);
        vf dt = next, x = s.x.at(t, channel, n);
        // Long chains of operations, which run beside those of the states.
        const vf gate = s.z.data ? silu(s.z.at(t, channel, n)) : set1(1);
        if (t + 1 < end) next = step_of(t + 1);
        vf added = dt * x, y[2] = {skip * x, vf{}};
        const float *B = s.B + t * s.B_stride, *C = s.C + t * s.C_stride;
#pragma GCC unroll 16
        for (int64_t k = 0; k < num_states; k++) {
            h[k] = h[k] * exp2_of_finite(a[k] * dt) + added * B[k];  // where nearly all the time goes
            y[k & 1] += h[k] * C[k];
        }
        s.out.put(t, channel, (y[0] + y[1]) * gate, n);
    }
    for (int k = 0; k < NUM; k++) states[k] = held[k];
}

INLINE void scan_channels(const Mamba1& s, const Batch& batch, int64_t r, int64_t channel, int n) {
    vf a[MAX_STATES], h[MAX_STATES];
    auto in_slot = [&](int64_t slot) { return s.states + slot * s.slot_stride + channel * s.num_states; };
    load_columns(s.A + channel * s.num_states, s.num_states, n, a);
    for (int64_t k = 0; k < s.num_states; k++) a[k] *= LOG2E, h[k] = vf{};
    if (batch.has_history[r]) load_columns(in_slot(batch.slots[r]), s.num_states, n, h);
    auto keep = [&](int64_t slot) { store_columns(h, s.num_states, n, in_slot(slot)); };
    auto run = [&](int64_t begin, int64_t end) {
        s.num_states == 16 ? advance<16>(s, channel, n, begin, end, a, h) : advance<0>(s, channel, n, begin, end, a, h);
    };
    batch.walk(r, INT64_MAX, run, keep);
    keep(batch.slots[r]);
}

void mamba1(const Mamba1& s, const Batch& batch, int num_threads) {
    const int64_t pieces = (s.channels + LANES - 1) / LANES;
    const bool is_much = batch.num_tokens() * s.channels * s.num_states > SERIAL_WORK;
    each_of_batch(batch, pieces, num_threads, is_much, [&](int64_t r, int64_t piece) {
        scan_channels(s, batch, r, piece * LANES, (int)std::min<int64_t>(LANES, s.channels - piece * LANES));
    });
}
