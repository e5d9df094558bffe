#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace slipstream {
namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();

// x [count] -> its softmax. One order of the sum.
void softmax(const float* x, int count, float* out) {
    const float most = *std::max_element(x, x + count);
    float total = 0.0f;
    for (int i = 0; i < count; ++i) total += out[i] = std::exp(x[i] - most);
    for (int i = 0; i < count; ++i) out[i] /= total;
}

// The places of the `count` largest of `values` [size], largest first; `left` [size] is overwritten.
// Whatever numbers there are, no place comes twice. Without `places` only `left` tells: 0 is taken.
void take_largest(const float* values, int size, int count, float* left, int32_t* places) {
    std::fill(left, left + size, 1.0f);
    for (int i = 0; i < count; ++i) {
        int best = -1;
        for (int place = 0; place < size; ++place)
            if (left[place] > 0.0f && (best < 0 || values[place] > values[best])) best = place;
        left[best] = 0.0f;
        if (places) places[i] = best;
    }
}

// Leaves minus infinity to the experts of groups that are not kept.
void keep_groups(const Routing& routing, float* preferred, float* space) {
    const int size = routing.num_experts / routing.num_groups;
    float* best = space;
    for (int group = 0; group < routing.num_groups; ++group) {
        float first = nothing, second = nothing;
        for (int i = 0; i < size; ++i) {
            const float value = preferred[group * size + i];
            second = std::max(second, std::min(first, value));
            first = std::max(first, value);
        }
        best[group] = first + second;
    }
    float* left = space + routing.num_groups;
    take_largest(best, routing.num_groups, routing.kept_groups, left, nullptr);
    for (int group = 0; group < routing.num_groups; ++group)
        if (left[group] > 0.0f)
            std::fill(preferred + group * size, preferred + (group + 1) * size, nothing);
}

}  // namespace

void choose_experts(const Routing& routing, const float* logits, const float* correction,
                    float* space, int32_t* chosen, float* weights) {
    const int count = routing.num_experts;
    float *scores = space, *preferred = space + count, *rest = preferred + count;
    switch (routing.scores) {
        case Scores::softmax: softmax(logits, count, scores); break;
        case Scores::chosen_softmax: std::copy(logits, logits + count, scores); break;
        case Scores::sigmoid:
            for (int i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    }
    for (int i = 0; i < count; ++i) preferred[i] = scores[i] + (correction ? correction[i] : 0.0f);
    if (routing.num_groups > 1) keep_groups(routing, preferred, rest);
    take_largest(preferred, count, routing.num_chosen, rest, chosen);
    for (int i = 0; i < routing.num_chosen; ++i) weights[i] = scores[chosen[i]];
    if (routing.scores == Scores::chosen_softmax) softmax(weights, routing.num_chosen, weights);
    float total = 1e-20f;  // sigmoids may all be 0
    for (int i = 0; i < routing.num_chosen; ++i) total += weights[i];
    for (int i = 0; i < routing.num_chosen; ++i) {
        if (routing.normalised) weights[i] /= total;
        weights[i] *= routing.scale;
    }
}

}  // namespace slipstream
