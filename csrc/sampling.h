// Sampling and verification over logits. What the ops mean: slipstream/kernels/sampling.py.
//
// A row of logits is cut into slices at fixed places, which threads take in any order; what slices
// found is put together in one order. So neither threads nor other rows change a row's bits.
#pragma once

#include <cstdint>

#include "levels.h"

namespace slipstream {

// Tokens whose largest logit is kept, and tokens of a slice.
constexpr int64_t group_tokens = 64, slice_tokens = 4096;
// Kernels may write this many numbers past the end of a list.
constexpr int64_t slack = 16;

inline int64_t num_groups(int64_t tokens) { return (tokens + group_tokens - 1) / group_tokens; }
inline int64_t num_slices(int64_t tokens) { return (tokens + slice_tokens - 1) / slice_tokens; }

// What a random number is for: part of its key.
enum Purpose : uint32_t { target_noise, draft_noise, accept_noise, residual_noise };

struct NoiseKey {
    uint32_t seed_low, seed_high, position, step, purpose;
};

inline NoiseKey noise_key(int64_t seed, int64_t position, int64_t step, Purpose purpose) {
    // The target's own noise has no step: plain decoding must not depend on earlier steps.
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32),
            static_cast<uint32_t>(position),
            purpose == target_noise ? 0 : static_cast<uint32_t>(step), purpose};
}

// How a row's logits become probabilities: weights exp((logit - largest) * inverse), of which those
// of tokens below a threshold are 0, times `scale`.
struct Distribution {
    float largest, inverse, lowest_logit, lowest_weight, scale;
};

// A token and what it has most of.
struct Best {
    float score;
    int64_t token;
};

// What is done to a row of logits before all else; nulls are left out. All are of the whole row.
struct Processors {
    const int32_t* output_counts;
    const uint8_t* prompt_mask;
    float presence, frequency, repetition;
    const int64_t* drafted;  // the draft tokens before the row, which count as output
    int64_t num_drafted;
    const float* bias;
    const int64_t* withheld;
    int64_t num_withheld;
    const int32_t* allowed;
};

// On slices: `logits` begin at the slice's first token.
struct SamplingKernels {
    // Tokens [first, first + count) of a row, to `out` at the same places.
    void (*process)(const Processors& how, const float* logits, int64_t first, int64_t count,
                    float* out);
    // The first of the largest logits; the largest of each group where `groups` is given; at `peak`
    // the largest, or NaN if there is one.
    Best (*largest)(const float* logits, int64_t count, float* groups, float* peak);
    // The sum of weights that reach the lowest.
    float (*sum_weights)(const float* logits, int64_t count, const Distribution& row);
    // Logits to weights, in place.
    void (*weigh)(float* logits, int64_t count, const Distribution& row);
    // Of weights: the sum of those that reach `least`.
    float (*sum_reaching)(const float* weights, int64_t count, float least);
    // Of values, those of at least `least` and below `end`, moved to the front in their order; how
    // many.
    int64_t (*keep)(float* values, int64_t count, float least, float end);
    // Writes the logits of a whole row that are at least `least`, from the groups that have some,
    // and returns their count. Overwrites up to `slack` numbers past the last.
    int64_t (*gather)(const float* logits, int64_t tokens, const float* groups, float least,
                      float* out);
    void (*probabilities)(const float* logits, int64_t count, const Distribution& row, float* out);
    // max(p - q, 0), in place of p.
    void (*subtract)(float* p, const float* q, int64_t count);
    // Samples: the first of the largest weight / exponential number; 0 if all weights are 0.
    Best (*race)(const float* weights, int64_t first, int64_t count, const NoiseKey& key);
    // For tests: words and exponential numbers of tokens 0 .. count, a multiple of 64.
    void (*noise)(const NoiseKey& key, int64_t count, uint32_t* words, float* numbers);
};

extern ByLevel<SamplingKernels> sampling_kernels;

}  // namespace slipstream
