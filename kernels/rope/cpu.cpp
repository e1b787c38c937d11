// Rotary embedding of heads.
#include <omp.h>

#include "rows.h"

namespace {

template <class T>
void rotate(const T* x, T* out, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, int64_t size,
            int64_t rotary, int64_t x_token, int64_t x_head, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * size > 1 << 15)
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = 0; h < num_heads; h++)
            rotate_row(x + t * x_token + h * x_head, out + (t * num_heads + h) * size, cos + t * rotary, sin + t * rotary,
                       size, rotary);
}

}  // namespace

#define ROTATE(name, T)                                                                                           \
    void name(const T* x, T* out, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads,      \
              int64_t size, int64_t rotary, int64_t x_token, int64_t x_head, int32_t num_threads) {               \
        rotate(x, out, cos, sin, num_tokens, num_heads, size, rotary, x_token, x_head, num_threads);              \
    }

extern "C" {

ROTATE(rotate_float, float)
ROTATE(rotate_bf16, bf16)

// 0 when a quarter turn of (1, 2) is (-2, 1).
int self_test() {
    const float x[] = {1, 2}, cos[] = {0, 0}, sin[] = {1, 1};
    float out[2];
    rotate_float(x, out, cos, sin, 1, 1, 2, 2, 2, 2, 2);
    return out[0] == -2 && out[1] == 1 ? 0 : 1;
}
}
