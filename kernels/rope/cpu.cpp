// Rotary embedding of heads.
#include "rows.h"
#include "team.h"

namespace {

template <class T>
void rotate(const T* x, T* out, const float* cos, const float* sin, int64_t num_tokens, int64_t num_heads, int64_t size,
            int64_t rotary, int64_t x_token, int64_t x_head, int num_threads) {
    each_task(num_tokens, num_threads, num_tokens * num_heads * size > 1 << 15, [&](int64_t t) {
        for (int64_t h = 0; h < num_heads; h++)
            rotate_row(x + t * x_token + h * x_head, out + (t * num_heads + h) * size, cos + t * rotary, sin + t * rotary,
                       size, rotary);
    });
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

// cos and sin [num_tokens, 2 * num_frequencies], both halves filled.
void rope_table(const int64_t* positions, const float* frequencies, float* cos, float* sin, int64_t num_tokens,
                int64_t num_frequencies, float magnitude, int32_t num_threads) {
    each_task(num_tokens, num_threads, num_tokens * num_frequencies > 1 << 12, [&](int64_t t) {
        for (int64_t f = 0; f < num_frequencies; f++) {
            const float angle = (float)positions[t] * frequencies[f];
            const int64_t low = t * 2 * num_frequencies + f, high = low + num_frequencies;
            cos[low] = cos[high] = std::cos(angle) * magnitude;
            sin[low] = sin[high] = std::sin(angle) * magnitude;
        }
    });
}

// 0 when a quarter turn of (1, 2) is (-2, 1), and that of position 3 at half a radian is 1.5 radians.
int self_test() {
    const float x[] = {1, 2}, cos[] = {0, 0}, sin[] = {1, 1};
    float out[2];
    rotate_float(x, out, cos, sin, 1, 1, 2, 2, 2, 2, 2);
    if (out[0] != -2 || out[1] != 1) return 1;
    const int64_t position[] = {3};
    const float frequency[] = {0.5f};
    float table[4];
    rope_table(position, frequency, table, table + 2, 1, 1, 2, 2);
    return std::abs(table[1] - 0.1414744f) < 1e-5f && std::abs(table[2] - 1.994990f) < 1e-5f ? 0 : 2;
}
}
