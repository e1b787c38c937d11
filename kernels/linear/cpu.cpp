// Linear layers on weights packed once: bfloat16, float, and int8 with inputs rounded to integers.
#include <cmath>

#include "floats.h"
#include "integers.h"

namespace {

template <class T>
void unpack(const T* packed, const int64_t* ids, T* out, int64_t num_ids, Layout<T> layout, int num_threads) {
    each_of_rows(packed, ids, num_ids, layout, num_threads,
                 [&](int64_t i, int64_t k, T element) { out[i * layout.num_inputs + k] = element; });
}

template <int PLANES, class T>
void any_out(const T* x, int64_t x_stride, const int8_t* packed, const float* scales, const int32_t* corrections,
             const float* bias, void* out, bool is_out_bf16, int64_t num_rows, Layout<int8_t> layout, int threads) {
    if (is_out_bf16)
        linear_of_integers<PLANES>(x, x_stride, packed, scales, corrections, bias, (bf16*)out, num_rows, layout,
                                   threads);
    else
        linear_of_integers<PLANES>(x, x_stride, packed, scales, corrections, bias, (float*)out, num_rows, layout,
                                   threads);
}

bf16 to_bf16(float x) {
    vf all = set1(x);
    bf16 rounded[LANES];
    store(rounded, all);
    return rounded[0];
}

bool is_near(float got, float wanted) { return std::abs(got - wanted) < 1e-3f * wanted; }

}  // namespace

extern "C" {

// weight [num_outputs, num_inputs], rows weight_stride elements apart.
void pack(const bf16* weight, int64_t weight_stride, bf16* packed, int64_t num_outputs, int64_t num_inputs,
          int32_t num_threads) {
    pack_panels(weight, weight_stride, packed, {num_outputs, num_inputs}, num_threads);
}

void pack_int8(const int8_t* weight, int64_t weight_stride, int8_t* packed, int64_t num_outputs, int64_t num_inputs,
               int32_t num_threads) {
    pack_panels(weight, weight_stride, packed, {num_outputs, num_inputs}, num_threads);
}

// Rows of the plain weight: out [num_ids, num_inputs].
void unpack_rows(const bf16* packed, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_outputs,
                 int64_t num_inputs, int32_t num_threads) {
    unpack(packed, ids, out, num_ids, {num_outputs, num_inputs}, num_threads);
}

void unpack_int8_rows(const int8_t* packed, const int64_t* ids, int8_t* out, int64_t num_ids, int64_t num_outputs,
                      int64_t num_inputs, int32_t num_threads) {
    unpack(packed, ids, out, num_ids, {num_outputs, num_inputs}, num_threads);
}

// x [num_rows, num_inputs] with an even number of inputs readable in each row; bias float32 or null.
void linear_to_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, bf16* out,
                    int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    linear(x, x_stride, packed, bias, out, num_rows, Layout<bf16>{num_outputs, num_inputs}, num_threads);
}

void linear_to_float(const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, float* out,
                     int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    linear(x, x_stride, packed, bias, out, num_rows, Layout<bf16>{num_outputs, num_inputs}, num_threads);
}

// x and out: float32, or bf16 where is_…_bf16. planes: bytes that an input is rounded to, 1 or 2. scales, corrections:
// of all padded outputs (integers.h).
void linear_int8(const void* x, int64_t x_stride, int32_t is_x_bf16, int32_t planes, const int8_t* packed,
                 const float* scales, const int32_t* corrections, const float* bias, void* out, int32_t is_out_bf16,
                 int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    auto run = [&](const auto* x) {
        auto do_run = planes == 1 ? any_out<1, std::decay_t<decltype(*x)>> : any_out<2, std::decay_t<decltype(*x)>>;
        do_run(x, x_stride, packed, scales, corrections, bias, out, is_out_bf16, num_rows, {num_outputs, num_inputs},
               num_threads);
    };
    if (is_x_bf16)
        run((const bf16*)x);
    else
        run((const float*)x);
}

// 0 when small products come out right.
int self_test() {
    const int64_t N = 80, K = 34, M = 7;
    bf16 weight[N * K], x[M * K], packed[N * K];
    auto value = [](int64_t i) { return bf16{(uint16_t)(0x3f80 + i % 7 * 8)}; };
    for (int64_t i = 0; i < N * K; i++) weight[i] = value(i);
    for (int64_t i = 0; i < M * K; i++) x[i] = value(i + 3);
    float out[M * N];
    pack(weight, K, packed, N, K, 2);
    linear_to_float(x, K, packed, nullptr, out, M, N, K, 2);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float wanted = 0;
            for (int64_t k = 0; k < K; k++) wanted += to_float(x[m * K + k]) * to_float(weight[n * K + k]);
            if (!is_near(out[m * N + n], wanted)) return 1;
        }
    int8_t integers[N * K], packed_integers[N * 36];
    float scales[N];
    int32_t corrections[N] = {};
    for (int64_t i = 0; i < N * K; i++) integers[i] = (int8_t)(i % 255 - 127), corrections[i / K] += 128 * integers[i];
    for (int64_t n = 0; n < N; n++) scales[n] = 0.5f;
    pack_int8(integers, K, packed_integers, N, K, 2);
    for (int32_t planes = 1; planes <= 2; planes++) {
        for (int64_t i = 0; i < M * K; i++) x[i] = to_bf16((float)(i % K == 3 ? 127 : i % 19 - 9));
        linear_int8(x, K, 1, planes, packed_integers, scales, corrections, nullptr, out, 0, M, N, K, 2);
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = 0; n < N; n++) {
                float wanted = 0;
                for (int64_t k = 0; k < K; k++) wanted += to_float(x[m * K + k]) * integers[n * K + k] * 0.5f;
                if (!(std::abs(out[m * N + n] - wanted) < 1 + 1e-4f * std::abs(wanted))) return 2;
            }
    }
    return 0;
}
}
