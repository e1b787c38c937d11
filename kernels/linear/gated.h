// The first half of a gated MLP: act(gate) * up, where the first half of a weight's outputs are gate's, the others up's.
#pragma once
#include <vector>

#include "activations.h"
#include "floats.h"

// Both halves are whole panels. out [num_rows, num_outputs / 2]. Gate and up are rounded to T before, as two ops would.
template <class Act, class T>
void linear_gated(const T* x, int64_t x_stride, const T* packed, const float* bias, T* out, int64_t num_rows,
                  Layout<T> layout, int num_threads) {
    const Layout<T> half{layout.num_outputs / 2, layout.num_inputs};
    each_panel(half, num_rows, num_threads, [&](int64_t gate_panel, int64_t row, int64_t rows) {
        thread_local std::vector<T> memory;
        if ((int64_t)memory.size() < 2 * rows * PANEL) memory.resize(2 * rows * PANEL);
        T *gate = memory.data(), *up = gate + rows * PANEL;
        auto multiply_half = [&](int64_t panel, T* to) {
            Product<T> product{x + row * x_stride, x_stride, packed + layout.start_of(panel), layout.stride_of(panel),
                               layout.steps()};
            Sink<T> sink{to, PANEL, bias ? bias + panel * PANEL : nullptr, PANEL};
            multiply_panel(product, rows, PANEL_TILES, sink);
        };
        multiply_half(gate_panel, gate);
        multiply_half(gate_panel + half.panels(), up);
        T* to = out + row * half.num_outputs + gate_panel * PANEL;
        for (int64_t r = 0; r < rows; r++, to += half.num_outputs)
            for (int64_t i = 0; i < PANEL; i += LANES)
                store(to + i, Act::of(load(gate + r * PANEL + i)) * load(up + r * PANEL + i));
    });
}
