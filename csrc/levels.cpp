#include "levels.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "matmul.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace slipstream {
namespace {

constexpr const char* names[num_levels] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

// Leaf 7 of cpuid, as the compiler's own list of features lacks tiles.
void leaf7(unsigned subleaf, unsigned& eax, unsigned& edx) {
    unsigned ebx, ecx = subleaf;
    eax = 7;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
}

bool has_avx512_bf16() {
    unsigned eax, edx;
    leaf7(1, eax, edx);
    return has_avx512() && __builtin_cpu_supports("avx512vbmi") && (eax >> 5 & 1);
}

bool has_amx() {
#if defined(__linux__)
    unsigned eax, edx;
    leaf7(0, eax, edx);
    const bool tile = edx >> 24 & 1, bf16 = edx >> 22 & 1, int8 = edx >> 25 & 1;
    if (!has_avx512_bf16() || !tile || !bf16 || !int8) return false;
    // The kernel gives a process its tiles when asked once; threads inherit the permission.
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool machine_has(Level level) {
    switch (level) {
        case Level::scalar: return true;
        case Level::avx2: return has_avx2();
        case Level::avx512: return has_avx512();
        case Level::avx512_bf16: return has_avx512_bf16();
        case Level::amx: return has_amx();
    }
    return false;
}
#else
bool machine_has(Level level) { return level == Level::scalar; }
#endif

#if defined(__x86_64__)
bool is_intel() { return __builtin_cpu_is("intel"); }
#else
bool is_intel() { return false; }
#endif

// The best level that runs. Intel's products of pairs take as long as four in float32, of half as
// many numbers each, so machines of theirs that hide their matrix unit do better without.
Level best() {
    for (int level = num_levels - 1; level > 0; --level) {
        const auto one = static_cast<Level>(level);
        if (level_runs(one) && !(one == Level::avx512_bf16 && is_intel())) return one;
    }
    return Level::scalar;
}

std::atomic<int> chosen{-1};

}  // namespace

const char* level_name(Level level) { return names[static_cast<int>(level)]; }

bool level_runs(Level level) {
    return matmul_kernels.entries[static_cast<int>(level)] && machine_has(level);
}

Level active_level() {
    int level = chosen.load(std::memory_order_relaxed);
    if (level < 0) chosen.store(level = static_cast<int>(best()), std::memory_order_relaxed);
    return static_cast<Level>(level);
}

void set_level(const char* name) {
    for (int level = 0; level < num_levels; ++level) {
        if (std::string(name) != names[level]) continue;
        if (!level_runs(static_cast<Level>(level)))
            throw std::invalid_argument("this machine or this build has no " + std::string(name));
        chosen.store(level, std::memory_order_relaxed);
        return;
    }
    throw std::invalid_argument(std::string(name) + " is no level");
}

}  // namespace slipstream
