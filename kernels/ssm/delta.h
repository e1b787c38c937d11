// The gated delta rule: a head keeps a matrix [keys, values]. A token lets it decay, reads at its key what it holds,
// and writes there a part of what its value differs by.
//
// The recurrence itself: in float32 it takes about as much arithmetic as its form of matrix products, no scratch, and
// gives the same bits however a sequence was split. What a token reads is summed up while the state is in registers to
// take in the token before it, so that a state is loaded and stored once a token, from the nearest cache.
#pragma once
#include <cmath>
#include <vector>

#include "batch.h"
#include "rows.h"

constexpr int DELTA_TOKENS = 16;  // that a strip of columns goes through while it is in the nearest cache
constexpr int STRIP = 2;  // vectors of columns in a strip
constexpr float KEY_EPS = 1e-6f;

struct DeltaRule {
    Rows q, k, v, dt, b, out;
    const float *A, *dt_bias;  // [heads], [heads, decays] or null
    float beta_scale;
    float* states;  // [heads, key_size, value_size] for each slot
    int64_t slot_stride, heads, groups, key_size, value_size, decays;  // decays: key_size, or 1 for the whole head
};

// What a token does to one head, by row of the state.
struct DeltaToken {
    float *decay, *k, *decayed_k, *decayed_q;  // [key_size]
    float beta, qk;
};

// Takes a token in (IS_WRITTEN), then sums up what the next one reads (IS_READ). strip: [key_size, V vectors]. Not
// inlined: the sums must stay in registers.
template <int V, bool IS_WRITTEN, bool IS_READ>
__attribute__((noinline)) void pass(float* strip, int64_t key_size, const DeltaToken& written, const vf* delta,
                                    const DeltaToken& read, vf* at_key, vf* at_query) {
    vf step[V], k_sum[V], q_sum[V];
    for (int v = 0; v < V; v++) step[v] = IS_WRITTEN ? delta[v] : vf{}, k_sum[v] = q_sum[v] = vf{};
    const float *decay = written.decay, *k = written.k, *decayed_k = read.decayed_k, *decayed_q = read.decayed_q;
    for (int64_t n = 0; n < key_size; n++, strip += V * LANES) {
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            vf state = load(strip + v * LANES);
            if (IS_WRITTEN) {
                state = state * decay[n] + step[v] * k[n];
                store(strip + v * LANES, state);
            }
            if (IS_READ) {
                k_sum[v] += state * decayed_k[n];
                q_sum[v] += state * decayed_q[n];
            }
        }
    }
    if (IS_READ)
        for (int v = 0; v < V; v++) at_key[v] = k_sum[v], at_query[v] = q_sum[v];
}

struct DeltaHead {
    const DeltaRule& s;
    int64_t head;
    std::vector<float> scratch;
    float* strip;  // columns of the state, side by side: in a state a power of two apart they would fight for the cache
    DeltaToken tokens[DELTA_TOKENS];

    DeltaHead(const DeltaRule& s, int64_t head)
        : s(s), head(head), scratch((4 * DELTA_TOKENS + STRIP * LANES) * s.key_size + LANES) {
        strip = (float*)(((uintptr_t)scratch.data() + 63) / 64 * 64);
        float* next = strip + STRIP * LANES * s.key_size;
        for (DeltaToken& token : tokens)
            for (float** part : {&token.decay, &token.k, &token.decayed_k, &token.decayed_q})
                *part = next, next += s.key_size;
    }

    float* state(int64_t slot) const { return s.states + slot * s.slot_stride + head * size(); }
    int64_t size() const { return s.key_size * s.value_size; }

    void clear(int64_t slot) const { std::fill_n(state(slot), size(), 0.0f); }
    void copy(int64_t from, int64_t to) const { std::copy_n(state(from), size(), state(to)); }

    // Tokens [begin, end), at most DELTA_TOKENS.
    void run(int64_t begin, int64_t end, int64_t slot) {
        for (int64_t t = begin; t < end; t++) prepare(tokens[t - begin], t);
        for (int64_t column = 0; column < s.value_size; column += STRIP * LANES) {
            int64_t left = std::min<int64_t>(STRIP * LANES, s.value_size - column);
            if (left > LANES)
                run_strip<2>(begin, (int)(end - begin), slot, column, (int)left - LANES);
            else
                run_strip<1>(begin, (int)(end - begin), slot, column, (int)left);
        }
    }

