// Gated delta nets: the recurrence of ragged rows over the states of their requests.
//
// Rows of a request are taken strictly one after the other, each with the same arithmetic whether
// it is replayed, known or a draft: a function of the row, the state before it and the level of
// instructions, never of the other requests of the pass, of the threads or of how a prompt was cut.
#pragma once

#include <cstdint>

#include "attention.h"
#include "levels.h"

namespace slipstream {

constexpr int64_t most_taps = 16;

// One layer; meanings as `DeltaHeads` of kernels/delta_net.py. Pointers are borrowed.
struct DeltaShape {
    int64_t num_key_heads, num_value_heads, key_dim, value_dim;  // Hk, Hv, Dk, Dv
    int64_t width;                                               // W, at most `most_taps`
    const float* taps;                                           // [W, C]
    const float *decay, *step_bias;                              // [Hv]
    const float* norm_weight;                                    // [Dv]
    float eps;

    int64_t num_channels() const {
        return 2 * num_key_heads * key_dim + num_value_heads * value_dim;
    }
    int64_t repeats() const { return num_value_heads / num_key_heads; }
};

// What one layer keeps, by places, which lie `.._stride` numbers apart; x's type but for states.
struct DeltaCacheView {
    float* states;        // [places, Hv, Dk, Dv]
    void* windows;        // [places, W - 1, C]
    void* drafted;        // [slots, K, C]
    void* drafted_gates;  // [slots, K, 2 Hv]
    int64_t num_places, num_slots, most_drafted;
    int64_t state_stride, window_stride, drafted_stride, gates_stride;
};

struct DeltaCall {
    const DeltaShape* shape;
    const AttentionRows* rows;  // with states
    const DeltaCacheView* cache;
    bool is_bf16;  // of mixed, gates, z and out
    const void* mixed;
    const void* gates;
    const void* z;
    int64_t mixed_stride, gates_stride, z_stride;
    void* out;  // [T, Hv Dv]
    int64_t out_stride;
};

struct DeltaKernels {
    void (*run)(const DeltaCall& call);
};

extern ByLevel<DeltaKernels> delta_kernels;

// Throws std::invalid_argument for rows or states that are out of range.
void run_delta_net(const DeltaCall& call);

}  // namespace slipstream
