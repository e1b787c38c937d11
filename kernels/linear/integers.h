// Linear layers of int8 weights, inputs rounded row by row to 8 or 16 bits.
//
// A row's integers are kept as bytes above zero: in 8 bits q + 128; in 16 bits q + 32768, its high bytes first, then its
// low ones (two *planes*). So sum(q w) = sum(high w) * 256 + sum(low w) - 32768 sum(w), where the last two terms come
// together as 256 (sum(high w) - 128 sum(w)): `corrections` holds 128 sum(w).
#pragma once
#include <memory>

#include "amx.h"
#include "stretches.h"

constexpr float SMALLEST = 0x1p-100f;  // nearer to zero is as good as zero: its inverse would be no float

INLINE void store_bytes(uint8_t* p, vi x, int n) {
    uint8_t bytes[LANES];
    narrow_to_bytes(bytes, x);
    memcpy(p, bytes, n);
}

// One row to planes of plane_size bytes. Returns what its integers are multiplied with; NaN if anything isn't finite.
template <int PLANES, class T>
float round_row(const T* x, int64_t size, uint8_t* planes, int64_t plane_size) {
    constexpr int MOST = PLANES == 1 ? 127 : 32767;
    vf peaks = vf{}, odd = vf{};
    int64_t whole = size / LANES * LANES;
    auto look = [&](int64_t k, int n) METHOD {
        vf piece = load_first(x + k, n);
        peaks = max((vf)((vu)piece & 0x7fffffffu), peaks);
        odd += piece * 0.0f;  // NaN of what isn't finite
    };
    for (int64_t k = 0; k < whole; k += LANES) look(k, LANES);
    if (whole < size) look(whole, (int)(size - whole));
    memset(planes + (PLANES - 1) * plane_size + size, 0, plane_size - size);
    memset(planes + size, 0, plane_size - size);
    float peak = std::max(highest(peaks), SMALLEST), factor = MOST / peak;
    bool is_finite = sum(odd) == 0;
    if (!is_finite) factor = 0, peak = __builtin_nanf("");
    const vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    auto round = [&](int64_t k, int n) METHOD {
        vi integers = (vi)(load_first(x + k, n) * factor + magic) - (vi)magic;
        if (PLANES == 1) return store_bytes(planes + k, integers + 128, n);
        store_bytes(planes + k, (integers + 32768) >> 8, n);
        store_bytes(planes + plane_size + k, integers & 255, n);
    };
    for (int64_t k = 0; k < whole; k += LANES) round(k, LANES);
    if (whole < size) round(whole, (int)(size - whole));
    return peak / MOST;
}

// What the sums of a panel's tiles become.
template <class Out>
struct IntegerSink {
    Out* out;  // at the first output of the panel, as the others
    int64_t row_stride;
    const float* row_scales;
    const float* scales;
    const int32_t* corrections;
    const float* bias;  // or null
    int64_t num_outputs;  // that exist in the panel

    METHOD void finish(int64_t row, int64_t tile, vf sums) {
        int width = (int)std::min<int64_t>(LANES, num_outputs - tile * LANES);
        vf total = sums * row_scales[row] * load(scales + tile * LANES);
        if (bias) total += load_first(bias + tile * LANES, width);
        store_first(out + row * row_stride + tile * LANES, total, width);
    }
};

// What a row's planes sum up to; low: of the plane of low bytes, if there is one.
template <int PLANES>
INLINE vf join(const Line<int8_t>::Sum& high, const Line<int8_t>::Sum& low, const int32_t* corrections) {
    typedef Line<int8_t> L;
    vf total = to_floats(L::sum(high) - load(corrections));
    return PLANES == 1 ? total : total * 256.0f + to_floats(L::sum(low));
}

template <int PLANES, int M, int N, class Sink>
INLINE void multiply_bytes(const Product<int8_t>& p, int64_t row, int64_t tile, Sink& sink) {
    typedef Line<int8_t> L;
    typename L::Sum sums[M * PLANES * N] = {};
    accumulate<M * PLANES, N, int8_t>(p.x + row * PLANES * p.row_stride, p.row_stride,
                                      p.lines + tile * LANES * L::DEPTH, p.line_stride, p.steps, sums);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            const auto *high = sums + m * PLANES * N + n, *low = high + (PLANES - 1) * N;
            sink.finish(row + m, tile + n, join<PLANES>(*high, *low, sink.corrections + (tile + n) * LANES));
        }
}

