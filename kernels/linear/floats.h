// Linear layers of bfloat16 or float.
#pragma once
#include "amx.h"
#include "stretches.h"

template <class Out>
struct Sink {
    Out* out;  // at the first output of the panel
    int64_t row_stride;
    const float* bias;  // likewise, or null
    int64_t num_outputs;  // that exist in the panel

    METHOD int width(int64_t tile) const { return (int)std::min<int64_t>(LANES, num_outputs - tile * LANES); }
    METHOD vf start(int64_t, int64_t tile) {
        return bias ? load_first(bias + tile * LANES, width(tile)) : vf{};
    }
    // The places that a row's outputs go to, before they are there.
    METHOD void ask_for(int64_t row) {
        const char *place = (const char*)(out + row * row_stride), *end = place + num_outputs * sizeof(Out);
        for (; place < end; place += CACHE_LINE) __builtin_prefetch(place, 1);
    }
    METHOD void finish(int64_t row, int64_t tile, vf total) {
        store_first(out + row * row_stride + tile * LANES, total, width(tile));
    }
};

template <class T, class Out>
void multiply_stretches(const Product<T>& p, int64_t num_rows, int64_t num_tiles, Sink<Out>& sink) {
    PanelSums<T> sums{num_rows, num_tiles};
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t tile = 0; tile < num_tiles; tile++) sums(row, tile) = sink.start(row, tile);
    accumulate_stretches(p, sums);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t tile = 0; tile < num_tiles; tile++) sink.finish(row, tile, sums(row, tile));
}

#if defined(HAS_AMX)
template <class Sink>
void multiply_by_amx(Product<bf16> p, int64_t num_rows, int64_t num_tiles, Sink& sink) {
    AmxRegisters registers;
    vf sums[AMX_ROWS * PANEL_TILES];
    for (int64_t row = 0; row < num_rows; row += AMX_ROWS, p.x += AMX_ROWS * p.row_stride) {
        const int rows = (int)std::min<int64_t>(AMX_ROWS, num_rows - row);
        for (int m = 0; m < rows; m++) sink.ask_for(row + m);
        if (sink.bias) {
            for (int m = 0; m < rows; m++)
                for (int64_t n = 0; n < num_tiles; n++) sums[m * num_tiles + n] = sink.start(row + m, n);
            accumulate_by_amx<FROM_MEMORY>(p, rows, num_tiles, sums, num_tiles * ROW_BYTES, registers);
        } else if (row == 0) {
            accumulate_by_amx<FROM_MEMORY | FROM_ZERO>(p, rows, num_tiles, sums, num_tiles * ROW_BYTES, registers);
        } else {  // the panel is in the cache now
            accumulate_by_amx<FROM_ZERO>(p, rows, num_tiles, sums, num_tiles * ROW_BYTES, registers);
        }
        for (int m = 0; m < rows; m++)
            for (int64_t n = 0; n < num_tiles; n++) sink.finish(row + m, n, sums[m * num_tiles + n]);
    }
}
#endif

// All rows times all tiles of a panel.
template <class T, class Out>
void multiply_panel(const Product<T>& product, int64_t num_rows, int64_t num_tiles, Sink<Out>& sink) {
#if defined(HAS_AMX)
    if constexpr (std::is_same_v<T, bf16>)
        if (may_use_amx()) return multiply_by_amx(product, num_rows, num_tiles, sink);
#endif
    if (goes_in_stretches(num_rows))
        multiply_stretches(product, num_rows, num_tiles, sink);
    else
        multiply(product, num_rows, num_tiles, sink);
}

template <class T, class Out>
void linear(const T* x, int64_t x_stride, const T* packed, const float* bias, Out* out, int64_t num_rows,
            Layout<T> layout, int num_threads) {
    each_panel(layout, num_rows, num_threads, [&](int64_t panel, int64_t row, int64_t rows) {
        Product<T> product{x + row * x_stride, x_stride, packed + layout.start_of(panel), layout.stride_of(panel),
                           layout.steps()};
        Sink<Out> sink{out + row * layout.num_outputs + panel * PANEL, layout.num_outputs,
                       bias ? bias + panel * PANEL : nullptr, layout.outputs_of(panel)};
        multiply_panel(product, rows, layout.tiles_of(panel), sink);
    });
}
