// RMSNorm of rows, alone and with the additions around it.
#include <vector>

#include "rows.h"
#include "team.h"

namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // below which waking other threads costs more than it gives

// to = a + b, rounded to T, which may be one of them.
template <class T, class A>
INLINE void add_row(const A* a, const T* b, T* to, int64_t size) {
    for_pieces(size, [&](int64_t i, int n) METHOD { store_first(to + i, load_first(a + i, n) + load_first(b + i, n), n); });
}

template <class T>
struct Rows {
    const T* x;  // rows x_stride apart; the others contiguous
    const T* residual;
    T* out;
    T* sum;
    int64_t num_rows, size, x_stride;
    float eps;
};

// body(row index) for every row, on several threads when that pays.
template <class T, class Body>
INLINE void for_rows(const Rows<T>& rows, int num_threads, Body body) {
    each_task(rows.num_rows, num_threads, rows.num_rows * rows.size > SERIAL_ELEMENTS, body);
}

template <class T>
void norm(const Rows<T>& rows, Weight weight, int num_threads) {
    for_rows(rows, num_threads, [&](int64_t r) {
        norm_row(rows.x + r * rows.x_stride, rows.out + r * rows.size, weight, rows.size, rows.eps);
    });
}

template <class T>
void add_norm(const Rows<T>& rows, Weight weight, int num_threads) {
    for_rows(rows, num_threads, [&](int64_t r) {
        T* sum = rows.sum + r * rows.size;
        add_row(rows.x + r * rows.x_stride, rows.residual + r * rows.size, sum, rows.size);
        norm_row(sum, rows.out + r * rows.size, weight, rows.size, rows.eps);
    });
}

template <class T>
void norm_add_norm(const Rows<T>& rows, Weight post, Weight pre, int num_threads) {
    for_rows(rows, num_threads, [&](int64_t r) {
        T *sum = rows.sum + r * rows.size, *out = rows.out + r * rows.size;
        norm_row(rows.x + r * rows.x_stride, out, post, rows.size, rows.eps);  // rounded to T, as two layers would
        add_row(out, rows.residual + r * rows.size, sum, rows.size);
        norm_row(sum, out, pre, rows.size, rows.eps);
    });
}

}  // namespace

#define NORMS(suffix, T)                                                                                              \
    void rms_norm_##suffix(const T* x, T* out, const void* weight, int32_t is_weight_bf16, int32_t is_zero_centered,  \
                           int64_t num_rows, int64_t size, int64_t x_stride, float eps, int32_t num_threads) {        \
        norm(Rows<T>{x, nullptr, out, nullptr, num_rows, size, x_stride, eps},                                        \
             {weight, is_weight_bf16 != 0, is_zero_centered ? 1.f : 0.f}, num_threads);                               \
    }                                                                                                                 \
    void add_rms_norm_##suffix(const T* x, const T* residual, T* out, T* sum, const void* weight,                     \
                               int32_t is_weight_bf16, int32_t is_zero_centered, int64_t num_rows, int64_t size,      \
                               int64_t x_stride, float eps, int32_t num_threads) {                                    \
        add_norm(Rows<T>{x, residual, out, sum, num_rows, size, x_stride, eps},                                       \
                 {weight, is_weight_bf16 != 0, is_zero_centered ? 1.f : 0.f}, num_threads);                           \
    }                                                                                                                 \
    void norm_add_norm_##suffix(const T* x, const T* residual, T* out, T* sum, const void* post, const void* pre,     \
                                int32_t is_weight_bf16, int32_t is_zero_centered, int64_t num_rows, int64_t size,     \
                                int64_t x_stride, float eps, int32_t num_threads) {                                   \
        float shift = is_zero_centered ? 1 : 0;                                                                       \
        norm_add_norm(Rows<T>{x, residual, out, sum, num_rows, size, x_stride, eps},                                  \
                      {post, is_weight_bf16 != 0, shift}, {pre, is_weight_bf16 != 0, shift}, num_threads);            \
    }

extern "C" {

NORMS(float, float)
NORMS(bf16, bf16)

// 0 when the norm of equal elements is all ones.
int self_test() {
    float x[40], out[40], weight[40] = {};
    for (float& value : x) value = 3;
    rms_norm_float(x, out, weight, 0, 1, 2, 20, 20, 0, 2);
    for (float value : out)
        if (!(std::abs(value - 1) < 1e-5f)) return 1;
    return 0;
}
}
