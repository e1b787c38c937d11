// Activations, alone and as gates.
#include "activations.h"
#include "rows.h"
#include "team.h"

namespace {

constexpr int64_t CUT = 1024;  // columns of one piece of work, so that a single row of a wide MLP is shared too

template <class Act, class T>
void act(const T* x, T* out, int64_t size, int num_threads) {
    each_task((size + CUT - 1) / CUT, num_threads, size > 1 << 15, [&](int64_t cut) {
        const int64_t start = cut * CUT;
        for_pieces(std::min(size - start, CUT), [&](int64_t i, int n) METHOD {
            store_first(out + start + i, Act::of(load_first(x + start + i, n)), n);
        });
    });
}

template <class Act, class T>
void act_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size, int64_t row_stride, int num_threads) {
    const int64_t cuts = (size + CUT - 1) / CUT;
    each_task(num_rows * cuts, num_threads, num_rows * size > 1 << 15, [&](int64_t task) {
        const int64_t r = task / cuts, start = task % cuts * CUT;
        const T* gate = gate_up + r * row_stride + start;
        T* to = out + r * size + start;
        for_pieces(std::min(size - start, CUT), [&](int64_t i, int n) METHOD {
            store_first(to + i, Act::of(load_first(gate + i, n)) * load_first(gate + size + i, n), n);
        });
    });
}

}  // namespace

#define ACT_MUL(name, Act, T)                                                                                     \
    void name(const T* gate_up, T* out, int64_t num_rows, int64_t size, int64_t row_stride, int32_t num_threads) { \
        act_mul<Act>(gate_up, out, num_rows, size, row_stride, num_threads);                                      \
    }
#define ACT(name, Act, T) \
    void name(const T* x, T* out, int64_t size, int32_t num_threads) { act<Act>(x, out, size, num_threads); }

extern "C" {

ACT_MUL(silu_mul_float, Silu, float)
ACT_MUL(silu_mul_bf16, Silu, bf16)
ACT_MUL(gelu_tanh_mul_float, GeluTanh, float)
ACT_MUL(gelu_tanh_mul_bf16, GeluTanh, bf16)
ACT(silu_float, Silu, float)
ACT(silu_bf16, Silu, bf16)
ACT(gelu_tanh_float, GeluTanh, float)
ACT(gelu_tanh_bf16, GeluTanh, bf16)
ACT(sigmoid_float, Sigmoid, float)
ACT(sigmoid_bf16, Sigmoid, bf16)

// 0 when silu(1) * 2 comes out right.
int self_test() {
    const float gate_up[] = {1, 2};
    float out[1];
    silu_mul_float(gate_up, out, 1, 1, 2, 2);
    return std::abs(out[0] - 1.4621172f) < 1e-5f ? 0 : 1;
}
}
