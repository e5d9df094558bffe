// The module `_slipstream_cpu`.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "bindings.h"
#include "buffer.h"
#include "levels.h"
#include "threads.h"

namespace slipstream {

namespace nb = nanobind;

namespace {

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (int level = 0; level < num_levels; ++level)
        if (level_runs(static_cast<Level>(level)))
            names.emplace_back(level_name(static_cast<Level>(level)));
    return names;
}

// Bytes a second at which all threads together read memory that no cache holds: the best of some
// passes, each thread reading its own part from one end to the other.
double read_bandwidth(int64_t bytes, int passes) {
    constexpr int64_t part = 1 << 20;
    const int64_t parts = bytes / part;
    Buffer memory(parts * part);
    parallel_for(parts, [&](int64_t index) {
        auto* words = reinterpret_cast<uint64_t*>(memory.data() + index * part);
        for (int64_t i = 0; i < part / 8; ++i) words[i] = static_cast<uint64_t>(i);
    });
    double best = 0.0;
    std::atomic<uint64_t> sink{0};
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        parallel_for(parts, [&](int64_t index) {
            const auto* words = reinterpret_cast<const uint64_t*>(memory.data() + index * part);
            uint64_t sums[8] = {};
            for (int64_t i = 0; i < part / 8; i += 8)
                for (int lane = 0; lane < 8; ++lane) sums[lane] ^= words[i + lane];
            uint64_t sum = 0;
            for (uint64_t one : sums) sum ^= one;
            sink += sum;
        });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(parts * part) / took.count());
    }
    return best;
}

// Tasks that Python does: for tests of the pool.
void run_python_tasks(int64_t tasks, const nb::callable& work) {
    nb::gil_scoped_release released;
    parallel_for(tasks, [&](int64_t task) {
        nb::gil_scoped_acquire held;
        work(task);
    });
}

}  // namespace

void bind_runtime(nb::module_& module) {
    module.def("levels", levels, "The levels of instructions that run here, lowest first.");
    module.def("level", [] { return level_name(active_level()); });
    module.def("set_level", [](const std::string& name) { set_level(name.c_str()); });
    module.def("num_threads", num_threads);
    module.def("set_num_threads", set_num_threads);
    module.def("run_tasks", run_python_tasks, nb::arg("tasks"), nb::arg("work"));
    module.def("give_back_memory", give_back_memory,
               nb::call_guard<nb::gil_scoped_release>());
    module.def("read_bandwidth", read_bandwidth, nb::arg("nbytes"), nb::arg("passes") = 5,
               nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace slipstream

NB_MODULE(_slipstream_cpu, module) {
    nanobind::set_leak_warnings(false);
    slipstream::bind_runtime(module);
    slipstream::bind_matmul(module);
    slipstream::bind_experts(module);
    slipstream::bind_layers(module);
    slipstream::bind_attention(module);
    slipstream::bind_delta_net(module);
    slipstream::bind_latent(module);
    slipstream::bind_low_rank(module);
    slipstream::bind_rows(module);
    slipstream::bind_preparation(module);
    slipstream::bind_sampling(module);
    slipstream::bind_drafting(module);
}
