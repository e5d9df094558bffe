#include "sampling_select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sampling.h"

namespace slipstream {
namespace {

constexpr int64_t few = 1024;  // weights that are selected from at once

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float value_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

float median(float a, float b, float c) {
    if (a > b) std::swap(a, b);
    if (b > c) b = c;
    return a > b ? a : b;
}

// The largest value that `wanted` of the weights `of` reach: Hoare's selection, with a sum of
// weights in the place of ranks. Values are no NaN.
template <typename Of>
float select(float* values, int64_t count, int64_t wanted, Of of) {
    int64_t first = 0, end = count, above = 0;
    for (;;) {
        const float pivot =
            median(values[first], values[first + (end - first) / 2], values[end - 1]);
        // [first, larger) > pivot, [larger, i) == pivot, [smaller, end) < pivot
        int64_t larger = first, i = first, smaller = end, mass_larger = 0, mass_equal = 0;
        while (i < smaller) {
            const float value = values[i];
            if (value > pivot) {
                mass_larger += of(value);
                values[i++] = values[larger];
                values[larger++] = value;
            } else if (value < pivot) {
                values[i] = values[--smaller];
                values[smaller] = value;
            } else {
                mass_equal += of(value);
                ++i;
            }
        }
        if (above + mass_larger >= wanted) {
            end = larger;
        } else if (above + mass_larger + mass_equal >= wanted || smaller == end) {
            return pivot;
        } else {
            above += mass_larger + mass_equal;
            first = smaller;
        }
    }
}

}  // namespace

float kth_largest(float* values, int64_t count, int64_t k) {
    return select(values, count, k, [](float) -> int64_t { return 1; });
}

float mass_threshold(float* weights, int64_t count, int64_t wanted) {
    const auto& kernels = sampling_kernels.active();
    // The bits of weights, 0 to 1 and some for rounding, rise as they do. The threshold is in
    // [low, high).
    uint32_t low = 0, high = bits_of(1.0f) + 64;
    const double target = static_cast<double>(wanted) / mass_units;
    double above = 0.0;
    while (count > few && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        double reaching = 0.0;
        for (int64_t i = 0; i < count; i += slice_tokens)
            reaching += static_cast<double>(kernels.sum_reaching(
                weights + i, std::min(slice_tokens, count - i), value_of(middle)));
        if (above + reaching >= target) {
            low = middle;
        } else {
            above += reaching;
            high = middle;
        }
        count = kernels.keep(weights, count, value_of(low), value_of(high));
        if (!count) return value_of(high);
    }
    const auto rest = static_cast<int64_t>(std::ceil((target - above) * mass_units));
    return select(weights, count, std::max<int64_t>(rest, 1), mass_of);
}

}  // namespace slipstream
