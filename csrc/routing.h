// Which experts a row passes, and how much each counts.
#pragma once

#include <cstdint>

namespace slipstream {

enum class Scores { softmax, chosen_softmax, sigmoid };

// See `slipstream/kernels/experts.py`.
struct Routing {
    int num_experts, num_chosen;
    Scores scores;
    bool normalised;
    float scale;
    int num_groups, kept_groups;
};

// logits [num_experts] of one row -> its experts, best first, and their weights, [num_chosen] each. Of
// equal values the lower index comes first. `correction` [num_experts] or null; `space`: room for
// 3 * num_experts numbers.
void choose_experts(const Routing& routing, const float* logits, const float* correction,
                    float* space, int32_t* chosen, float* weights);

}  // namespace slipstream
