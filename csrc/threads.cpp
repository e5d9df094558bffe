#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__)
#include <pthread.h>
#endif

namespace slipstream {
namespace {

// A worker looks for work this many times before it sleeps: longer than the gap between two ops of
// a pass, shorter than what other programs would miss.
constexpr int spins = 4000;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// The tasks that one thread begins with; others take from them when their own are done.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

class Pool {
  public:
    ~Pool() { resize(1); }

    int size() const { return count_; }

    void resize(int count) {
        std::lock_guard<std::mutex> alone(busy_);
        stop();
        count_ = count < 1 ? 1 : count;
        shares_ = std::make_unique<Share[]>(count_);
    }

    void run(int64_t tasks, void (*work)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> alone(busy_, std::defer_lock);
        if (tasks <= 1 || count_ == 1 || !alone.try_lock()) {
            for (int64_t task = 0; task < tasks; ++task) work(context, task);
            return;
        }
        if (threads_.empty()) start();
        for (int thread = 0; thread < count_; ++thread) {
            shares_[thread].next.store(tasks * thread / count_, std::memory_order_relaxed);
            shares_[thread].end = tasks * (thread + 1) / count_;
        }
        work_ = work;
        context_ = context;
        door_.fetch_and(~closed, std::memory_order_release);
        turn_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        take(0);
        // Threads that have not entered by now find no task and are not waited for: on a busy machine
        // a thread may be milliseconds late.
        door_.fetch_or(closed, std::memory_order_relaxed);
        for (int spin = 0; door_.load(std::memory_order_acquire) != closed; ++spin) {
            if (spin < spins) pause();
            else std::this_thread::yield();
        }
        if (failed_.load(std::memory_order_relaxed)) {
            failed_.store(false, std::memory_order_relaxed);
            std::rethrow_exception(std::exchange(error_, nullptr));
        }
    }

  private:
    void take(int first) {
        try {
            for (int turn = 0; turn < count_; ++turn) {
                Share& share = shares_[(first + turn) % count_];
                for (;;) {
                    const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
                    if (task >= share.end) break;
                    work_(context_, task);
                }
            }
        } catch (...) {
            fail();
        }
    }

    // Keeps the first exception of a turn for the caller, and drops the tasks that are left.
    void fail() {
        if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
        for (int thread = 0; thread < count_; ++thread)
            shares_[thread].next.store(shares_[thread].end, std::memory_order_relaxed);
    }

    // All of them, or none.
    void start() {
        stopping_ = false;
        const uint64_t seen = turn_.load();
        threads_.reserve(count_ - 1);
        try {
            for (int index = 1; index < count_; ++index)
                threads_.emplace_back([this, index, seen] { loop(index, seen); });
        } catch (const std::exception&) {
            stop();
            throw std::runtime_error("the system starts no more threads: use fewer (--threads), or "
                                     "give the process more memory or a higher limit of them");
        }
    }

    void stop() {
        if (threads_.empty()) return;
        stopping_ = true;
        turn_.fetch_add(1);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

    void loop(int index, uint64_t seen) {
        for (;;) {
            wait(seen);
            seen = turn_.load(std::memory_order_seq_cst);
            if (stopping_) return;
            if (door_.load(std::memory_order_relaxed) & closed) continue;
            if (!(door_.fetch_add(1, std::memory_order_acquire) & closed)) take(index);
            door_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Until the turn is no longer `seen`.
    void wait(uint64_t seen) {
        for (int spin = 0; spin < spins; ++spin) {
            if (turn_.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return turn_.load(std::memory_order_seq_cst) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }

    std::mutex busy_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Share[]> shares_ = std::make_unique<Share[]>(1);
    int count_ = 1;
    void (*work_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::atomic<uint64_t> turn_{0};
    // The number of workers inside, and whether more may enter: work, context and shares change only
    // while it is closed and no worker is inside.
    static constexpr int closed = 1 << 30;
    std::atomic<int> door_{closed};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false}, failed_{false};
    std::exception_ptr error_;  // of the turn, where it failed
};

// Never destroyed: its threads may still wait when the process ends.
Pool* current = nullptr;

// In a child process the threads do not exist, but the locks of their pool may still be held by them:
// a new pool of the same size replaces it, and the old one is never used again.
void replace_in_child() {
    const int count = current->size();
    current = new Pool;
    current->resize(count);
}

Pool& pool() {
    static const bool made = [] {
        current = new Pool;
#if defined(__unix__)
        pthread_atfork(nullptr, nullptr, replace_in_child);
#endif
        return true;
    }();
    (void)made;
    return *current;
}

}  // namespace

int num_threads() { return pool().size(); }
void set_num_threads(int count) { pool().resize(count); }
void run_tasks(int64_t tasks, void (*work)(void*, int64_t), void* context) {
    pool().run(tasks, work, context);
}

}  // namespace slipstream
