// Linear layers on weights packed once: bfloat16, float, and int8 with inputs rounded to integers.
#include <cmath>

#include "gated.h"
#include "integers.h"
#include "screen.h"

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

// weight [num_outputs, num_inputs], rows weight_stride elements apart; elements of 1 (int8), 2 (bf16) or 4 bytes (float).
void pack(const void* weight, int64_t weight_stride, int32_t element_bytes, void* packed, int64_t num_outputs,
          int64_t num_inputs, int32_t num_threads) {
    if (element_bytes == 1)
        pack_panels((const int8_t*)weight, weight_stride, (int8_t*)packed, {num_outputs, num_inputs}, num_threads);
    else if (element_bytes == 2)
        pack_panels((const bf16*)weight, weight_stride, (bf16*)packed, {num_outputs, num_inputs}, num_threads);
    else
        pack_panels((const float*)weight, weight_stride, (float*)packed, {num_outputs, num_inputs}, num_threads);
}

// Rows of the plain weight: out [num_ids, num_inputs].
void unpack_rows(const void* packed, int32_t element_bytes, const int64_t* ids, void* out, int64_t num_ids,
                 int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    if (element_bytes == 1)
        unpack((const int8_t*)packed, ids, (int8_t*)out, num_ids, {num_outputs, num_inputs}, num_threads);
    else if (element_bytes == 2)
        unpack((const bf16*)packed, ids, (bf16*)out, num_ids, {num_outputs, num_inputs}, num_threads);
    else
        unpack((const float*)packed, ids, (float*)out, num_ids, {num_outputs, num_inputs}, num_threads);
}

// x and packed: bf16 or float. Of bf16 an even number of inputs is readable in each row. bias: float or null.
void linear_floats(const void* x, int64_t x_stride, int32_t is_x_bf16, const void* packed, const float* bias, void* out,
                   int32_t is_out_bf16, int64_t num_rows, int64_t num_outputs, int64_t num_inputs,
                   int32_t num_threads) {
    auto run = [&](const auto* x) {
        typedef std::decay_t<decltype(*x)> T;
        Layout<T> layout{num_outputs, num_inputs};
        if (is_out_bf16)
            linear(x, x_stride, (const T*)packed, bias, (bf16*)out, num_rows, layout, num_threads);
        else
            linear(x, x_stride, (const T*)packed, bias, (float*)out, num_rows, layout, num_threads);
    };
    if (is_x_bf16)
        run((const bf16*)x);
    else
        run((const float*)x);
}

// act(gate) * up, where both are whole panels: out [num_rows, num_outputs / 2], of x's type. is_gelu: else SiLU.
void linear_gated(const void* x, int64_t x_stride, int32_t is_bf16, const void* packed, const float* bias, void* out,
                  int32_t is_gelu, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    auto run = [&](auto* out) {
        typedef std::decay_t<decltype(*out)> T;
        const auto multiply = is_gelu ? linear_gated<GeluTanh, T> : linear_gated<Silu, T>;
        multiply((const T*)x, x_stride, (const T*)packed, bias, out, num_rows, {num_outputs, num_inputs}, num_threads);
    };
    if (is_bf16)
        run((bf16*)out);
    else
        run((float*)out);
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

// Rows of a weight as a screen has them (screen.h): integers [num_rows, num_inputs], the others [num_rows].
void screen_rows(const void* weight, int64_t weight_stride, int32_t is_bf16, int8_t* integers, float* scales,
                 int32_t* corrections, float* norms, float* errors, int64_t num_rows, int64_t num_inputs,
                 int32_t num_threads) {
    each_task(num_rows, num_threads, true, [&](int64_t row) {
        int8_t* to = integers + row * num_inputs;
        const RoundedRow rounded =
            is_bf16 ? round_turned((const bf16*)weight + row * weight_stride, num_inputs, (uint8_t*)to, num_inputs)
                    : round_turned((const float*)weight + row * weight_stride, num_inputs, (uint8_t*)to, num_inputs);
        int32_t total = 0;
        for (int64_t k = 0; k < num_inputs; k++) to[k] = (int8_t)((uint8_t)to[k] - 128), total += to[k];
        scales[row] = rounded.scale, corrections[row] = 128 * total;
        norms[row] = rounded.norm + rounded.error, errors[row] = rounded.error;
    });
}

// As linear_floats, but only the place of each row's highest output: out [num_rows] (screen.h). screen to errors: of the
// rows of the weight, filled up to whole tiles.
void highest(const void* x, int64_t x_stride, int32_t is_x_bf16, const void* packed, const int8_t* screen,
             const float* scales, const int32_t* corrections, const float* norms, const float* errors, float divisor,
             int64_t* out, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    const Screen all{screen, scales, corrections, norms, errors};
    if (is_x_bf16)
        highest_outputs((const bf16*)x, x_stride, all, (const bf16*)packed, divisor, out, num_rows,
                        {num_outputs, num_inputs}, num_threads);
    else
        highest_outputs((const float*)x, x_stride, all, (const float*)packed, divisor, out, num_rows,
                        {num_outputs, num_inputs}, num_threads);
}

// 0 when small products come out right.
int self_test() {
    const int64_t N = 80, K = 34, M = 19;
    bf16 weight[N * K], x[M * K], packed[N * K];
    auto value = [](int64_t i) { return bf16{(uint16_t)(0x3f80 + i % 7 * 8)}; };
    for (int64_t i = 0; i < N * K; i++) weight[i] = value(i);
    for (int64_t i = 0; i < M * K; i++) x[i] = value(i + 3);
    float out[M * N];
    pack(weight, K, 2, packed, N, K, 2);
    linear_floats(x, K, 1, packed, nullptr, out, 0, M, N, K, 2);
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
    pack(integers, K, 1, packed_integers, N, K, 2);
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
