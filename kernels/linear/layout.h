// Where the elements of a packed weight lie.
//
// Panels of up to PANEL outputs, one after the other. A panel of n tiles is [inputs / DEPTH][n * LANES][DEPTH], so that a
// thread reads one stream from memory. Inputs are padded to a multiple of DEPTH and outputs to one of LANES, with zeros.
#pragma once
#include <algorithm>

#include "team.h"
#include "tile.h"

constexpr int64_t PANEL = 64, PANEL_TILES = PANEL / LANES;
// Multiply-adds that take one thread about 12 us; those of a single row, which waits for its weight, count twice. Waking
// others takes 8 to 30 us where they sleep, 1 where they spin.
constexpr int64_t FEW_PRODUCTS = 1 << 20;
constexpr int64_t CACHED_BYTES = 3 << 18;  // of inputs: 2 MiB of second-level cache hold them and a panel

template <class T>
struct Layout {
    static constexpr int DEPTH = Line<T>::DEPTH;
    int64_t num_outputs, num_inputs;
    int64_t steps() const { return (num_inputs + DEPTH - 1) / DEPTH; }
    int64_t tiles() const { return (num_outputs + LANES - 1) / LANES; }
    int64_t panels() const { return (tiles() + PANEL_TILES - 1) / PANEL_TILES; }
    int64_t tiles_of(int64_t panel) const { return std::min(PANEL_TILES, tiles() - panel * PANEL_TILES); }
    int64_t outputs_of(int64_t panel) const { return std::min(PANEL, num_outputs - panel * PANEL); }
    int64_t start_of(int64_t panel) const { return panel * PANEL * steps() * DEPTH; }
    // Elements from one step of a panel to the next.
    int64_t stride_of(int64_t panel) const { return tiles_of(panel) * LANES * DEPTH; }
};

// weight [num_outputs, num_inputs], rows weight_stride elements apart.
template <class T>
void pack_panels(const T* weight, int64_t weight_stride, T* packed, Layout<T> layout, int num_threads) {
    constexpr int64_t D = Line<T>::DEPTH;
    each_task(layout.panels(), num_threads, true, [&](int64_t panel) {
        int64_t stride = layout.stride_of(panel);
        T* to = packed + layout.start_of(panel);
        memset((void*)to, 0, stride * layout.steps() * sizeof(T));
        for (int64_t i = 0; i < layout.outputs_of(panel); i++) {
            const T* from = weight + (panel * PANEL + i) * weight_stride;
            for (int64_t k = 0; k < layout.num_inputs; k++) to[k / D * stride + i * D + k % D] = from[k];
        }
    });
}

// Calls take(i, k, element) for the elements of rows ids[i].
template <class T, class Take>
void each_of_rows(const T* packed, const int64_t* ids, int64_t num_ids, Layout<T> layout, int num_threads, Take take) {
    constexpr int64_t D = Line<T>::DEPTH;
    each_task(num_ids, num_threads, num_ids > 16, [&](int64_t i) {
        int64_t panel = ids[i] / PANEL, stride = layout.stride_of(panel);
        const T* from = packed + layout.start_of(panel) + ids[i] % PANEL * D;
        for (int64_t k = 0; k < layout.num_inputs; k++) take(i, k, from[k / D * stride + k % D]);
    });
}

// Calls body(panel, row, rows) until every panel has met every row.
template <class T, class Body>
void each_panel(const Layout<T>& layout, int64_t num_rows, int num_threads, Body body) {
    // Rows are cut where panels alone can't keep the threads busy, and where their inputs would not stay in a core's cache
    // while they meet one panel after the other.
    const int64_t panels = layout.panels();
    const int64_t busy_blocks = std::min((4 * num_threads + panels - 1) / panels, (num_rows + 47) / 48);
    const int64_t cached_rows = std::max<int64_t>(48, CACHED_BYTES / (layout.num_inputs * (int64_t)sizeof(T)));
    const int64_t row_blocks = std::max(busy_blocks, (num_rows + cached_rows - 1) / cached_rows);
    const bool is_much = std::max<int64_t>(2, num_rows) * layout.num_outputs * layout.num_inputs > FEW_PRODUCTS;
    each_task(panels * row_blocks, num_threads, is_much, [&](int64_t task) {
        const int64_t panel = task % panels, block = task / panels;
        const int64_t row = num_rows * block / row_blocks;
        body(panel, row, num_rows * (block + 1) / row_blocks - row);
    });
}
