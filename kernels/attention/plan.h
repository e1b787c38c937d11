// How one call of attention is cut into tasks, and which of their results are merged.
#pragma once
#include <algorithm>
#include <vector>

#include "few_rows.h"

constexpr int64_t TASK_ROWS = 256;        // most rows of one prefill task: enough to repay laying keys and values in lines
constexpr int64_t ROW_STEP = 32;          // and a multiple of these, which are multiplied at once
constexpr int64_t SPLIT_ROWS = 16;        // of short chunks, and up to so many rows, keys are split among tasks
constexpr int64_t ALIKE_TOKENS = 17;      // a chunk of up to so many tokens (one and its drafts) is computed token for
                                          // token as in chunks of one: a verified text is the same to the last bit
constexpr int64_t SERIAL_WORK = 1 << 18;  // multiplications below which waking other threads costs more than it gives
constexpr int64_t SHARED_COLUMNS = 2 + 64;  // of the table of keys that requests share: shared.py

// Rows [first_row, ...) of a partial state of `rows` rows.
struct Part {
    int64_t partial, rows, first_row;
};

// Rows whose keys were split: parts [first_part, end_part), in the order of their keys.
struct Merge {
    int64_t token, num_tokens, kv_head, first_part, end_part;
};

// Keys [first_key, end_key) of a request that tasks shared with others see to: a part for each split and kv head.
struct Covered {
    int64_t first_key = 0, end_key = 0;
    std::vector<Part> parts;
};

struct Plan {
    std::vector<Task> tasks;
    std::vector<Span> spans;
    std::vector<Part> parts;
    std::vector<Merge> merges;
    int64_t partial_floats = 0, work = 0, most_rows = 0, most_few_rows = 0;

    // Returns where the task's state goes.
    template <class T>
    int64_t add(const View<T>& view, Task task, int64_t rows) {
        task.partial = partial_floats;
        tasks.push_back(task);
        work += rows * (task.end_key - task.first_key) * (view.size + view.value_size) / 2;
        if (task.is_split) partial_floats += State::num_floats(rows, view.value_size);
        int64_t& most = task.is_few ? most_few_rows : most_rows;
        most = std::max(most, rows);
        return task.partial;
    }
};

// What a request computes in this step.
struct Chunk {
    int64_t token, num_tokens, position;  // position: of the first token

    template <class T>
    static Chunk of(const View<T>& view, int64_t request) {
        const int64_t start = view.query_starts[request], num_tokens = view.query_starts[request + 1] - start;
        return {start, num_tokens, view.num_keys[request] - num_tokens};
    }
    bool is_short() const { return num_tokens <= ALIKE_TOKENS; }
    // Tokens whose sight begins at different keys would pair keys differently than each alone.
    template <class T>
    bool is_together(const View<T>& view) const {
        return view.lowest(position) == view.lowest(position + num_tokens - 1);
    }
};

template <class T>
bool is_few(const View<T>& view, int64_t rows) {
    return rows <= FEW_ROWS && !view.is_exact;
}

// Whether tasks for several requests give each the same as tasks of its own would: the same splits of the same keys.
template <class T>
bool can_share(const View<T>& view, const int32_t* row, const std::vector<Covered>& covered) {
    const int64_t first_key = row[0], end_key = row[1];
    if (first_key % SPLIT_KEYS || end_key % SPLIT_KEYS) return false;
    for (const int32_t* member = row + 2; member < row + SHARED_COLUMNS && *member >= 0; member++) {
        const Chunk chunk = Chunk::of(view, *member);
        const Covered& before = covered[*member];
        if (chunk.num_tokens < 1 || !chunk.is_short() || !chunk.is_together(view)) return false;
        if (view.lowest(chunk.position) > first_key || end_key > chunk.position) return false;
        if (before.end_key && before.end_key != first_key) return false;
    }
    return true;
}

// Splits [first_key, end_key) of members [first, last), which share them.
template <class T>
void plan_shared(const View<T>& view, const int32_t* row, const int32_t* first, const int32_t* last, Plan& plan,
                 std::vector<Covered>& covered) {
    const int64_t first_span = plan.spans.size(), share = view.share();
    int64_t num_tokens = 0;
    for (const int32_t* member = first; member < last; member++) {
        const Chunk chunk = Chunk::of(view, *member);
        plan.spans.push_back({chunk.token, chunk.num_tokens});
        num_tokens += chunk.num_tokens;
        if (!covered[*member].end_key) covered[*member].first_key = row[0];
        covered[*member].end_key = row[1];
    }
    for (int64_t key = row[0]; key < row[1]; key += SPLIT_KEYS)
        for (int64_t head = 0; head < view.num_kv_heads; head++) {
            Task task{*first, head, 0, num_tokens, 0, key, key + SPLIT_KEYS, is_few(view, share), true, 0};
            task.first_span = first_span, task.end_span = plan.spans.size();
            Part part{plan.add(view, task, num_tokens * share), num_tokens * share, 0};
            for (int64_t i = 0; i < last - first; i++) {
                covered[first[i]].parts.push_back(part);
                part.first_row += plan.spans[first_span + i].num_tokens * share;
            }
        }
}

