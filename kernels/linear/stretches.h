// Products of a few rows with a weight that comes from memory, a stretch of it at a time.
//
// multiply() runs through a whole panel for each block of rows: memory is waited for in the first block and idle in the
// others. Here all blocks run through a stretch that fits the innermost cache, and each of them asks for its share of
// the next one, each line once: what waits for memory is what the processor has few places for. Sums are the same to the
// last bit: each still goes through its inputs in order.
#pragma once
#include "layout.h"

constexpr int64_t STRETCH_STEPS = 80;  // 20 KiB of a panel, at most
constexpr int64_t STRETCH_ROWS = 48;   // more give the processor enough to do for each byte

inline bool goes_in_stretches(int64_t num_rows) {
    return num_rows > TILE_ROWS && num_rows <= STRETCH_ROWS;
}

// Sums of a panel's tiles, tiles that are computed together beside each other.
template <class T>
struct PanelSums {
    typedef typename Line<T>::Sum Sum;
    int64_t num_rows, num_tiles;
    Sum sums[STRETCH_ROWS * PANEL_TILES] = {};

    // Of the first of `width` tiles.
    Sum* at(int64_t row, int64_t tile, int width) { return sums + tile * num_rows + row * width; }
    int width_at(int64_t tile) const { return tile / TILE_COLUMNS < num_tiles / TILE_COLUMNS ? TILE_COLUMNS : 1; }
    Sum& operator()(int64_t row, int64_t tile) {
        const int width = width_at(tile);
        return at(row, tile / width * width, width)[tile % width];
    }
};

// lines: of the cache, from `ahead` on, to be asked for in each step.
template <int M, int N, class T>
void accumulate_block(const Product<T>& p, int num_rows, typename Line<T>::Sum* sums, const char* ahead, int lines) {
    if constexpr (M > 1)
        if (num_rows < M) return accumulate_block<M - 1, N>(p, num_rows, sums, ahead, lines);
    auto run = [&](auto lines) {
        accumulate<M, N, T, lines()>(p.x, p.row_stride, p.lines, p.line_stride, p.steps, sums, ahead);
    };
    switch (lines) {
        case 0: return run(std::integral_constant<int, 0>());
        case 1: return run(std::integral_constant<int, 1>());
        case 2: return run(std::integral_constant<int, 2>());
        default: return run(std::integral_constant<int, PANEL_TILES>());
    }
}

// sums += all rows times all tiles of a panel.
template <class T>
void accumulate_stretches(const Product<T>& p, PanelSums<T>& sums) {
    constexpr int64_t DEPTH = Line<T>::DEPTH;
    static_assert(LANES * DEPTH * sizeof(T) == CACHE_LINE, "a line of weights is one of the cache");
    const int64_t blocks = (sums.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t groups = sums.num_tiles / TILE_COLUMNS + sums.num_tiles % TILE_COLUMNS;
    // Of nearly equal length: a short one is done before the next is there.
    const int64_t stretches = (p.steps + STRETCH_STEPS - 1) / STRETCH_STEPS;
    for (int64_t i = 0; i < stretches; i++) {
        const int64_t step = p.steps * i / stretches, steps = p.steps * (i + 1) / stretches - step;
        const T* lines = p.lines + step * p.line_stride;
        const char* ahead = (const char*)(lines + steps * p.line_stride);
        int64_t lines_left = sums.num_tiles, blocks_left = blocks * groups;
        for (int64_t tile = 0, width; tile < sums.num_tiles; tile += width) {
            width = sums.width_at(tile);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t row = sums.num_rows * b / blocks, num_rows = sums.num_rows * (b + 1) / blocks - row;
                const Product<T> block{p.x + row * p.row_stride + step * DEPTH, p.row_stride,
                                       lines + tile * LANES * DEPTH, p.line_stride, steps};
                const int64_t share = (lines_left + blocks_left - 1) / blocks_left;
                if (width == 1)
                    accumulate_block<TILE_ROWS, 1>(block, num_rows, sums.at(row, tile, 1), ahead, share);
                else
                    accumulate_block<TILE_ROWS, TILE_COLUMNS>(block, num_rows, sums.at(row, tile, TILE_COLUMNS), ahead,
                                                              share);
                lines_left -= share, blocks_left--, ahead += share * steps * CACHE_LINE;
            }
        }
    }
}
