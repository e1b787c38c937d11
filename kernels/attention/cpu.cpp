// Attention over blocks: cut into tasks, run, merge. The two ways to run a task are in many_rows.h and few_rows.h;
// what stores into the cache is in write.h.
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>

#include "few_rows.h"
#include "many_rows.h"
#include "write.h"

namespace {

constexpr int64_t TASK_ROWS = 96;         // rows of one prefill task: enough to repay laying keys and values in lines
constexpr int64_t SPLIT_ROWS = 16;        // up to so many rows, keys are split among tasks
constexpr int64_t ALIKE_TOKENS = 17;      // a chunk of up to so many tokens (one and its drafts) is computed token for
                                          // token as in chunks of one: a verified text is the same to the last bit
constexpr int64_t SERIAL_WORK = 1 << 18;  // multiplications below which waking other threads costs more than it gives

// Rows whose keys were split: tasks [first_task, end_task).
struct Merge {
    int64_t first_task, end_task;
};

struct Plan {
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t partial_floats = 0, work = 0, most_rows = 0, most_few_rows = 0;
};

// alike_rows: the rows that decide how the tile is computed.
template <class T>
void plan_tile(const View<T>& view, Task task, int64_t alike_rows, Plan& plan) {
    const int64_t rows = task.num_tokens * view.share();
    const int64_t start = view.lowest(task.position), end = task.position + task.num_tokens;
    const int64_t step = alike_rows <= SPLIT_ROWS ? SPLIT_KEYS : end;
    task.is_few = alike_rows <= FEW_ROWS && !view.is_exact;
    const int64_t first_task = plan.tasks.size();
    task.is_split = (end - 1) / step > start / step;
    for (int64_t key = start; key < end; key = task.end_key) {
        task.first_key = key;
        task.end_key = std::min(end, (key / step + 1) * step);
        task.partial = plan.partial_floats;
        plan.tasks.push_back(task);
        plan.work += rows * (task.end_key - key) * view.size;
        if (task.is_split) plan.partial_floats += State::num_floats(rows, view.size);
    }
    if (task.is_split) plan.merges.push_back({first_task, (int64_t)plan.tasks.size()});
    int64_t& most = task.is_few ? plan.most_few_rows : plan.most_rows;
    most = std::max(most, rows);
}

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
    return true;
}

template <class T>
Plan make_plan(const View<T>& view) {
    Plan plan;
    for (int64_t request = 0; request < view.num_requests; request++) {
        const int64_t start = view.query_starts[request], num_tokens = view.query_starts[request + 1] - start;
        const int64_t first_position = view.num_keys[request] - num_tokens;
        const bool is_short = num_tokens <= ALIKE_TOKENS && !view.is_exact;
        // Tokens whose sight begins at different keys would pair keys differently than each alone.
        const bool is_together = view.lowest(first_position) == view.lowest(first_position + num_tokens - 1);
        const int64_t step = is_short ? (is_together ? num_tokens : 1) : std::max<int64_t>(1, TASK_ROWS / view.share());
        for (int64_t head = 0; head < view.num_kv_heads; head++)
            for (int64_t token = 0; token < num_tokens; token += step) {
                Task task{request, head, start + token, std::min(step, num_tokens - token), first_position + token};
                plan_tile(view, task, view.share() * (is_short ? 1 : task.num_tokens), plan);
            }
    }
    return plan;
}

template <class T>
void merge(const View<T>& view, const Plan& plan, const Merge& merge) {
    const Task& first = plan.tasks[merge.first_task];
    const int64_t rows = first.num_tokens * view.share(), size = view.size;
    std::vector<float> memory(State::num_floats(1, size));
    State all = State::at(memory.data(), 1, size);
    for (int64_t r = 0; r < rows; r++) {
        all.clear(1);
        for (int64_t t = merge.first_task; t < merge.end_task; t++)
            fold(all, State::at(view.partials + plan.tasks[t].partial, rows, size), 0, r);
        finish_row(view, first.token + r / view.share(), first.kv_head * view.share() + r % view.share(), *all.high,
                   *all.total, all.sums);
    }
}

