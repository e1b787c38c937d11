// Linear layers of bfloat16 on tiles packed once.
//
// Packed weight: panels of up to PANEL outputs, one after the other. A panel of n tiles is [inputs / 2][n * 16][2], so that
// a thread reads one stream from memory. Inputs are padded to an even number and outputs to a multiple of 16, with zeros.
#include <algorithm>
#include <omp.h>

#include "tile.h"

namespace {

constexpr int64_t PANEL = 64, PANEL_TILES = PANEL / LANES;

// Where the panels of a weight [num_outputs, num_inputs] lie.
struct Layout {
    int64_t num_outputs, num_inputs;
    int64_t pairs() const { return (num_inputs + 1) / 2; }
    int64_t tiles() const { return (num_outputs + LANES - 1) / LANES; }
    int64_t panels() const { return (tiles() + PANEL_TILES - 1) / PANEL_TILES; }
    int64_t tiles_of(int64_t panel) const { return std::min(PANEL_TILES, tiles() - panel * PANEL_TILES); }
    int64_t start_of(int64_t panel) const { return panel * PANEL * pairs() * 2; }
    // Where the pair that starts at an even input of an output lies.
    int64_t index(int64_t output, int64_t input) const {
        int64_t panel = output / PANEL;
        return start_of(panel) + (input / 2 * tiles_of(panel) * LANES + output % PANEL) * 2;
    }
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

template <class Out>
void linear(const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, Out* out, int64_t num_rows,
            Layout layout, int num_threads) {
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
        Product<bf16> product{x + row * x_stride, x_stride, packed + layout.start_of(panel), tiles * LANES * 2,
                              layout.pairs()};
        Sink<Out> sink{out + row * layout.num_outputs + panel * PANEL, layout.num_outputs,
                       bias ? bias + panel * PANEL : nullptr, layout.num_outputs - panel * PANEL};
        multiply(product, rows, tiles, sink);
    }
}

}  // namespace

extern "C" {

// weight [num_outputs, num_inputs], rows weight_stride elements apart.
void pack(const bf16* weight, int64_t weight_stride, bf16* packed, int64_t num_outputs, int64_t num_inputs,
          int32_t num_threads) {
    Layout layout{num_outputs, num_inputs};
#pragma omp parallel for num_threads(num_threads)
    for (int64_t panel = 0; panel < layout.panels(); panel++) {
        int64_t width = layout.tiles_of(panel) * LANES;
        bf16* to = packed + layout.start_of(panel);
        memset(to, 0, width * layout.pairs() * 2 * sizeof(bf16));
        for (int64_t i = 0; i < std::min(width, num_outputs - panel * PANEL); i++) {
            const bf16* from = weight + (panel * PANEL + i) * weight_stride;
            for (int64_t k = 0; k < num_inputs; k++) to[(k / 2 * width + i) * 2 + k % 2] = from[k];
        }
    }
}

// Rows of the plain weight: out [num_ids, num_inputs].
void unpack_rows(const bf16* packed, const int64_t* ids, bf16* out, int64_t num_ids, int64_t num_outputs,
                 int64_t num_inputs, int32_t num_threads) {
    Layout layout{num_outputs, num_inputs};
#pragma omp parallel for num_threads(num_threads) if (num_ids > 16)
    for (int64_t i = 0; i < num_ids; i++) {
        int64_t width = layout.tiles_of(ids[i] / PANEL) * LANES;
        const bf16* from = packed + layout.index(ids[i], 0);
        for (int64_t k = 0; k < num_inputs; k++) out[i * num_inputs + k] = from[k / 2 * width * 2 + k % 2];
    }
}

// x [num_rows, num_inputs] with an even number of inputs readable in each row; bias float32 or null.
void linear_to_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, bf16* out,
                    int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    linear(x, x_stride, packed, bias, out, num_rows, {num_outputs, num_inputs}, num_threads);
}

void linear_to_float(const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, float* out,
                     int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int32_t num_threads) {
    linear(x, x_stride, packed, bias, out, num_rows, {num_outputs, num_inputs}, num_threads);
}

// 0 when a small product comes out right.
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
            if (!(std::abs(out[m * N + n] - wanted) < 1e-3f * wanted)) return 1;
        }
    return 0;
}
}
