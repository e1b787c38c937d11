// What the recurrent ops share: the requests of a step, rows of either dtype, the functions of a gate.
#pragma once
#include <algorithm>

#include "team.h"
#include "vec.h"

constexpr int64_t SERIAL_WORK = 1 << 15;  // multiplications below which waking other threads costs more than it gives

// log(1 + exp(x)) as max(x, 0) + log(1 + e) with e = exp(-|x|), where log(1 + e) is e * (1 + e * (best of degree 7 on
// [0, 1], by relative error)), to 3 units in the last place: processors divide slowly.
INLINE vf softplus(vf x) {
    const vf e = exp2_of_low(select(x < 0.0f, x, -x) * LOG2E);
    vf y = set1(5.36482548e-3f);
    y = y * e - 3.00657973e-2f;
    y = y * e + 7.92045444e-2f;
    y = y * e - 1.37538031e-1f;
    y = y * e + 1.91536546e-1f;
    y = y * e - 2.48571634e-1f;
    y = y * e + 3.3321324e-1f;
    y = y * e - 4.99996483e-1f;
    y = y * e + 1.0f;
    return max(vf{}, x) + y * e;
}

// Rows of float or bf16, `stride` elements apart.
struct Rows {
    const void* data;
    int64_t stride;
    bool is_bf16;

    METHOD vf at(int64_t row, int64_t column, int n) const {
        int64_t i = row * stride + column;
        return is_bf16 ? load_first((const bf16*)data + i, n) : load_first((const float*)data + i, n);
    }
    METHOD float at(int64_t row, int64_t column) const {
        int64_t i = row * stride + column;
        return is_bf16 ? to_float(((const bf16*)data)[i]) : ((const float*)data)[i];
    }
    // Before it is read: rows lie so far apart that processors don't look ahead. No row need be there.
    METHOD void ask_for(int64_t row, int64_t column) const {
        const int64_t i = row * stride + column;
        if (data) __builtin_prefetch(is_bf16 ? (const void*)((const bf16*)data + i) : (const float*)data + i, 0, 2);
    }
    METHOD void put(int64_t row, int64_t column, vf x, int n) const {
        int64_t i = row * stride + column;
        if (is_bf16) return store_first((bf16*)data + i, x, n);
        store_first((float*)data + i, x, n);
    }
    METHOD void put(int64_t row, int64_t column, float x) const { put(row, column, set1(x), 1); }
};

// A float for each of up to LANES channels; zeros where there is no such tensor.
INLINE vf load_or_zero(const float* p, int64_t i, int n) { return p ? load_first(p + i, n) : vf{}; }

// StateMeta, by its fields.
struct Batch {
    const int32_t* starts;
    const int64_t* slots;
    const bool* has_history;
    const int64_t* capture_ends;
    const int64_t* capture_requests;
    const int64_t* capture_slots;
    int64_t num_requests, num_captures;

    int64_t begin(int64_t r) const { return starts[r]; }
    int64_t end(int64_t r) const { return starts[r + 1]; }
    int64_t num_tokens() const { return starts[num_requests]; }

    // Walks over a request's tokens in pieces that end at each capture and have at most `most` tokens:
    // run(begin, end), and behind it keep(slot) for every state that is to be kept there.
    template <class Run, class Keep>
    void walk(int64_t r, int64_t most, Run run, Keep keep) const {
        const int64_t* first = std::lower_bound(capture_requests, capture_requests + num_captures, r);
        int64_t capture = first - capture_requests;
        for (int64_t token = begin(r); token < end(r);) {
            int64_t next = end(r) - token > most ? token + most : end(r);
            if (is_of(capture, r)) next = std::min(next, capture_ends[capture]);
            run(token, next);
            for (; is_of(capture, r) && capture_ends[capture] == next; capture++) keep(capture_slots[capture]);
            token = next;
        }
    }

    bool is_of(int64_t capture, int64_t r) const { return capture < num_captures && capture_requests[capture] == r; }
};

// body(request, part) for all requests that have tokens, and all of num_parts that don't depend on each other.
template <class Body>
void each_of_batch(const Batch& batch, int64_t num_parts, int num_threads, bool is_much, const Body& body) {
    auto run = [&](int64_t task) {
        const int64_t r = task / num_parts;
        if (batch.begin(r) < batch.end(r)) body(r, task % num_parts);
    };
    each_task(batch.num_requests * num_parts, num_threads, is_much, run);
}

#define BATCH_ARGUMENTS                                                                                             \
    const int32_t *starts, const int64_t *slots, const bool *has_history, const int64_t *capture_ends,              \
        const int64_t *capture_requests, const int64_t *capture_slots, int64_t num_requests, int64_t num_captures
#define BATCH \
    Batch { starts, slots, has_history, capture_ends, capture_requests, capture_slots, num_requests, num_captures }