template <class T>
bool attend(View<T> view, int num_threads) {
    if (!makes_sense(view)) return false;
    Plan plan = make_plan(view);
    std::vector<float> partials(plan.partial_floats);
    view.partials = partials.data();
    const int64_t num_tasks = plan.tasks.size(), num_merges = plan.merges.size();
    const int64_t bytes = std::max(ManyRowsScratch<T>::num_bytes(plan.most_rows, view.size),
                                   FewRowsScratch<T>::num_bytes(plan.most_few_rows, view.size));
#pragma omp parallel num_threads(num_threads) if (plan.work > SERIAL_WORK)
    {
        thread_local std::vector<char> memory;
        if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
        char* aligned = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
        // The last tasks of a prefill have most keys: first, so that no thread is left with a long one at the end.
#pragma omp for schedule(dynamic)
        for (int64_t i = num_tasks - 1; i >= 0; i--) {
            const Task& task = plan.tasks[i];
            task.is_few ? attend_few_rows(view, task, aligned) : attend_many_rows(view, task, aligned);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_merges; i++) merge(view, plan, plan.merges[i]);
    }
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
              const int32_t* tables, const float* sinks, int64_t num_requests, int64_t num_heads, int64_t num_blocks, \
              int64_t num_kv_heads, int64_t block_size, int64_t size, int64_t q_token, int64_t q_head,                \
              int64_t k_block, int64_t k_head, int64_t v_block, int64_t v_head, int64_t table_stride,                 \
              int64_t table_width, int64_t window, int64_t chunk, float scale, float softcap, int32_t is_exact,       \
              int32_t num_threads) {                                                                                  \
        return attend(View<T>{q, k, v, out, query_starts, num_keys, tables, sinks, nullptr, num_requests, num_heads,  \
                              num_blocks, num_kv_heads, block_size, size, q_token, q_head, k_block, k_head, v_block,  \
                              v_head, table_stride, table_width, window, chunk, scale, softcap, is_exact != 0},       \
                      num_threads);                                                                                   \
    }

extern "C" {

ATTENTION(attention_float, float)
ATTENTION(attention_bf16, bf16)

bool write_kv(const char* k, const char* v, char* k_cache, char* v_cache, const int64_t* slots, int64_t num_tokens,
              int64_t num_blocks, int64_t num_heads, int64_t block_size, int64_t row_bytes, int64_t k_token, int64_t k_head,
              int64_t v_token, int64_t v_head, int64_t k_cache_block, int64_t k_cache_head, int64_t v_cache_block,
              int64_t v_cache_head, int32_t num_threads) {
    if (!are_slots(slots, num_tokens, num_blocks * block_size)) return false;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * row_bytes > 1 << 17)
    for (int64_t t = 0; t < num_tokens; t++) {
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size * row_bytes;
        for (int64_t h = 0; h < num_heads; h++) {
            memcpy(k_cache + block * k_cache_block + h * k_cache_head + offset, k + t * k_token + h * k_head, row_bytes);
            memcpy(v_cache + block * v_cache_block + h * v_cache_head + offset, v + t * v_token + h * v_head, row_bytes);
        }
    }
    return true;
}

QKV_NORM_ROPE_WRITE(qkv_norm_rope_write_float, float)
QKV_NORM_ROPE_WRITE(qkv_norm_rope_write_bf16, bf16)

// 0 when one query over two keys comes out right, by either way of running a task.
int self_test() {
    float q[9 * 16] = {}, k[32] = {}, v[32], out[9 * 16];
    for (int i = 0; i < 32; i++) v[i] = i < 16 ? 1 : 3;
    const int32_t starts[] = {0, 1}, num_keys[] = {2}, table[] = {0};
    for (int64_t heads : {1, 9}) {
        attention_float(q, k, v, out, starts, num_keys, table, nullptr, 1, heads, 1, 1, 2, 16, 16 * heads, 16, 32, 32,
                        32, 32, 1, 1, 0, 0, 1, 0, 0, 2);
        for (int i = 0; i < 16 * heads; i++)
            if (!(std::abs(out[i] - 2) < 1e-5f)) return 1;
    }
    return 0;
}
}
