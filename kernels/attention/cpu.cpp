// Attention over blocks: cut into tasks, run, merge. The two ways to run a task are in many_rows.h and few_rows.h;
// what stores into the cache is in write.h.
#include <type_traits>
#include <utility>

#include "many_rows.h"
#include "plan.h"
#include "team.h"
#include "write.h"

namespace {

// Whether every block that will be read exists.
template <class T>
bool makes_sense(const View<T>& view) {
    for (int64_t request = 0; request < view.num_requests; request++) {
        const int64_t num_keys = view.num_keys[request];
        const int64_t num_tokens = view.query_starts[request + 1] - view.query_starts[request];
        if (num_tokens < 0 || num_tokens > num_keys || num_keys > view.table_width * view.block_size) return false;
        if (num_tokens == 0) continue;
        const int32_t* table = view.tables + request * view.table_stride;
        for (int64_t i = view.lowest(num_keys - num_tokens) / view.block_size; i <= (num_keys - 1) / view.block_size; i++)
            if (table[i] < 0 || table[i] >= view.num_blocks) return false;
    }
    for (int64_t i = 0; i < view.num_shared * SHARED_COLUMNS; i++)
        if (i % SHARED_COLUMNS >= 2 && view.shared[i] >= view.num_requests) return false;
    return true;
}

template <class T>
void merge(const View<T>& view, const Plan& plan, const Merge& merge) {
    const int64_t size = view.value_size, share = view.share();
    auto state_of = [&](int64_t i) {
        return State::at(view.partials + plan.parts[i].partial, plan.parts[i].rows, size);
    };
    std::vector<float> memory(State::num_floats(1, size));
    State all = State::at(memory.data(), 1, size);
    for (int64_t r = 0; r < merge.num_tokens * share; r++) {
        all.clear(1);
        for (int64_t i = merge.first_part; i < merge.end_part; i++)
            fold(all, state_of(i), 0, plan.parts[i].first_row + r);
        finish_row(view, merge.token + r / share, merge.kv_head * share + r % share, *all.high, *all.total,
                   all.sums);
    }
}

template <class T>
bool attend(View<T> view, int num_threads) {
    if (!makes_sense(view)) return false;
    const Plan plan = make_plan(view, num_threads);
    view.spans = plan.spans.data();
    std::vector<float> partials(plan.partial_floats);
    view.partials = partials.data();
    const int64_t num_tasks = plan.tasks.size(), num_merges = plan.merges.size();
    const int64_t bytes = std::max(ManyRowsScratch<T>::num_bytes(plan.most_rows, view.size, view.value_size),
                                   FewRowsScratch<T>::num_bytes(plan.most_few_rows, view.size, view.value_size));
    const bool is_much = plan.work > SERIAL_WORK;
    auto attend_task = [&](int64_t i) {
        thread_local std::vector<char> memory;
        if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
        char* aligned = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
        // The last tasks of a prefill have most keys: first, so that no thread is left with a long one at the end.
        const Task& task = plan.tasks[num_tasks - 1 - i];
        task.is_few ? attend_few_rows(view, task, aligned) : attend_many_rows(view, task, aligned);
    };
    each_task(num_tasks, num_threads, is_much, attend_task, 1);
    each_task(num_merges, num_threads, is_much, [&](int64_t i) { merge(view, plan, plan.merges[i]); });
    return true;
}

bool are_slots(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
    for (int64_t t = 0; t < num_tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_slots) return false;
    return true;
}

}  // namespace

#define ATTENTION(name, T)                                                                                            \
    bool name(const T* q, const T* k, const T* v, T* out, const int32_t* query_starts, const int32_t* num_keys,       \
              const int32_t* tables, const float* sinks, const int32_t* shared, int64_t num_requests,                 \
              int64_t num_heads, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size, int64_t size,          \
              int64_t value_size, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_head, int64_t k_slot,   \
              int64_t v_block, int64_t v_head, int64_t v_slot, int64_t table_stride, int64_t table_width,             \
              int64_t num_shared, int64_t window, int64_t chunk, float scale, float softcap, int32_t is_exact,        \
              int32_t num_threads) {                                                                                  \
        return attend(View<T>{q, k, v, out, query_starts, num_keys, tables, sinks, shared, num_requests, num_heads,   \
                              num_blocks, num_kv_heads, block_size, size, value_size, q_token, q_head, k_block,       \
                              k_head, k_slot, v_block, v_head, v_slot, table_stride, table_width, num_shared, window, \
                              chunk, scale, softcap, is_exact != 0},                                                  \
                      num_threads);                                                                                   \
    }

extern "C" {

ATTENTION(attention_float, float)
ATTENTION(attention_bf16, bf16)

// All strides in bytes.
bool write_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots, int64_t num_tokens,
              int64_t num_blocks, int64_t num_heads, int64_t block_size, int64_t k_bytes, int64_t v_bytes, int64_t k_token,
              int64_t k_head, int64_t v_token, int64_t v_head, int64_t k_cache_block, int64_t k_cache_head,
              int64_t k_cache_slot, int64_t v_cache_block, int64_t v_cache_head, int64_t v_cache_slot,
              int32_t num_threads) {
    if (!are_slots(slots, num_tokens, num_blocks * block_size)) return false;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * (k_bytes + v_bytes) > 1 << 18)
    for (int64_t t = 0; t < num_tokens; t++) {
        const int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
        char *k_to = k_cache + block * k_cache_block + slot * k_cache_slot;
        char *v_to = v_cache + block * v_cache_block + slot * v_cache_slot;
        for (int64_t h = 0; h < num_heads; h++) {
            memcpy(k_to + h * k_cache_head, k + t * k_token + h * k_head, k_bytes);
            if (v_bytes) memcpy(v_to + h * v_cache_head, v + t * v_token + h * v_head, v_bytes);
        }
    }
    return true;
}

QKV_NORM_ROPE_WRITE(qkv_norm_rope_write_float, float)
QKV_NORM_ROPE_WRITE(qkv_norm_rope_write_bf16, bf16)

// 0 when one query over two keys comes out right, by either way of running a task, in either type.
int self_test() {
    const int32_t starts[] = {0, 1}, num_keys[] = {2}, table[] = {0};
    auto is_right = [&](auto run, auto v, auto two) {
        decltype(two) q[9 * 16] = {}, k[32] = {}, out[9 * 16];
        for (int64_t heads : {1, 9}) {
            run(q, k, v, out, starts, num_keys, table, nullptr, nullptr, 1, heads, 1, 1, 2, 16, 16, 16 * heads, 16, 32,
                32, 16, 32, 32, 16, 1, 1, 0, 0, 0, 1, 0, 0, 2);
            for (int i = 0; i < 16 * heads; i++)
                if (!(std::abs(to_float(out[i]) - 2) < 1e-5f)) return false;
        }
        return true;
    };
    float v[32];
    bf16 v_bf16[32];
    for (int i = 0; i < 32; i++) {
        v[i] = i < 16 ? 1 : 3;
        v_bf16[i] = {(uint16_t)(i < 16 ? 0x3f80 : 0x4040)};
    }
    return is_right(attention_float, v, 0.0f) && is_right(attention_bf16, v_bf16, bf16{}) ? 0 : 1;
}
}
