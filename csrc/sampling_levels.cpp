// Passes over slices of logits. Compiled once for each level of instructions.
#include "sampling_simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

constexpr float lowest = -__builtin_inff();

// The first `count` (0 to 16) logits at p, then ones of weight 0.
inline F16 load_last(const float* p, int64_t count) {
    float whole[lanes];
    for (int i = 0; i < lanes; ++i) whole[i] = lowest;
    std::memcpy(whole, p, count * sizeof(float));
    return load(whole);
}

inline F16 load_up_to(const float* p, int64_t count) {
    return count >= lanes ? load(p) : load_last(p, count);
}

inline void store_up_to(float* p, F16 x, int64_t count) {
    if (count >= lanes) store(p, x);
    else store_first(p, x, static_cast<int>(count));
}

// The first lane of x, by the arithmetic that all lanes have.
inline F16 weights_of(F16 logits, const Distribution& row) {
    return exp((logits - broadcast(row.largest)) * broadcast(row.inverse));
}

// ---- processors: to the bit what plain torch does --------------------------------------------

inline float penalised(float logit, int32_t count, uint8_t in_prompt, const Processors& how) {
    const float punished = logit > 0.0f ? logit / how.repetition : logit * how.repetition;
    float out = (in_prompt != 0) | (count > 0) ? punished : logit;
    out -= how.frequency * static_cast<float>(count);
    out -= how.presence * (count > 0 ? 1.0f : 0.0f);
    return out;
}

void penalise(const Processors& how, const float* logits, int64_t first, int64_t count,
              float* out) {
    const int32_t* counts = how.output_counts + first;
    const uint8_t* in_prompt = how.prompt_mask + first;
    for (int64_t i = 0; i < count; ++i)
        out[i] = penalised(logits[i], counts[i], in_prompt[i], how);
    for (int64_t i = 0; i < how.num_drafted; ++i) {
        const int64_t token = how.drafted[i], place = token - first;
        if (place < 0 || place >= count) continue;
        int32_t seen = counts[place];
        for (int64_t j = 0; j < how.num_drafted; ++j) seen += how.drafted[j] == token;
        out[place] = penalised(logits[place], seen, in_prompt[place], how);
    }
}

void forbid(const int32_t* allowed, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 32) {
        const auto word = static_cast<uint32_t>(allowed[i / 32]);
        if (word == 0xffffffffu) continue;
        for (int64_t bit = 0; bit < 32 && i + bit < count; ++bit)
            if (!(word >> bit & 1)) out[i + bit] = lowest;
    }
}

void process(const Processors& how, const float* logits, int64_t first, int64_t count,
             float* out) {
    logits += first;
    out += first;
    if (how.output_counts) penalise(how, logits, first, count, out);
    else std::memcpy(out, logits, count * sizeof(float));
    if (how.bias) {
        const float* bias = how.bias + first;
        // Adding 0 would turn a -0 into a 0.
        for (int64_t i = 0; i < count; ++i) out[i] = bias[i] == 0.0f ? out[i] : bias[i] + out[i];
    }
    for (int64_t i = 0; i < how.num_withheld; ++i) {
        const int64_t place = how.withheld[i] - first;
        if (how.withheld[i] >= 0 && place >= 0 && place < count) out[place] = lowest;
    }
    if (how.allowed) forbid(how.allowed + first / 32, count, out);
}

// ---- the largest ------------------------------------------------------------------------------

int64_t first_equal(const float* logits, int64_t count, float value) {
    const F16 wanted = broadcast(value);
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const unsigned found = equal(load(logits + i), wanted);
        if (found) return i + __builtin_ctz(found);
    }
    for (; i < count; ++i)
        if (logits[i] == value) return i;
    return 0;  // only numbers that are none
}

Best largest_of(const float* logits, int64_t count, float* groups, float* peak) {
    F16 best = broadcast(lowest), seen = zero();
    for (int64_t i = 0; i < count; i += group_tokens) {
        F16 group = broadcast(lowest), negative = zero();
        for (int64_t j = i; j < i + group_tokens && j < count; j += lanes) {
            const F16 logit = load_up_to(logits + j, count - j);
            // Of two operands the second is taken where one is NaN: a maximum hides it, and the sum
            // of numbers of which none is above 0 shows it, and nothing else.
            group = maximum(logit, group);
            negative = negative + minimum(zero(), logit);
        }
        if (groups) groups[i / group_tokens] = largest(group);
        best = maximum(group, best);
        seen = seen + negative;
    }
    const float most = largest(best), total = sum(seen);
    *peak = total == total ? most : total;
    return {most, first_equal(logits, count, most)};
}

// ---- weights ----------------------------------------------------------------------------------

