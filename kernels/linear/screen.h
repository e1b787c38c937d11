// Which output of a row is the highest, without the exact value of most of them.
//
// A *screen* is a copy of the weight in 8 bits. Inputs are rounded to 8 bits too, so that a row costs a fraction of the
// exact product. What rounding can do to an output is bounded: with w = v + dv and x = y + dy, where v and y are what the
// integers stand for, |wx - vy| <= |w| |dy| + |dv| |y| (Cauchy-Schwarz). Outputs that may be the highest by that bound are
// computed exactly, by the product that computes all outputs elsewhere; the others can't be.
//
// Both sides are *turned* first, which changes no product and spreads elements that stand out, whose size all others
// would be rounded by: random signs, then Hadamard's matrix on blocks of the largest power of two that divides the inputs.
#pragma once
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "floats.h"
#include "integers.h"

constexpr int64_t MOST_CANDIDATES = 1 << 16;  // more, and all outputs are computed
constexpr int64_t NOT_FINITE = -1, NOT_FOUND = -2;

// out: input `k` times a sign that a hash of k tells, each block by Hadamard's matrix over the root of its size.
template <class T>
void turn_row(const T* x, int64_t size, float* out) {
    const int64_t block = size & -size;
    const float factor = 1 / std::sqrt((float)block);
    for (int64_t k = 0; k < size; k++)
        out[k] = to_float(x[k]) * ((uint64_t)(k + 1) * 0x9e3779b97f4a7c15u >> 63 ? factor : -factor);
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t first = 0; first < size; first += 2 * half) {
            float *low = out + first, *high = low + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a + b, high[i] = a - b;
            }
        }
}

struct Candidate {
    int64_t row, output;
    float high;  // it isn't higher than this
    float score;
};

// Candidates, and for each row a value that some output reaches.
struct Candidates {
    std::atomic<int64_t> count{0};
    std::unique_ptr<Candidate[]> list{new Candidate[MOST_CANDIDATES]};
    std::vector<std::atomic<float>> reached;

    explicit Candidates(int64_t num_rows) : reached(num_rows) {
        for (auto& each : reached) each.store(-__builtin_inff(), std::memory_order_relaxed);
    }

    void reach(int64_t row, float low) {
        float before = reached[row].load(std::memory_order_relaxed);
        while (low > before && !reached[row].compare_exchange_weak(before, low)) continue;
    }

    void add(int64_t row, int64_t output, float high) {
        const int64_t place = count.fetch_add(1, std::memory_order_relaxed);
        if (place < MOST_CANDIDATES) list[place] = {row, output, high, 0};
    }
};

// What a row of inputs was rounded to, and what that can change.
struct RoundedRow {
    float scale;
    float norm;   // of what the integers stand for
    float error;  // of what was lost, and of the rounding of sums
};

struct Screen {
    const int8_t* packed;
    const float* scales;
    const int32_t* corrections;
    const float* norms;   // of the weights of an output
    const float* errors;  // of what they lost
};

struct ScreenSink {
    const Screen& screen;
    const RoundedRow* rows;
    int64_t first_row, first_output, num_outputs;
    const int32_t* corrections;
    Candidates& found;

    METHOD void finish(int64_t row, int64_t tile, vf sums) {
        const int64_t output = first_output + tile * LANES;
        const vf total = sums * rows[row].scale * load(screen.scales + output);
        const vf error = load(screen.norms + output) * rows[row].error + load(screen.errors + output) * rows[row].norm;
        const float reached = found.reached[first_row + row].load(std::memory_order_relaxed);
        if (any(total + error >= reached)) note(first_row + row, output, total, error);
    }

    __attribute__((noinline)) void note(int64_t row, int64_t output, vf total, vf error) {
        const int width = (int)std::min<int64_t>(LANES, num_outputs - output);
        for (int i = 0; i < width; i++) found.reach(row, total[i] - error[i]);
        const float reached = found.reached[row].load(std::memory_order_relaxed);
        for (int i = 0; i < width; i++)
            if (total[i] + error[i] >= reached) found.add(row, output + i, total[i] + error[i]);
    }
};

