// Products by AMX: one instruction multiplies 16 rows with 16 lines (tile.h) of 16 outputs.
//
// Each output adds up one sum for every AMX_STEPS lines, in their order, lines beyond the last taken as zeros: as in
// tile.h, a result doesn't depend on how the work was cut. Of bf16 such a sum is float32: even and odd inputs by
// themselves, each in their order, then both; smaller than normal numbers is zero. Of bytes it is exact.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: TDPBF16PS, TDPBUSD, LDTILECFG.
#pragma once
#include <algorithm>
#include <type_traits>

#include "bytes.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

constexpr int64_t AMX_STEPS = 16, ROW_BYTES = 64;
constexpr int AMX_ROWS = 2 * LANES;  // of one accumulate_by_amx()

// Whether this process may: the instructions are illegal before the kernel was asked. The answer is kept, and so are
// results' bits. Source: Linux, Documentation/arch/x86/xstate.rst.
inline bool may_use_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return may;
}

// How this thread's eight registers are used until its end: 0 to 3 hold sums, the next ones rows of inputs, the others
// weights. Up to 16 rows get four tiles of sums; up to 32 get two for each half of them.
class AmxRegisters {
    struct alignas(64) {
        uint8_t palette = 1, first_row = 0, unused[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } sizes;
    static_assert(sizeof sizes == 64, "as the processor reads it");
    int num_rows = 0;

   public:
    AmxRegisters() = default;
    AmxRegisters(const AmxRegisters&) = delete;
    ~AmxRegisters() { asm volatile("tilerelease"); }  // else they are saved whenever the thread gives way to another

    void set_rows(int rows) {
        if (rows == num_rows) return;
        num_rows = rows;
        int first = std::min(rows, LANES), second = rows > LANES ? rows - LANES : first;
        int rows_of[8] = {first, first, second, second, first, rows > LANES ? second : LANES, LANES, LANES};
        for (int i = 0; i < 8; i++) sizes.rows[i] = (uint8_t)rows_of[i], sizes.row_bytes[i] = ROW_BYTES;
        asm volatile("ldtilecfg %0" : : "m"(sizes));
    }
};

// In assembler: the compilers' own functions take no numbers from templates, and GCC's don't say that memory is read.
template <int REGISTER>
INLINE void load_register(const void* p, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(row_bytes), "i"(REGISTER) : "memory");
}
template <int REGISTER>
INLINE void store_register(void* p, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(row_bytes), "i"(REGISTER) : "memory");
}
template <int REGISTER>
INLINE void clear_register() {
    asm volatile("tilezero %%tmm%c0" : : "i"(REGISTER));
}
template <int SUMS, int INPUTS, int WEIGHTS>
INLINE void add_product(bf16) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}
template <int SUMS, int INPUTS, int WEIGHTS>
INLINE void add_product(int8_t) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