    void prepare(DeltaToken& token, int64_t t) const {
        const int64_t column = head / (s.heads / s.groups) * s.key_size;
        vf q_squares = vf{}, k_squares = vf{}, products = vf{};
        for_pieces(s.key_size, [&](int64_t i, int n) METHOD {
            vf q = s.q.at(t, column + i, n), k = s.k.at(t, column + i, n);
            q_squares += q * q, k_squares += k * k, products += q * k;
        });
        const float q_scale = 1 / std::sqrt((sum(q_squares) + KEY_EPS) * (float)s.key_size);
        const float k_scale = 1 / std::sqrt(sum(k_squares) + KEY_EPS);
        token.qk = sum(products) * q_scale * k_scale;
        token.beta = s.beta_scale / (1 + std::exp(-s.b.at(t, head)));
        float only = 0;
        if (s.decays == 1) only = decay_at(t, 0, 1)[0];
        for_pieces(s.key_size, [&](int64_t i, int n) METHOD {
            vf decay = s.decays == 1 ? set1(only) : decay_at(t, i, n);
            vf q = s.q.at(t, column + i, n) * q_scale, k = s.k.at(t, column + i, n) * k_scale;
            store_first(token.decay + i, decay, n);
            store_first(token.k + i, k, n);
            store_first(token.decayed_k + i, k * decay, n);
            store_first(token.decayed_q + i, q * decay, n);
        });
    }

    vf decay_at(int64_t t, int64_t i, int n) const {
        const int64_t column = head * s.decays + i;
        return exp(softplus(s.dt.at(t, column, n) + load_or_zero(s.dt_bias, column, n)) * s.A[head]);
    }

    template <int V>
    void run_strip(int64_t begin, int num_tokens, int64_t slot, int64_t column, int last) {
        auto lanes = [&](int v) { return v == V - 1 ? last : LANES; };
        float* columns = state(slot) + column;
        for (int64_t n = 0; n < s.key_size; n++)
            for (int v = 0; v < V; v++)
                store(strip + (n * V + v) * LANES, load_first(columns + n * s.value_size + v * LANES, lanes(v)));
        vf at_key[V], at_query[V], delta[V];
        pass<V, false, true>(strip, s.key_size, tokens[0], nullptr, tokens[0], at_key, at_query);
        for (int i = 0; i < num_tokens; i++) {
            const DeltaToken& token = tokens[i];
            for (int v = 0; v < V; v++) {
                const int64_t at = head * s.value_size + column + v * LANES;
                delta[v] = (s.v.at(begin + i, at, lanes(v)) - at_key[v]) * token.beta;
                s.out.put(begin + i, at, at_query[v] + delta[v] * token.qk, lanes(v));
            }
            if (i + 1 < num_tokens)
                pass<V, true, true>(strip, s.key_size, token, delta, tokens[i + 1], at_key, at_query);
            else
                pass<V, true, false>(strip, s.key_size, token, delta, token, at_key, at_query);
        }
        for (int64_t n = 0; n < s.key_size; n++)
            for (int v = 0; v < V; v++)
                store_first(columns + n * s.value_size + v * LANES, load(strip + (n * V + v) * LANES), lanes(v));
    }
};

void delta_rule(const DeltaRule& s, const Batch& batch, int num_threads) {
    const bool is_much = batch.num_tokens() * s.heads * s.key_size * s.value_size > SERIAL_WORK;
    each_of_batch(batch, s.heads, num_threads, is_much, [&](int64_t r, int64_t head) {
        const int64_t slot = batch.slots[r];
        DeltaHead work(s, head);
        if (!batch.has_history[r]) work.clear(slot);
        batch.walk(r, DELTA_TOKENS, [&](int64_t begin, int64_t end) { work.run(begin, end, slot); },
                   [&](int64_t target) { work.copy(slot, target); });
    });
}