float sum_weights(const float* logits, int64_t count, const Distribution& row) {
    const F16 least = broadcast(row.lowest_weight);
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < count; i += lanes) {
        const F16 weight = weights_of(load_up_to(logits + i, count - i), row);
        F16& part = sums[i / lanes % 4];
        part = part + where_at_least(weight, least, weight);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void weigh(float* logits, int64_t count, const Distribution& row) {
    for (int64_t i = 0; i < count; i += lanes)
        store_up_to(logits + i, weights_of(load_up_to(logits + i, count - i), row), count - i);
}

float sum_reaching(const float* weights, int64_t count, float least) {
    const F16 bound = broadcast(least);
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < count; i += lanes) {
        const F16 weight = count - i >= lanes
                               ? load(weights + i)
                               : load_first(weights + i, static_cast<int>(count - i));
        F16& part = sums[i / lanes % 4];
        part = part + where_at_least(weight, bound, weight);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

int64_t keep(float* values, int64_t count, float least, float end) {
    const F16 bound = broadcast(least), limit = broadcast(end);
    int64_t kept = 0, i = 0;
    // What is written lies before what is still to be read.
    for (; i + lanes <= count; i += lanes) {
        const F16 value = load(values + i);
        kept += append(values + kept, value, at_least(value, bound) & greater(limit, value));
    }
    for (; i < count; ++i)
        if (values[i] >= least && values[i] < end) values[kept++] = values[i];
    return kept;
}

int64_t gather(const float* logits, int64_t tokens, const float* groups, float least, float* out) {
    const F16 bound = broadcast(least);
    int64_t found = 0;
    for (int64_t start = 0; start < tokens; start += group_tokens) {
        if (!(groups[start / group_tokens] >= least)) continue;
        const int64_t end = start + group_tokens < tokens ? start + group_tokens : tokens;
        int64_t i = start;
        for (; i + lanes <= end; i += lanes) {
            const F16 logit = load(logits + i);
            found += append(out + found, logit, at_least(logit, bound));
        }
        for (; i < end; ++i)
            if (logits[i] >= least) out[found++] = logits[i];
    }
    return found;
}

void probabilities(const float* logits, int64_t count, const Distribution& row, float* out) {
    const F16 least_logit = broadcast(row.lowest_logit), least = broadcast(row.lowest_weight);
    const F16 scale = broadcast(row.scale);
    for (int64_t i = 0; i < count; i += lanes) {
        const F16 logit = load_up_to(logits + i, count - i);
        const F16 weight = weights_of(logit, row);
        F16 p = where_at_least(weight, least, weight * scale);
        p = where_at_least(logit, least_logit, p);
        store_up_to(out + i, p, count - i);
    }
}

void subtract(float* p, const float* q, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float rest = p[i] - q[i];
        p[i] = rest > 0.0f ? rest : 0.0f;
    }
}

// ---- noise ------------------------------------------------------------------------------------

// The largest weight / number among 64, if that is more than `best`.
void take_best(const float* weights, const float* numbers, int64_t token, Best& best) {
    for (int i = 0; i < group_tokens; ++i) {
        const float score = weights[i] / numbers[i];
        if (score > best.score) best = {score, token + i};
    }
}

Best race(const float* weights, int64_t first, int64_t count, const NoiseKey& key) {
    Best best = {0.0f, first};
    for (int64_t i = 0; i < count; i += group_tokens) {
        float last[group_tokens] = {}, numbers[group_tokens];
        const float* here = weights + i;
        if (count - i < group_tokens) {
            std::memcpy(last, here, (count - i) * sizeof(float));
            here = last;
        }
        F16 weight[4];
        for (int k = 0; k < 4; ++k) weight[k] = load(here + k * lanes);
        const F16 most = maximum(maximum(weight[0], weight[1]), maximum(weight[2], weight[3]));
        // No number is below 2^-33, so these weights cannot win.
        if (!greater(most * broadcast(0x1p34f), broadcast(best.score))) continue;
        U16 noise[4];
        noise_words(key, static_cast<uint32_t>((first + i) / 4), noise);
        const F16 score = broadcast(best.score);
        unsigned wins = 0;
        for (int k = 0; k < 4; ++k) {
            const F16 number = exponential(noise[k]);
            store(numbers + k * lanes, number);
            wins |= greater(weight[k], score * number);
        }
        if (wins) take_best(here, numbers, first + i, best);
    }
    return best;
}

void noise(const NoiseKey& key, int64_t count, uint32_t* words, float* numbers) {
    for (int64_t i = 0; i < count; i += group_tokens) {
        U16 found[4];
        noise_words(key, static_cast<uint32_t>(i / 4), found);
        for (int k = 0; k < 4; ++k) {
            store(words + i + k * lanes, found[k]);
            store(numbers + i + k * lanes, exponential(found[k]));
        }
    }
}

const SamplingKernels sampling_here = {process,      largest_of, sum_weights,   weigh,    sum_reaching,
                                 keep,         gather,     probabilities, subtract, race,
                                 noise};
const bool sampling_entered = sampling_kernels.enter(this_level, &sampling_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