// Calls body(0) ... body(N - 1), the numbers being types.
template <class Body, int... I>
INLINE void count(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
INLINE void count(Body body) {
    count(std::make_integer_sequence<int, N>{}, body);
}

// AMX_STEPS lines of N tiles times M * 16 rows. Strides are in bytes. Products begin before all rows are loaded.
template <int M, int N, class T>
INLINE void amx_step(const char* x, int64_t row_stride, const char* line, int64_t line_stride) {
    load_register<4>(x, row_stride);
    count<N>([&](auto n) METHOD {
        constexpr int WEIGHTS = 4 + M + n % (4 - M);
        load_register<WEIGHTS>(line + n * ROW_BYTES, line_stride);
        add_product<n, 4, WEIGHTS>(T{});
    });
    if constexpr (M > 1) {
        static_assert(M == 2 && N <= 2, "each tile of weights is still in its register");
        load_register<5>(x + LANES * row_stride, row_stride);
        count<N>([&](auto n) METHOD { add_product<2 + n, 5, 4 + M + n>(T{}); });
    }
}

// The same of fewer lines and rows: nothing else is read.
template <int M, int N, class T>
void amx_last_step(const char* x, int64_t row_stride, int rows, const char* line, int64_t line_stride, int64_t lines) {
    alignas(64) char inputs[M * LANES * ROW_BYTES] = {}, weights[AMX_STEPS * N * ROW_BYTES] = {};
    for (int row = 0; row < rows; row++)
        memcpy(inputs + row * ROW_BYTES, x + row * row_stride, lines * Line<T>::DEPTH * sizeof(T));
    for (int64_t i = 0; i < lines; i++) memcpy(weights + i * N * ROW_BYTES, line + i * line_stride, N * ROW_BYTES);
    amx_step<M, N, T>(inputs, ROW_BYTES, weights, N * ROW_BYTES);
}

// How accumulate_by_amx() is used, any of these or 0.
enum AmxUse {
    FROM_MEMORY = 1,  // lines come from memory, one after the other, and not from a cache
    FROM_ZERO = 2,    // sums begin at zero, whatever is there
};

// Sums of N tiles from `tile` on. Strides are in bytes.
template <int USE, int M, int N, class T>
void amx_block(const Product<T>& p, int rows, int64_t tile, char* sums, int64_t sums_stride) {
    constexpr int64_t AHEAD = 4 * AMX_STEPS;  // lines: 16 KiB of a whole panel, further than processors look
    const int64_t row_stride = p.row_stride * sizeof(T), line_stride = p.line_stride * sizeof(T);
    const char *x = (const char*)p.x, *line = (const char*)p.lines + tile * ROW_BYTES;
    auto each_sum = [&](auto body) METHOD {
        count<M>([&](auto m) METHOD {
            count<N>([&](auto n) METHOD {
                body(std::integral_constant<int, m * 4 / M + n>{},
                     sums + m * LANES * sums_stride + (tile + n) * ROW_BYTES);
            });
        });
    };
    each_sum([&](auto i, char* at) METHOD {
        if constexpr (USE & FROM_ZERO)
            clear_register<i>();
        else
            load_register<i>(at, sums_stride);
    });
    int64_t left = p.steps;
    for (; left >= AMX_STEPS; left -= AMX_STEPS) {
        for (int64_t i = AHEAD; (USE & FROM_MEMORY) && i < AHEAD + AMX_STEPS; i++)
            for (int n = 0; n < N; n++) __builtin_prefetch(line + i * line_stride + n * ROW_BYTES);
        amx_step<M, N, T>(x, row_stride, line, line_stride);
        x += ROW_BYTES;
        line += AMX_STEPS * line_stride;
    }
    if (left) amx_last_step<M, N, T>(x, row_stride, rows, line, line_stride, left);
    each_sum([&](auto i, char* at) METHOD { store_register<i>(at, sums_stride); });
}

template <int USE, int M, int N, class T>
void amx_blocks(const Product<T>& p, int rows, int64_t tile, int64_t num_tiles, char* sums, int64_t sums_stride) {
    for (; tile + N <= num_tiles; tile += N) amx_block<USE, M, N>(p, rows, tile, sums, sums_stride);
    if constexpr (N > 1)
        if (tile < num_tiles) amx_blocks<USE, M, N - 1>(p, rows, tile, num_tiles, sums, sums_stride);
}

// The first `rows` (at most AMX_ROWS) times all tiles, added to sums that lie sums_stride bytes apart from row to row.
template <int USE, class T>
void accumulate_by_amx(const Product<T>& p, int rows, int64_t num_tiles, void* sums, int64_t sums_stride,
                       AmxRegisters& registers) {
    registers.set_rows(rows);
    if (rows <= LANES)
        amx_blocks<USE, 1, 4>(p, rows, 0, num_tiles, (char*)sums, sums_stride);
    else
        amx_blocks<USE, 2, 2>(p, rows, 0, num_tiles, (char*)sums, sums_stride);
}
#endif