// Keys that several requests share are read once for as many rows as keep all threads busy.
template <class T>
std::vector<Covered> plan_all_shared(const View<T>& view, int num_threads, Plan& plan) {
    std::vector<Covered> covered(view.num_requests);
    const int32_t* end = view.shared + view.num_shared * SHARED_COLUMNS;
    int64_t split_rows = 0;
    for (const int32_t* row = view.shared; row < end; row += SHARED_COLUMNS)
        for (const int32_t* member = row + 2; member < row + SHARED_COLUMNS && *member >= 0; member++)
            split_rows += (row[1] - row[0]) / SPLIT_KEYS * view.num_kv_heads * view.share();
    const int64_t most_rows = std::min(TASK_ROWS, split_rows / (2 * num_threads));
    for (const int32_t* row = view.shared; row < end; row += SHARED_COLUMNS) {
        if (!can_share(view, row, covered)) continue;
        const int32_t* first = row + 2;
        while (first < row + SHARED_COLUMNS && *first >= 0) {
            const int32_t* last = first;
            int64_t rows = 0;
            do {
                rows += Chunk::of(view, *last++).num_tokens * view.share();
            } while (last < row + SHARED_COLUMNS && *last >= 0 && rows < most_rows);
            plan_shared(view, row, first, last, plan, covered);
            first = last;
        }
    }
    return covered;
}

// The tile's rows against all keys that no shared task sees to.
// How they are computed is decided by those of one token, where chunks are short.
template <class T>
void plan_tile(const View<T>& view, Task task, bool is_short, const Covered& covered, Plan& plan) {
    const int64_t alike_rows = view.share() * (is_short ? 1 : task.num_tokens);
    const int64_t rows = task.num_tokens * view.share();
    const int64_t start = view.lowest(task.position), end = task.position + task.num_tokens;
    const int64_t step = is_short || alike_rows <= SPLIT_ROWS ? SPLIT_KEYS : end;
    task.is_few = is_few(view, alike_rows);
    task.is_split = (end - 1) / step > start / step;
    const int64_t first_part = plan.parts.size();
    for (int64_t key = start; key < end;) {
        if (covered.first_key <= key && key < covered.end_key) {
            for (size_t i = task.kv_head; i < covered.parts.size(); i += view.num_kv_heads)
                plan.parts.push_back(covered.parts[i]);
            key = covered.end_key;
            continue;
        }
        task.first_key = key;
        task.end_key = key = std::min(end, (key / step + 1) * step);
        const int64_t partial = plan.add(view, task, rows);
        if (task.is_split) plan.parts.push_back({partial, rows, 0});
    }
    if (task.is_split)
        plan.merges.push_back({task.token, task.num_tokens, task.kv_head, first_part, (int64_t)plan.parts.size()});
}

// Rows of one prefill task: so many that all threads are busy to the end, rather than waiting for the last task.
template <class T>
int64_t choose_task_rows(const View<T>& view, int num_threads) {
    const int64_t num_rows = view.query_starts[view.num_requests] * view.num_heads;
    return std::clamp(num_rows / (4 * num_threads) / ROW_STEP * ROW_STEP, ROW_STEP, TASK_ROWS);
}

template <class T>
Plan make_plan(const View<T>& view, int num_threads) {
    Plan plan;
    const int64_t task_rows = choose_task_rows(view, num_threads);
    const std::vector<Covered> covered = plan_all_shared(view, num_threads, plan);
    const int64_t num_shared_tasks = plan.tasks.size();
    for (int64_t request = 0; request < view.num_requests; request++) {
        const Chunk chunk = Chunk::of(view, request);
        const bool is_short = chunk.is_short();
        const int64_t step = is_short ? (chunk.is_together(view) ? chunk.num_tokens : 1)
                                      : std::max<int64_t>(1, task_rows / view.share());
        for (int64_t head = 0; head < view.num_kv_heads; head++)
            for (int64_t token = 0; token < chunk.num_tokens; token += step) {
                Task task{request, head, chunk.token + token, std::min(step, chunk.num_tokens - token),
                          chunk.position + token};
                plan_tile(view, task, is_short, covered[request], plan);
            }
    }
    // The last are run first: those for several requests are long.
    std::rotate(plan.tasks.begin(), plan.tasks.begin() + num_shared_tasks, plan.tasks.end());
    return plan;
}
