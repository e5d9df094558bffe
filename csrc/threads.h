// One pool of threads for all kernels.
#pragma once

#include <cstdint>
#include <type_traits>

namespace slipstream {

// How many threads work, the caller among them; 1 until set.
int num_threads();
void set_num_threads(int count);

// Calls work(context, task) for each task in [0, tasks), on all threads, and returns when all are
// done. Results must not depend on which thread does which task. A call that comes while another
// thread's call is running does its tasks alone. If a task throws, the tasks that are left are dropped,
// and the call throws the first exception after all threads have stopped.
void run_tasks(int64_t tasks, void (*work)(void* context, int64_t task), void* context);

template <typename Work>
void parallel_for(int64_t tasks, Work&& work) {
    using Callable = std::remove_reference_t<Work>;
    run_tasks(
        tasks, [](void* context, int64_t task) { (*static_cast<Callable*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&work)));
}

// Calls work(row) for each row; few numbers are done sooner than other threads could start.
template <typename Work>
void for_rows(int64_t count, int64_t columns, Work&& work) {
    constexpr int64_t few_numbers = 8192;
    if (count * columns > few_numbers) return parallel_for(count, work);
    for (int64_t row = 0; row < count; ++row) work(row);
}

}  // namespace slipstream
