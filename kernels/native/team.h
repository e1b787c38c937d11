// Threads that share the work of one call, and wait for the next one.
//
// A decode step is about 90 calls of 20 to 300 us. Waking a thread that sleeps takes 8 to 30 us of each; one that spins
// for the next call is there at once, but takes a processor from whoever needs it. So threads spin for a moment, which
// bridges the gaps within a step and not those between steps, and only as long as nobody else wants their processor:
// each looks from time to time how long the kernel let it wait for one (SpinJudge).
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

constexpr int MOST_THREADS = 256;
constexpr int64_t SPIN_NS = 50'000;          // for the next call
constexpr int64_t JOIN_SPIN_NS = 20'000;     // for those who are not done with this one
constexpr int64_t JUDGED_NS = 20'000'000;    // of spinning, after which it is looked at
constexpr int64_t PAUSE_NS = 1'000'000'000;  // without spinning, where others want the processor
constexpr int64_t MOST_DELAY = 10;           // percent of the time that a thread could have run and had to wait

inline int64_t clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns whether it came true in time.
template <class Is>
bool spin_until(Is is, int64_t ns) {
    if (is()) return true;
    for (const int64_t end = clock_ns() + ns; clock_ns() < end;)
        for (int i = 0; i < 8; i++) {
            if (is()) return true;
            relax();
        }
    return false;
}

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// Whether its thread should spin. To be made and asked on that thread.
class SpinJudge {
    int file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    bool spins_ = false;
    int64_t next_ = 0, start_ = 0, delay_ = 0;

    // Nanoseconds that the thread could have run and no processor was free: the second number. Below 0: not known.
    int64_t delay() const {
        char text[64];
        const ssize_t size = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
        if (size <= 0) return -1;
        text[size] = 0;
        char* rest;
        strtoll(text, &rest, 10);
        return strtoll(rest, nullptr, 10);
    }

  public:
    bool spins() {
        const int64_t now = clock_ns();
        if (now < next_) return spins_;
        const int64_t delay = this->delay();
        // Without spinning there is a delay whenever a sleeping thread is woken: that says nothing of others.
        spins_ = delay >= 0 && !(spins_ && (delay - delay_) * 100 > (now - start_) * MOST_DELAY);
        start_ = now, delay_ = delay, next_ = now + (spins_ ? JUDGED_NS : PAUSE_NS);
        return spins_;
    }
};

class Team {
    struct alignas(64) Worker {
        std::atomic<uint32_t> turn{0};  // goes up by one for each call that it takes part in
        std::atomic<uint32_t> sleeps{0};
    };
    Worker workers_[MOST_THREADS - 1];
    alignas(64) std::atomic<bool> is_taken_{false};
    std::atomic<uint32_t> num_working_{0}, caller_sleeps_{0};
    int num_workers_ = 0;
    void (*run_)(const void* body) = nullptr;
    const void* body_ = nullptr;

    void wait(Worker& worker, uint32_t seen, bool spins) {
        auto is_called = [&] { return worker.turn.load(std::memory_order_acquire) != seen; };
        if (spins && spin_until(is_called, SPIN_NS)) return;
        worker.sleeps.store(1);  // who calls from now on wakes it; who called before is seen by the kernel
        while (!is_called()) sleep_while(worker.turn, seen);
        worker.sleeps.store(0, std::memory_order_relaxed);
    }

    void work(Worker& worker, uint32_t seen) {
        SpinJudge judge;
        while (true) {
            wait(worker, seen++, judge.spins());
            run_(body_);
            if (num_working_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake(num_working_);
        }
    }

    struct Start {
        Team* team;
        Worker* worker;
        uint32_t seen;
    };
    static void* begin(void* pointer) {
        const Start start = *(Start*)pointer;
        delete (Start*)pointer;
        start.team->work(*start.worker, start.seen);
        return nullptr;
    }

    // Returns how many there are, at most as many as wanted.
    int have_workers(int wanted) {
        // Signals are for the threads of the program, but for those that a thread's own instructions raise.
        sigset_t others, before;
        sigfillset(&others);
        for (int own : {SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV}) sigdelset(&others, own);
        while (num_workers_ < wanted) {
            Worker& worker = workers_[num_workers_];
            auto* start = new Start{this, &worker, worker.turn.load()};
            pthread_t thread;
            pthread_sigmask(SIG_SETMASK, &others, &before);
            const bool failed = pthread_create(&thread, nullptr, begin, start);
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            if (failed) {
                delete start;
                break;
            }
            pthread_detach(thread);
            num_workers_++;
        }
        return std::min(num_workers_, wanted);
    }

  public:
    // Has num_threads call run(body), the caller among them, and returns when all are done. False, and nothing was done,
    // while another thread of the program has the team.
    bool run(int num_threads, void (*run)(const void*), const void* body) {
        if (is_taken_.exchange(true, std::memory_order_acquire)) return false;
        const int num_workers = have_workers(std::min(num_threads, MOST_THREADS) - 1);
        run_ = run, body_ = body;
        num_working_.store(num_workers);
        for (int i = 0; i < num_workers; i++) {
            workers_[i].turn.fetch_add(1);
            if (workers_[i].sleeps.load()) wake(workers_[i].turn);
        }
        run(body);
        auto is_done = [&] { return num_working_.load(std::memory_order_acquire) == 0; };
        if (!spin_until(is_done, JOIN_SPIN_NS)) {
            caller_sleeps_.store(1);
            while (const uint32_t left = num_working_.load()) sleep_while(num_working_, left);
            caller_sleeps_.store(0);
        }
        is_taken_.store(false, std::memory_order_release);
        return true;
    }

    // In a process that was forked, where the threads are not.
    void forget_workers() {
        num_workers_ = 0;
        is_taken_ = false, caller_sleeps_ = 0;
        for (Worker& worker : workers_) worker.sleeps = 0;
    }
};

// One for all libraries of the process: GCC marks inline variables so that the dynamic linker keeps one of each name.
// With other compilers each library has its own, whose threads sleep while the others work.
inline Team team;
inline const int forks = pthread_atfork(nullptr, nullptr, [] { team.forget_workers(); });

// Calls body(task) for each task below num_tasks, on several threads where that is worth it, `chunk` tasks in a row on the
// same one. Without a chunk: pieces of an eighth of what a thread would get.
template <class Body>
void each_task(int64_t num_tasks, int num_threads, bool is_much, const Body& body, int64_t chunk = 0) {
    if (chunk == 0) chunk = std::max<int64_t>(1, num_tasks / (8 * num_threads));
    std::atomic<int64_t> next{0};
    auto share = [&] {
        for (int64_t first; (first = next.fetch_add(chunk, std::memory_order_relaxed)) < num_tasks;)
            for (int64_t task = first; task < std::min(first + chunk, num_tasks); task++) body(task);
    };
    typedef decltype(share) Share;
    const int threads = (int)std::min<int64_t>(num_threads, (num_tasks + chunk - 1) / chunk);
    if (is_much && threads > 1 && team.run(threads, [](const void* share) { (*(Share*)share)(); }, &share)) return;
    for (int64_t task = 0; task < num_tasks; task++) body(task);
}
