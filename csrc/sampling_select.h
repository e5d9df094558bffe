// Thresholds among a few numbers, without sorting them.
#pragma once

#include <cstdint>

namespace slipstream {

// Probability is counted in integers, so that sums are exact in any order.
constexpr double mass_units = 8796093022208.0;  // 2^43

inline int64_t mass_of(float weight) {
    return static_cast<int64_t>(static_cast<double>(weight) * mass_units);
}

// The k-th largest of `count` values, 1 <= k <= count; puts them in another order.
float kth_largest(float* values, int64_t count, int64_t k);

// The largest weight such that those not below it have the mass `wanted` (at least 1); the smallest
// of all if none has. Destroys the list. Among thousands of weights that are as good as equal
// rounding decides which it is.
float mass_threshold(float* weights, int64_t count, int64_t wanted);

}  // namespace slipstream
