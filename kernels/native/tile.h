// Products of a few rows with tiles of outputs, held in registers.
//
// A *line* is what one load brings: LANES outputs, each with DEPTH consecutive inputs (1 float, or what shares 32 bits:
// 2 bf16, 4 int8). Weights of linear layers, keys and values are all laid out in lines: [inputs / DEPTH][outputs][DEPTH].
// Each output is summed over its inputs in order, whatever rows and outputs are beside it: results don't depend on
// how the work was cut.
#pragma once
#include "vec.h"

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 4;  // 24 sums, 4 lines, 1 input: 29 of 32 registers
#else
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 1;
#endif
constexpr int CACHE_LINE = 64;  // bytes

template <class T>
struct Line;

template <>
struct Line<float> {
    static constexpr int DEPTH = 1;
    typedef vf Sum;
    typedef vf Weights;
    typedef vf Input;
    METHOD static Weights weights(const float* p) { return load(p); }
    METHOD static Input input(const float* p) { return set1(*p); }
    METHOD static vf add(vf total, Weights w, Input x) { return total + w * x; }
};

#if defined(__AVX512BF16__)
template <>
struct Line<bf16> {
    static constexpr int DEPTH = 2;
    typedef vf Sum;
    typedef __m512bh Weights;
    typedef __m512bh Input;
    METHOD static Weights weights(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
    METHOD static Input input(const bf16* p) {
        int32_t pair;
        memcpy(&pair, p, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    METHOD static vf add(vf total, Weights w, Input x) { return (vf)_mm512_dpbf16_ps((__m512)total, w, x); }
};
#else
template <>
struct Line<bf16> {
    static constexpr int DEPTH = 2;
    typedef vf Sum;
    struct Weights {
        vf first, second;
    };
    typedef Weights Input;
    METHOD static Weights split(vu pairs) { return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)}; }
    METHOD static Weights weights(const bf16* p) { return split(read<vu>(p)); }
    METHOD static Input input(const bf16* p) { return {set1(to_float(p[0])), set1(to_float(p[1]))}; }
    METHOD static vf add(vf total, const Weights& w, const Input& x) {
        return total + w.first * x.first + w.second * x.second;
    }
};
#endif

// The operands of a product: rows of inputs, and lines `line_stride` elements apart, `steps` of them.
template <class T>
struct Product {
    const T* x;
    int64_t row_stride;
    const T* lines;
    int64_t line_stride;
    int64_t steps;
};

// sums[M][N][LANES] += M rows times N tiles, from `x` and `line` on. The sums must stay in registers: not inlined, and
// apart from what a sink does, for what calls functions around the loop makes the compiler keep them in memory, at
// half the speed.
//
// Each step also asks for the next AHEAD lines of the cache from `ahead` on.
template <int M, int N, class T, int AHEAD = 0>
__attribute__((noinline)) void accumulate(const T* x, int64_t row_stride, const T* line, int64_t line_stride,
                                          int64_t steps, typename Line<T>::Sum* sums, const char* ahead = nullptr) {
    typedef Line<T> L;
    typename L::Sum total[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) total[m][n] = sums[m * N + n];
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 4
        for (int n = 0; n < AHEAD; n++) __builtin_prefetch(ahead + n * CACHE_LINE, 0, 2);
        ahead += AHEAD * CACHE_LINE;
        typename L::Weights w[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) w[n] = L::weights(line + n * LANES * L::DEPTH);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            typename L::Input in = L::input(x + m * row_stride + i * L::DEPTH);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) total[m][n] = L::add(total[m][n], w[n], in);
        }
        line += line_stride;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m * N + n] = total[m][n];
}

// M rows times N tiles. sink.start(row, tile) gives what each sum begins with, sink.finish(row, tile, sum) takes it.
template <int M, int N, class T, class Sink>
INLINE void multiply_tile(const Product<T>& p, int64_t row, int64_t tile, Sink& sink) {
    typename Line<T>::Sum sums[M * N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sums[m * N + n] = sink.start(row + m, tile + n);
    accumulate<M, N>(p.x + row * p.row_stride, p.row_stride, p.lines + tile * LANES * Line<T>::DEPTH, p.line_stride,
                     p.steps, sums);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sink.finish(row + m, tile + n, sums[m * N + n]);
}

template <int M, class T, class Sink>
void multiply_rows(const Product<T>& p, int64_t row, int num_rows, int64_t num_tiles, Sink& sink) {
    if constexpr (M > 1)
        if (num_rows < M) return multiply_rows<M - 1>(p, row, num_rows, num_tiles, sink);
    int64_t tile = 0;
    for (; tile + TILE_COLUMNS <= num_tiles; tile += TILE_COLUMNS) multiply_tile<M, TILE_COLUMNS>(p, row, tile, sink);
    for (; tile < num_tiles; tile++) multiply_tile<M, 1>(p, row, tile, sink);
}

// All rows times all tiles.
template <class T, class Sink>
void multiply(const Product<T>& p, int64_t num_rows, int64_t num_tiles, Sink& sink) {
    // Blocks of nearly equal height: 7 rows are 4 + 3, not 6 + 1.
    int64_t blocks = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
        multiply_rows<TILE_ROWS>(p, row, (int)(next - row), num_tiles, sink);
    }
}
