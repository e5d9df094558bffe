// Scores to weights, and parts of a context to one. Compiled for each level.
#pragma once

#include "attention_mode.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Largest scores begin here, below all that occur; scores of tokens that are not seen lie so far
// below that their weight is 0 even then.
constexpr float no_score = -1e20f, unseen_score = -1e37f;
constexpr float log2_e = 1.44269504f;  // weights are powers of two

// 2^x of x <= 1, 0 of those far below; exactly 1 of 0. To about 1 ulp; for pairs, whose weights
// are rounded to 8 bits, to 3e-6.
template <bool exact>
inline F16 exp2(F16 x) {
#if !defined(__AVX512F__)
    const F16 power = x;
    x = maximum(x, broadcast(-126.0f));
#endif
    const F16 n = round(x), r = x - n;
    F16 p;
    if constexpr (exact) {
        p = broadcast(1.535336188319500e-4f);
        p = fma(p, r, broadcast(1.339887440266574e-3f));
        p = fma(p, r, broadcast(9.618437357674640e-3f));
        p = fma(p, r, broadcast(5.550332471162809e-2f));
        p = fma(p, r, broadcast(2.402264791363012e-1f));
        p = fma(p, r, broadcast(6.931472028550421e-1f));
    } else {
        p = broadcast(9.582853168908782e-3f);
        p = fma(p, r, broadcast(5.590642503645795e-2f));
        p = fma(p, r, broadcast(2.4024098611259492e-1f));
        p = fma(p, r, broadcast(6.931241933678395e-1f));
    }
    p = scale_by_power(fma(p, r, broadcast(1.0f)), n);
#if defined(__AVX512F__)
    return p;
#elif defined(__AVX2__)
    const __m256 least = _mm256_set1_ps(-126.0f);
    return {_mm256_and_ps(p.a, _mm256_cmp_ps(power.a, least, _CMP_GE_OQ)),
            _mm256_and_ps(p.b, _mm256_cmp_ps(power.b, least, _CMP_GE_OQ))};
#else
    return each([&](int i) { return power.v[i] >= -126.0f ? p.v[i] : 0.0f; });
#endif
}

// Scores begin .. end (multiples of 16) to softcap * tanh(score * scale / softcap), whose scale is 1.
inline void cap(float* scores, int64_t begin, int64_t end, float scale, float softcap) {
    const F16 by = broadcast(2.0f * scale / softcap), most = broadcast(softcap);
    const F16 one = broadcast(1.0f), two = broadcast(2.0f);
    for (int64_t t = begin; t < end; t += lanes)
        store(scores + t, most * (one - two / (one + exp(load(scores + t) * by))));
}

// Lanes first .. last of x, `other` elsewhere.
inline F16 between(F16 x, int64_t first, int64_t last, float other) {
    float values[lanes];
    store(values, x);
    for (int i = 0; i < lanes; ++i)
        if (i < first || i >= last) values[i] = other;
    return load(values);
}

// One line's scores of a part, by token of the part; those from `first` to `last` are seen.
struct ScoreLine {
    float* scores;
    int64_t first, last;
    float scale;               // of scores, in powers of two
    const float* value_scales;  // by token; null where all are 1
};

// What a part computes for a line in addition to its weighted values.
struct PartOfLine {
    float largest;  // score, in powers of two
    float sum;      // of the weights
};

// Weights of tokens from .. to (multiples of 16), zeros where nothing is seen. Tokens are summed in
// 16 columns, in order, so that those that are not seen change nothing.
template <typename Mode>
inline PartOfLine weigh(const ScoreLine& line, int64_t from, int64_t to,
                        typename Mode::Number* weights) {
    const int64_t first = line.first > from ? line.first : from;
    const int64_t last = line.last < to ? line.last : to;
    if (first >= last) {
        std::memset(weights + from, 0, (to - from) * sizeof *weights);
        return {no_score, 0.0f};
    }
    const int64_t begin = first / lanes * lanes, end = round_up(last, lanes);
    std::memset(weights + from, 0, (begin - from) * sizeof *weights);
    std::memset(weights + end, 0, (to - end) * sizeof *weights);
    F16 most = broadcast(unseen_score);
    for (int64_t t = begin; t < end; t += lanes) {
        F16 scores = load(line.scores + t);
        if (t < first || t + lanes > last) {
            scores = between(scores, first - t, last - t, unseen_score);
            store(line.scores + t, scores);
        }
        most = maximum(most, scores);
    }
    const float scaled = largest(most) * line.scale;
    const float bound = scaled > no_score ? scaled : no_score;
    const F16 scale = broadcast(line.scale), offset = broadcast(-bound);
    F16 sums = zero();
    for (int64_t t = begin; t < end; t += lanes) {
        F16 weight = exp2<Mode::in_lane == 1>(fma(load(line.scores + t), scale, offset));
        sums = sums + weight;
        if (line.value_scales) weight = weight * load(line.value_scales + t);
        Mode::put(weights + t, weight);
    }
    return {bound, sum(sums)};
}

// What is known of a line: largest score, sum of weights, weighted values [columns].
struct LineState {
    float* largest;
    float* sum;
    float* values;
};

inline void forget(const LineState& line, int64_t columns) {
    *line.largest = no_score;
    *line.sum = 0.0f;
    for (int64_t d = 0; d < columns; d += lanes) store(line.values + d, zero());
}

// By what a line's values are multiplied in the end; 0 where it saw nothing. A sink is a score that
// takes part and has no value.
inline float share_of_values(const LineState& line, const float* sink) {
    if (!sink) return *line.sum > 0.0f ? 1.0f / *line.sum : 0.0f;
    const float score = *sink * log2_e;
    const float bound = *line.largest > score ? *line.largest : score;
    float weights[lanes] = {*line.largest - bound, score - bound};
    store(weights, exp2<true>(load(weights)));
    return weights[0] / (*line.sum * weights[0] + weights[1]);
}

// Adds the next part. A part that gave nothing changes nothing.
inline void fold(const LineState& line, const PartOfLine& part, const float* values,
                 int64_t columns) {
    if (part.largest <= no_score) return;
    const float bound = *line.largest > part.largest ? *line.largest : part.largest;
    float exponents[lanes] = {*line.largest - bound, part.largest - bound};
    store(exponents, exp2<true>(load(exponents)));
    const F16 before = broadcast(exponents[0]), added = broadcast(exponents[1]);
    *line.largest = bound;
    *line.sum = *line.sum * exponents[0] + part.sum * exponents[1];
    for (int64_t d = 0; d < columns; d += lanes)
        store(line.values + d, load(line.values + d) * before + load(values + d) * added);
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