// The exact value of one output of a row.
template <class T>
float exact_output(const T* x, const T* packed, const Layout<T>& layout, int64_t output) {
    const int64_t panel = output / PANEL, tile = output % PANEL / LANES;
    Product<T> product{x, 0, packed + layout.start_of(panel) + tile * LANES * Line<T>::DEPTH, layout.stride_of(panel),
                       layout.steps()};
    float out[LANES];
    Sink<float> sink{out, 0, nullptr, LANES};
    multiply_panel(product, 1, 1, sink);
    return out[output % LANES];
}

// Turns and rounds a row. planes: its bytes, as round_row leaves them.
template <class T>
RoundedRow round_turned(const T* x, int64_t size, uint8_t* bytes, int64_t num_bytes) {
    std::vector<float> turned(size);
    turn_row(x, size, turned.data());
    const float scale = round_row<1>(turned.data(), size, bytes, num_bytes);
    double all = 0, norm = 0, error = 0;
    for (int64_t k = 0; k < size; k++) {
        const double rounded = (double)scale * (bytes[k] - 128), lost = turned[k] - rounded;
        all += (double)turned[k] * turned[k], norm += rounded * rounded, error += lost * lost;
    }
    // Sums of floats, there and here, are off by less than this part of |w| |x|.
    const double part = (size + 64) * 0x1p-23;
    return {scale, (float)(std::sqrt(norm) * 1.0001), (float)((std::sqrt(error) + part * std::sqrt(all)) * 1.0001)};
}

// out: for each row the output with the highest value, of equal ones the first; NOT_FINITE where it isn't finite; all
// NOT_FOUND where too many are near it. divisor: of values, above 0; only what it makes equal matters.
template <class T>
void highest_outputs(const T* x, int64_t x_stride, const Screen& screen, const T* packed, float divisor, int64_t* out,
                     int64_t num_rows, Layout<T> exact, int num_threads) {
    const Layout<int8_t> layout{exact.num_outputs, exact.num_inputs};
    const int64_t num_bytes = layout.steps() * Line<int8_t>::DEPTH;
    std::unique_ptr<uint8_t[]> bytes(new uint8_t[num_rows * num_bytes]);
    std::vector<RoundedRow> rounded(num_rows);
    each_task(num_rows, num_threads, num_rows > 4, [&](int64_t row) {
        rounded[row] = round_turned(x + row * x_stride, layout.num_inputs, bytes.get() + row * num_bytes, num_bytes);
    });
    Candidates found(num_rows);
    each_panel(layout, num_rows, num_threads, [&](int64_t panel, int64_t first, int64_t rows) {
        if (found.count.load(std::memory_order_relaxed) > MOST_CANDIDATES) return;
        Product<int8_t> product{(const int8_t*)bytes.get() + first * num_bytes, num_bytes,
                                screen.packed + layout.start_of(panel), layout.stride_of(panel), layout.steps()};
        ScreenSink sink{screen, rounded.data() + first, first, panel * PANEL, layout.num_outputs,
                        screen.corrections + panel * PANEL, found};
        multiply_integer_panel<1>(product, rows, layout.tiles_of(panel), sink);
    });
    const int64_t count = found.count.load();
    if (count > MOST_CANDIDATES) return (void)std::fill(out, out + num_rows, NOT_FOUND);
    each_task(count, num_threads, count > 16, [&](int64_t i) {
        Candidate& each = found.list[i];
        const bool is_near = each.high >= found.reached[each.row].load(std::memory_order_relaxed);
        each.score = is_near ? exact_output(x + each.row * x_stride, packed, exact, each.output) / divisor
                             : -__builtin_inff();
    });
    std::vector<float> best(num_rows, -__builtin_inff());
    std::fill(out, out + num_rows, NOT_FINITE);
    for (int64_t i = 0; i < count; i++) {
        const Candidate& each = found.list[i];
        float& score = best[each.row];
        int64_t& output = out[each.row];
        if (each.score > score || (each.score == score && std::isfinite(score) && each.output < output))
            score = each.score, output = each.output;
    }
    for (int64_t row = 0; row < num_rows; row++)
        if (!std::isfinite(best[row])) out[row] = NOT_FINITE;
}
