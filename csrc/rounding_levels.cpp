// The arithmetic of rounding. Compiled once for each level of instructions, with one result: no
// product and sum are contracted, and sums of a group halve it until one number is left.
#include "rounding.h"

#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

constexpr float tiny = 1.17549435e-38f * 127.0f;  // whose 127th part is a normal number
constexpr float finite = 1e38f;
constexpr float most_int4 = 15.0f, middle = 8.0f;
constexpr int most_group = 128;
// A group's scale makes its largest number representable, or is this much smaller.
constexpr int num_clips = 2;
constexpr double clips[num_clips] = {1.0, 0.9};

inline F16 bounded(F16 x, float least, float most) {
    return minimum(maximum(x, broadcast(least)), broadcast(most));
}
inline float bounded(float x, float least, float most) {
    return x < least ? least : x > most ? most : x;
}

template <typename Number>
void widen_numbers(const Number* row, int64_t columns, float* out) {
    int64_t column = 0;
    for (; column + lanes <= columns; column += lanes) store(out + column, load(row + column));
    if (column < columns)
        store(out + column, load_first(row + column, static_cast<int>(columns - column)));
}

void widen_row(const void* row, bool is_bf16, int64_t columns, float* out) {
    if (is_bf16) widen_numbers(static_cast<const bf16*>(row), columns, out);
    else widen_numbers(static_cast<const float*>(row), columns, out);
}

float row_to_int8(const float* row, int64_t columns, int8_t* values) {
    F16 most = zero();
    for (int64_t column = 0; column < columns; column += lanes) {
        const F16 x = load(row + column);
        most = maximum(most, maximum(x, zero() - x));
    }
    const float extreme = largest(most), scale = (extreme > tiny ? extreme : tiny) / 127.0f;
    const F16 by = broadcast(scale);
    for (int64_t column = 0; column < columns; column += lanes) {
        float rounded[lanes];
        store(rounded, bounded(round(load(row + column) / by), -127.0f, 127.0f));
        for (int lane = 0; lane < lanes; ++lane)
            values[column + lane] = static_cast<int8_t>(rounded[lane]);
    }
    return scale;
}

struct Choice {
    float scale, zero;
};

// Large and finite where a scale is 0, whose group has nothing but zeros.
inline float inverse(float scale) { return bounded(1.0f / scale, -finite, finite); }

// -8 has no counterpart: it stands for the larger extreme, whichever its sign is.
Choice centred(float low, float high, double clip) {
    const float extreme = __builtin_copysignf(-low > high ? -low : high, low + high);
    return {extreme * static_cast<float>(-clip / middle), 0.0f};
}

Choice with_zero(float low, float high, double clip) {
    low = low < 0.0f ? low : 0.0f;
    high = high > 0.0f ? high : 0.0f;
    const float half = (high - low) * static_cast<float>(clip / 2);
    const float scale = half * static_cast<float>(2.0 / most_int4);
    const float place = (half - (low + high) / 2.0f) * inverse(scale);
    return {scale, bounded(__builtin_rintf(place), 0.0f, most_int4)};
}

// The norm of what is lost.
float error(const float* group, int64_t size, Choice choice, float least) {
    const F16 by = broadcast(inverse(choice.scale)), zero_at = broadcast(choice.zero);
    F16 squares[most_group / lanes];
    const int count = static_cast<int>(size / lanes);
    for (int part = 0; part < count; ++part) {
        const F16 scaled = load(group + part * lanes) * by + zero_at;
        const F16 lost = bounded(round(scaled), least, least + most_int4) - scaled;
        squares[part] = lost * lost;
    }
    for (int half = count / 2; half; half /= 2)
        for (int part = 0; part < half; ++part) squares[part] = squares[part] + squares[part + half];
    return __builtin_sqrtf(sum(squares[0])) * __builtin_fabsf(choice.scale);
}

Choice better(const float* group, const Int4Groups& groups) {
    F16 lowest = load(group), highest = lowest;
    for (int64_t column = lanes; column < groups.size; column += lanes) {
        const F16 x = load(group + column);
        lowest = minimum(lowest, x);
        highest = maximum(highest, x);
    }
    const float low = -largest(zero() - lowest), high = largest(highest);
    const float least = groups.has_zeros ? 0.0f : -middle;
    Choice choices[num_clips];
    float errors[num_clips];
    for (int clip = 0; clip < num_clips; ++clip) {
        choices[clip] = groups.has_zeros ? with_zero(low, high, clips[clip])
                                         : centred(low, high, clips[clip]);
        errors[clip] = error(group, groups.size, choices[clip], least);
    }
    return choices[errors[1] < errors[0]];
}

void choose_scales(const float* row, const Int4Groups& groups, float* scales, uint8_t* zeros) {
    for (int64_t group = 0; group < groups.count; ++group) {
        const Choice chosen = better(row + group * groups.size, groups);
        scales[group] = chosen.scale;
        zeros[group] = static_cast<uint8_t>(chosen.zero);
    }
}

void row_to_int4(const float* row, const Int4Groups& groups, const float* scales,
                 const uint8_t* zeros, uint8_t* values) {
    // Numbers without zeros are between -8 and 7: 8 more makes them the integers of a weight.
    const F16 up = broadcast(groups.has_zeros ? 0.0f : middle);
    const float least = groups.has_zeros ? 0.0f : -middle;
    for (int64_t group = 0; group < groups.count; ++group) {
        const F16 by = broadcast(inverse(scales[group]));
        const F16 zero_at = broadcast(groups.has_zeros ? zeros[group] : 0.0f);
        for (int64_t column = 0; column < groups.size; column += lanes, row += lanes) {
            const F16 scaled = load(row) * by + zero_at;
            float rounded[lanes];
            store(rounded, bounded(round(scaled), least, least + most_int4) + up);
            int32_t integers[lanes];
            for (int lane = 0; lane < lanes; ++lane)
                integers[lane] = static_cast<int32_t>(rounded[lane]);
            for (int pair = 0; pair < lanes / 2; ++pair)
                *values++ = static_cast<uint8_t>(integers[2 * pair] | integers[2 * pair + 1] << 4);
        }
    }
}

constexpr RoundingKernels rounding_here{widen_row, row_to_int8, choose_scales, row_to_int4};
const bool rounding_entered = rounding_kernels.enter(this_level, &rounding_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
