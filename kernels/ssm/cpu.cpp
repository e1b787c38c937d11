// The ops of recurrent layers. Tensors of either dtype come as pointer, elements from row to row, and whether bf16.

#include <cmath>
#include <vector>

#include "conv.h"
#include "delta.h"
#include "mamba1.h"
#include "mamba2.h"
#include "rows.h"
#include "team.h"

namespace {

// Norms each group of columns of x * act(gate), or of x alone and gates it then. `scratch` holds a group.
template <bool IS_NORM_FIRST, bool IS_SILU>
void gated_norm(Rows x, Rows gate, Rows out, const Weight& weight, int64_t row, int64_t start, int64_t size, float eps,
                float* scratch) {
    vf squares = vf{};
    auto activated = [](vf x) METHOD { return IS_SILU ? silu(x) : sigmoid(x); };
    for_pieces(size, [&](int64_t i, int n) METHOD {
        vf value = x.at(row, start + i, n);
        if (!IS_NORM_FIRST) value *= activated(gate.at(row, start + i, n));
        store_first(scratch + i, value, n);
        squares += value * value;
    });
    const float scale = 1 / std::sqrt(sum(squares) / (float)size + eps);
    for_pieces(size, [&](int64_t i, int n) METHOD {
        vf value = load_first(scratch + i, n) * scale * weight.at(start + i, n);
        if (IS_NORM_FIRST) value *= activated(gate.at(row, start + i, n));
        out.put(row, start + i, value, n);
    });
}

}  // namespace

#define ROWS(name) void *name, int64_t name##_stride, int32_t name##_bf16
#define AS_ROWS(name) \
    Rows { name, name##_stride, name##_bf16 != 0 }

extern "C" {

void causal_conv1d(ROWS(x), ROWS(out), ROWS(states), const float* weight, const float* bias, int64_t channels,
                   int64_t width, int32_t is_silu, BATCH_ARGUMENTS, int32_t num_threads) {
    Conv conv{AS_ROWS(x), AS_ROWS(out), weight, bias, AS_ROWS(states), channels, width, is_silu != 0};
    causal_conv<MAX_WIDTH>(conv, BATCH, num_threads);
}

void mamba1_scan(ROWS(x), ROWS(dt), ROWS(z), ROWS(out), const float* A, const float* B, int64_t B_stride,
                 const float* C, int64_t C_stride, const float* D, const float* dt_bias, float* states,
                 int64_t slot_stride, int64_t channels, int64_t num_states, BATCH_ARGUMENTS, int32_t num_threads) {
    Mamba1 scan{AS_ROWS(x), AS_ROWS(dt), AS_ROWS(z), AS_ROWS(out), A, B, C, D, dt_bias,
                B_stride,   C_stride,    states,     slot_stride,  channels, num_states};
    mamba1(scan, BATCH, num_threads);
}

void mamba2_scan(ROWS(x), ROWS(dt), ROWS(out), const float* A, const float* B, const float* C, const float* D,
                 const float* dt_bias, float lowest_dt, float highest_dt, float* states, int64_t slot_stride,
                 int64_t heads, int64_t head_size, int64_t groups, int64_t num_states, BATCH_ARGUMENTS,
                 int32_t num_threads) {
    Mamba2 scan{AS_ROWS(x), AS_ROWS(dt), AS_ROWS(out), A,         B,      C,         D, dt_bias, lowest_dt, highest_dt,
                states,     slot_stride, heads,        head_size, groups, num_states};
    mamba2(scan, BATCH, num_threads);
}

void gated_delta_rule(ROWS(q), ROWS(k), ROWS(v), ROWS(dt), ROWS(b), ROWS(out), const float* A, const float* dt_bias,
                      float beta_scale, float* states, int64_t slot_stride, int64_t heads, int64_t groups,
                      int64_t key_size, int64_t value_size, int64_t decays, BATCH_ARGUMENTS, int32_t num_threads) {
    DeltaRule rule{AS_ROWS(q), AS_ROWS(k), AS_ROWS(v), AS_ROWS(dt), AS_ROWS(b), AS_ROWS(out), A,      dt_bias, beta_scale,
                   states,     slot_stride, heads,     groups,      key_size,   value_size,   decays};
    delta_rule(rule, BATCH, num_threads);
}

void gated_rms_norm(ROWS(x), ROWS(gate), ROWS(out), const void* weight, int32_t is_weight_bf16, int64_t num_rows,
                    int64_t size, int64_t group_size, float eps, int32_t is_norm_first, int32_t is_silu,
                    int32_t num_threads) {
    const Weight scale{weight, is_weight_bf16 != 0, 0};
    const auto run = is_norm_first ? (is_silu ? gated_norm<true, true> : gated_norm<true, false>)
                                   : (is_silu ? gated_norm<false, true> : gated_norm<false, false>);
    const int64_t num_groups = size / group_size;
    each_task(num_rows * num_groups, num_threads, num_rows * size > SERIAL_WORK, [&](int64_t task) {
        thread_local std::vector<float> scratch;
        if ((int64_t)scratch.size() < group_size) scratch.resize(group_size);
        run(AS_ROWS(x), AS_ROWS(gate), AS_ROWS(out), scale, task / num_groups, task % num_groups * group_size,
            group_size, eps, scratch.data());
    });
}

// 0 when two tokens through a convolution and all scans come out right.
int self_test() {
    float x[2] = {1, 2}, out[2], dt[2] = {30, 30}, ones[2] = {1, 1}, decay[1] = {0}, weight[2] = {1, 10}, states[2] = {};
    int32_t starts[2] = {0, 2};
    int64_t slots[1] = {1};
    bool has_history[1] = {true};
    auto is = [](float value, float wanted) { return std::abs(value - wanted) < 1e-3f; };
    causal_conv1d(x, 1, 0, out, 1, 0, states, 1, 0, weight, nullptr, 1, 2, 0, starts, slots, has_history, nullptr,
                  nullptr, nullptr, 1, 0, 2);
    if (!is(out[0], 10) || !is(out[1], 21) || !is(states[1], 2)) return 1;
    mamba1_scan(x, 1, 0, dt, 1, 0, nullptr, 0, 0, out, 1, 0, decay, ones, 1, ones, 1, ones, nullptr, states, 1, 1, 1,
                starts, slots, has_history, nullptr, nullptr, nullptr, 1, 0, 2);
    if (!is(out[0], 33) || !is(out[1], 94) || !is(states[1], 92)) return 2;
    mamba2_scan(x, 1, 0, dt, 1, 0, out, 1, 0, decay, ones, ones, ones, nullptr, 0, 30, states, 1, 1, 1, 1, 1, starts,
                slots, has_history, nullptr, nullptr, nullptr, 1, 0, 2);
    if (!is(out[0], 123) || !is(out[1], 184) || !is(states[1], 182)) return 3;
    // A key of one element is 1: at beta = 1 / (1 + e^-30) the state becomes the value.
    gated_delta_rule(ones, 1, 0, ones, 1, 0, x, 1, 0, dt, 1, 0, dt, 1, 0, out, 1, 0, decay, nullptr, 1, states, 1, 1, 1,
                     1, 1, 1, starts, slots, has_history, nullptr, nullptr, nullptr, 1, 0, 2);
    return is(out[0], 1) && is(out[1], 2) && is(states[1], 2) ? 0 : 4;
}
}
