// Which instructions the kernels use: found out once, at run time.
#pragma once

namespace slipstream {

// Each level has the instructions of those before it.
enum class Level { scalar, avx2, avx512, avx512_bf16, amx };

constexpr int num_levels = 5;

const char* level_name(Level level);

// Whether this build has the level's code and this machine its instructions.
bool level_runs(Level level);

// The level in use: the best that runs, until `set_level` was called.
Level active_level();

// Throws std::invalid_argument for a name that is no level, or one that does not run here.
void set_level(const char* name);

// The kernels of a subject at every level. Files that are compiled once for each level enter
// theirs as the module is loaded; a level that this build lacks stays null.
template <typename Kernels>
struct ByLevel {
    const Kernels* entries[num_levels];

    const Kernels& active() const { return *entries[static_cast<int>(active_level())]; }
    bool enter(Level level, const Kernels* kernels) {
        entries[static_cast<int>(level)] = kernels;
        return true;
    }
};

}  // namespace slipstream