template <int PLANES, class Sink>
void multiply_byte_stretches(const Product<int8_t>& p, int64_t num_rows, int64_t num_tiles, Sink& sink) {
    PanelSums<int8_t> sums{num_rows * PLANES, num_tiles};
    accumulate_stretches(p, sums);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            auto &high = sums(row * PLANES, tile), &low = sums(row * PLANES + PLANES - 1, tile);
            sink.finish(row, tile, join<PLANES>(high, low, sink.corrections + tile * LANES));
        }
}

#if defined(HAS_AMX)
template <int PLANES, class Sink>
void multiply_bytes_by_amx(Product<int8_t> p, int64_t num_rows, int64_t num_tiles, Sink& sink) {
    constexpr int ROWS = AMX_ROWS / PLANES;
    AmxRegisters registers;
    for (int64_t first = 0; first < num_rows; first += ROWS, p.x += AMX_ROWS * p.row_stride) {
        Line<int8_t>::Sum sums[AMX_ROWS * PANEL_TILES] = {};
        int rows = (int)std::min<int64_t>(ROWS, num_rows - first);
        accumulate_by_amx<FROM_MEMORY>(p, rows * PLANES, num_tiles, sums, num_tiles * ROW_BYTES, registers);
        for (int m = 0; m < rows; m++)
            for (int64_t n = 0; n < num_tiles; n++) {
                const auto *high = sums + m * PLANES * num_tiles + n, *low = high + (PLANES - 1) * num_tiles;
                sink.finish(first + m, n, join<PLANES>(*high, *low, sink.corrections + n * LANES));
            }
    }
}
#endif

template <int PLANES, int M, class Sink>
void multiply_byte_rows(const Product<int8_t>& p, int64_t row, int num_rows, int64_t num_tiles, Sink& sink) {
    if constexpr (M > 1)
        if (num_rows < M) return multiply_byte_rows<PLANES, M - 1>(p, row, num_rows, num_tiles, sink);
    int64_t tile = 0;
    for (; tile + TILE_COLUMNS <= num_tiles; tile += TILE_COLUMNS)
        multiply_bytes<PLANES, M, TILE_COLUMNS>(p, row, tile, sink);
    for (; tile < num_tiles; tile++) multiply_bytes<PLANES, M, 1>(p, row, tile, sink);
}

// All rows times all tiles of a panel. sink.corrections: of the panel.
template <int PLANES, class Sink>
void multiply_integer_panel(const Product<int8_t>& product, int64_t num_rows, int64_t num_tiles, Sink& sink) {
    constexpr int ROWS = TILE_ROWS / PLANES;
#if defined(HAS_AMX)
    if (may_use_amx()) return multiply_bytes_by_amx<PLANES>(product, num_rows, num_tiles, sink);
#endif
    if (goes_in_stretches(num_rows * PLANES))
        return multiply_byte_stretches<PLANES>(product, num_rows, num_tiles, sink);
    // Blocks of nearly equal height, as in multiply().
    int64_t blocks = (num_rows + ROWS - 1) / ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
        multiply_byte_rows<PLANES, ROWS>(product, row, (int)(next - row), num_tiles, sink);
    }
}

template <int PLANES, class T, class Out>
void linear_of_integers(const T* x, int64_t x_stride, const int8_t* packed, const float* scales,
                        const int32_t* corrections, const float* bias, Out* out, int64_t num_rows,
                        Layout<int8_t> layout, int num_threads) {
    int64_t plane_size = layout.steps() * Line<int8_t>::DEPTH;
    std::unique_ptr<uint8_t[]> planes(new uint8_t[num_rows * PLANES * plane_size]);
    std::unique_ptr<float[]> row_scales(new float[num_rows]);
    each_task(num_rows, num_threads, num_rows > 16, [&](int64_t row) {
        row_scales[row] = round_row<PLANES>(x + row * x_stride, layout.num_inputs,
                                            planes.get() + row * PLANES * plane_size, plane_size);
    });
    each_panel(layout, num_rows, num_threads, [&](int64_t panel, int64_t first, int64_t rows) {
        Product<int8_t> product{(const int8_t*)planes.get() + first * PLANES * plane_size, plane_size,
                                packed + layout.start_of(panel), layout.stride_of(panel), layout.steps()};
        IntegerSink<Out> sink{out + first * layout.num_outputs + panel * PANEL, layout.num_outputs,
                              row_scales.get() + first, scales + panel * PANEL, corrections + panel * PANEL,
                              bias ? bias + panel * PANEL : nullptr, layout.outputs_of(panel)};
        multiply_integer_panel<PLANES>(product, rows, layout.tiles_of(panel), sink);
    });
}
