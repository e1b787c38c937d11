// Causal convolution of each channel over the last W tokens of its request.
#pragma once
#include "batch.h"

constexpr int MAX_WIDTH = 8;

struct Conv {
    Rows x, out;
    const float *weight, *bias;  // [channels, width], [channels] or null
    Rows states;  // a row for each slot: [channels, width - 1], the oldest input first
    int64_t channels, width;
    bool is_silu;
};

// Up to LANES channels of one request.
template <int W>
struct ConvChannels {
    const Conv& conv;
    const Batch& batch;
    int64_t request, channel;
    int n;
    vf history[W];  // the W - 1 inputs before the first token

    void run() {
        load_history();
        convolve();
        int64_t begin = batch.begin(request);
        batch.walk(request, INT64_MAX, [&](int64_t, int64_t end) { begin = end; },
                   [&](int64_t slot) { store_window(slot, begin); });
        store_window(batch.slots[request], batch.end(request));
    }

    void load_history() {
        for (int k = 0; k < W - 1; k++) {
            alignas(64) float inputs[LANES] = {};
            if (batch.has_history[request])
                for (int c = 0; c < n; c++)
                    inputs[c] = conv.states.at(batch.slots[request], (channel + c) * (W - 1) + k);
            history[k] = load(inputs);
        }
    }

    void convolve() {
        alignas(64) float columns[W][LANES] = {};
        for (int c = 0; c < n; c++)
            for (int k = 0; k < W; k++) columns[k][c] = conv.weight[(channel + c) * W + k];
        vf weight[W], window[W], bias = load_or_zero(conv.bias, channel, n);
        for (int k = 0; k < W; k++) weight[k] = load(columns[k]), window[k] = history[k];
        for (int64_t t = batch.begin(request); t < batch.end(request); t++) {
            window[W - 1] = conv.x.at(t, channel, n);
            vf y = bias;
#pragma GCC unroll 8
            for (int k = 0; k < W; k++) y += weight[k] * window[k];
            conv.out.put(t, channel, conv.is_silu ? silu(y) : y, n);
#pragma GCC unroll 8
            for (int k = 0; k < W - 1; k++) window[k] = window[k + 1];
        }
    }

    // The last W - 1 inputs before a token.
    void store_window(int64_t slot, int64_t end) {
        for (int k = 0; k < W - 1; k++) {
            int64_t token = end - (W - 1) + k, before = token - batch.begin(request) + W - 1;
            vf input = before < W - 1 ? history[before] : conv.x.at(token, channel, n);
            alignas(64) float values[LANES];
            store(values, input);
            for (int c = 0; c < n; c++) conv.states.put(slot, (channel + c) * (W - 1) + k, values[c]);
        }
    }
};

template <int W>
void causal_conv(const Conv& conv, const Batch& batch, int num_threads) {
    if constexpr (W > 1)
        if (conv.width < W) return causal_conv<W - 1>(conv, batch, num_threads);
    const int64_t pieces = (conv.channels + LANES - 1) / LANES;
    const bool is_much = batch.num_tokens() * conv.channels * W > SERIAL_WORK;
    each_of_batch(batch, pieces, num_threads, is_much, [&](int64_t r, int64_t piece) {
        int n = (int)std::min<int64_t>(LANES, conv.channels - piece * LANES);
        ConvChannels<W>{conv, batch, r, piece * LANES, n, {}}.run();
    });
}
