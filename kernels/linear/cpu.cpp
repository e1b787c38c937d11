// Linear layers on tiles packed once.
//
// Packed weight: panels of up to PANEL outputs, one after the other. A panel of n tiles is [inputs / DEPTH][n * 16][DEPTH],
// so that a thread reads one stream from memory. Inputs are padded to a multiple of DEPTH (2 for bfloat16, 1 for float)
// and outputs to a multiple of 16, with zeros.
#include <algorithm>
#include <omp.h>

#include "tile.h"

namespace {

constexpr int64_t PANEL = 64, PANEL_TILES = PANEL / LANES;

// Where the panels of a weight [num_outputs, num_inputs] lie.
template <class T>
struct Layout {
    static constexpr int64_t DEPTH = Line<T>::DEPTH;
    int64_t num_outputs, num_inputs;
    int64_t steps() const { return (num_inputs + DEPTH - 1) / DEPTH; }
    int64_t tiles() const { return (num_outputs + LANES - 1) / LANES; }
    int64_t panels() const { return (tiles() + PANEL_TILES - 1) / PANEL_TILES; }
    int64_t tiles_of(int64_t panel) const { return std::min(PANEL_TILES, tiles() - panel * PANEL_TILES); }
    int64_t start_of(int64_t panel) const { return panel * PANEL * steps() * DEPTH; }
    // Where the first DEPTH inputs of an output lie; the next are width(panel) * DEPTH further.
    int64_t index(int64_t output) const { return start_of(output / PANEL) + output % PANEL * DEPTH; }
    int64_t width(int64_t panel) const { return tiles_of(panel) * LANES; }
};

template <class Out>
struct Sink {
    Out* out;  // at the first output of the panel
    int64_t row_stride;
    const float* bias;  // likewise, or null
    int64_t num_outputs;  // that exist in the panel

    METHOD vf start(int64_t, int64_t tile) {
        if (!bias) return vf{};
        return load_first(bias + tile * LANES, (int)std::min<int64_t>(LANES, num_outputs - tile * LANES));
    }
    METHOD void finish(int64_t row, int64_t tile, vf total) {
        Out* to = out + row * row_stride + tile * LANES;
        store_first(to, total, (int)std::min<int64_t>(LANES, num_outputs - tile * LANES));
    }
};

template <class T, class Out>
void linear(const T* x, int64_t x_stride, const T* packed, const float* bias, Out* out, int64_t num_rows,
            Layout<T> layout, int num_threads) {
    // Rows are cut too where panels alone can't keep the threads busy.
    int64_t panels = layout.panels();
    int64_t row_blocks = std::min((4 * num_threads + panels - 1) / panels, (num_rows + 47) / 48);
    int64_t tasks = panels * row_blocks;
    int64_t chunk = std::max<int64_t>(1, tasks / (8 * num_threads));
#pragma omp parallel for schedule(dynamic, chunk) num_threads(num_threads)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t panel = task / row_blocks, block = task % row_blocks;
        int64_t row = num_rows * block / row_blocks, rows = num_rows * (block + 1) / row_blocks - row;
        int64_t tiles = layout.tiles_of(panel);
        Product<T> product{x + row * x_stride, x_stride, packed + layout.start_of(panel),
                           layout.width(panel) * Line<T>::DEPTH, layout.steps()};
        Sink<Out> sink{out + row * layout.num_outputs + panel * PANEL, layout.num_outputs,
                       bias ? bias + panel * PANEL : nullptr, layout.num_outputs - panel * PANEL};
        multiply(product, rows, tiles, sink);
    }
}

template <class T>
void pack(const T* weight, int64_t weight_stride, T* packed, Layout<T> layout, int num_threads) {
    constexpr int64_t depth = Line<T>::DEPTH;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < layout.panels(); panel++) {
        const int64_t step = layout.width(panel) * depth;
        T* to = packed + layout.start_of(panel);
        memset(to, 0, step * layout.steps() * sizeof(T));
        for (int64_t i = 0; i < std::min(layout.width(panel), layout.num_outputs - panel * PANEL); i++) {
            const T* from = weight + (panel * PANEL + i) * weight_stride;
            for (int64_t k = 0; k < layout.num_inputs; k++) to[k / depth * step + i * depth + k % depth] = from[k];
        }
    }
}

template <class T>
void unpack_rows(const T* packed, const int64_t* ids, T* out, int64_t num_ids, Layout<T> layout, int num_threads) {
    constexpr int64_t depth = Line<T>::DEPTH;
#pragma omp parallel for num_threads(num_threads) if (num_ids > 16)
    for (int64_t i = 0; i < num_ids; i++) {
        const int64_t step = layout.width(ids[i] / PANEL) * depth;
        const T* from = packed + layout.index(ids[i]);
        T* to = out + i * layout.num_inputs;
        for (int64_t k = 0; k < layout.num_inputs; k++) to[k] = from[k / depth * step + k % depth];
    }
}

}  // namespace

// pack: weight [num_outputs, num_inputs], rows weight_stride elements apart.
// unpack_rows: rows of the plain weight, out [num_ids, num_inputs].
#define PACKING(suffix, T)                                                                                           \
    void pack_##suffix(const T* weight, int64_t weight_stride, T* packed, int64_t num_outputs, int64_t num_inputs,   \
                       int32_t num_threads) {                                                                        \
        pack(weight, weight_stride, packed, Layout<T>{num_outputs, num_inputs}, num_threads);                        \
    }                                                                                                                \
    void unpack_rows_##suffix(const T* packed, const int64_t* ids, T* out, int64_t num_ids, int64_t num_outputs,     \
                              int64_t num_inputs, int32_t num_threads) {                                             \
        unpack_rows(packed, ids, out, num_ids, Layout<T>{num_outputs, num_inputs}, num_threads);                     \
    }

// x [num_rows, num_inputs] with a multiple of DEPTH inputs readable in each row; bias float32 or null.
#define LINEAR(name, T, Out)                                                                                        \
    void name(const T* x, int64_t x_stride, const T* packed, const float* bias, Out* out, int64_t num_rows,         \
              int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {                                       \
        linear(x, x_stride, packed, bias, out, num_rows, Layout<T>{num_outputs, num_inputs}, num_threads);          \
    }

extern "C" {

PACKING(bf16, bf16)
PACKING(float, float)
LINEAR(linear_bf16_to_bf16, bf16, bf16)
LINEAR(linear_bf16_to_float, bf16, float)
LINEAR(linear_float_to_bf16, float, bf16)
LINEAR(linear_float_to_float, float, float)

// 0 when a small product comes out right.
int self_test() {
    const int64_t N = 80, K = 34, M = 7;
    bf16 weight[N * K], x[M * K], packed[N * K];
    auto value = [](int64_t i) { return bf16{(uint16_t)(0x3f80 + i % 7 * 8)}; };
    for (int64_t i = 0; i < N * K; i++) weight[i] = value(i);
    for (int64_t i = 0; i < M * K; i++) x[i] = value(i + 3);
    float out[M * N];
    pack_bf16(weight, K, packed, N, K, 2);
    linear_bf16_to_float(x, K, packed, nullptr, out, M, N, K, 2);
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float wanted = 0;
            for (int64_t k = 0; k < K; k++) wanted += to_float(x[m * K + k]) * to_float(weight[n * K + k]);
            if (!(std::abs(out[m * N + n] - wanted) < 1e-3f * wanted)) return 1;
        }
    return 0;
}
}
