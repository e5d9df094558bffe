#include "sampling_select.h"

#include <utility>

namespace slipstream {
namespace {

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
    return select(weights, count, wanted, mass_of);
}

}  // namespace slipstream
