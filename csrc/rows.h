// Norms and activations of rows.
#pragma once

#include <cstdint>
#include <string>

#include "levels.h"

namespace slipstream {

// The weight of an RMS norm; without one there is no norm.
struct NormWeight {
    const void* weight;  // [columns], or null
    int64_t columns;
    float eps;
};

// RMS norm over rows: out = norm((post_norm(x) + residual) * factor), all but the residual
// optional. Each step is computed in float32 and rounded to the rows' type.
struct NormCall {
    bool is_bf16;
    int64_t num_rows, columns;
    const void* x;
    int64_t x_stride;
    const void* residual;  // or null: x is the sum, and neither `post_norm` nor `factor` counts
    int64_t residual_stride;
    NormWeight post_norm, norm;
    float factor;
    void* out;
    int64_t out_stride;
    void* sum;  // where x + residual goes, which may be x or residual itself; null without one
    int64_t sum_stride;
};

enum class Activation { silu, gelu_tanh };

// gate_up [rows, 2 columns], gate first -> out [rows, columns] = activation(gate), rounded, times up.
struct GatedCall {
    Activation activation;
    bool is_bf16;
    int64_t num_rows, columns;
    const void* gate_up;
    int64_t gate_up_stride;
    void* out;
    int64_t out_stride;
};

// out [rows, columns] is multiplied by sigmoid(gates), rounded once.
struct GateCall {
    bool is_bf16;
    int64_t num_rows, columns;
    const void* gates;
    int64_t gates_stride;
    void* out;
    int64_t out_stride;
};

// gate_up [rows, 2 columns] of experts, float32, gate first -> out [rows, columns], rounded once:
// activation(gate) * up. With `clamps`, of gate up to `limit` and up within it, (up + 1) * gate *
// sigmoid(alpha * gate).
struct ExpertGateCall {
    bool is_bf16, clamps;
    Activation activation;
    float limit, alpha;
    int64_t num_rows, columns;
    const float* gate_up;
    void* out;
};

// out [rows, columns] = the sum of a row's outputs times their weights, in order, rounded once.
struct ExpertSumCall {
    bool is_bf16;
    int64_t num_rows, columns, num_chosen;
    const float* outputs;   // [.., columns]
    const int32_t* places;  // [rows, num_chosen], of a row's outputs
    const float* weights;   // [rows, num_chosen]
    const float* last;      // [rows, columns], added at the end; null: nothing
    const float* last_gate;  // of row r at r * last_gate_stride: `last` times its sigmoid; null: times 1
    int64_t last_gate_stride;
    void* out;
};

struct RowKernels {
    void (*norm)(const NormCall& call);
    void (*gated)(const GatedCall& call);
    void (*gate)(const GateCall& call);
    void (*gate_experts)(const ExpertGateCall& call);
    void (*sum_experts)(const ExpertSumCall& call);
};

extern ByLevel<RowKernels> row_kernels;

inline void norm_rows(const NormCall& call) { row_kernels.active().norm(call); }
inline void gated_rows(const GatedCall& call) { row_kernels.active().gated(call); }
inline void gate_rows(const GateCall& call) { row_kernels.active().gate(call); }

// By its name in Python; std::invalid_argument of others.
Activation activation_named(const std::string& name);

}  // namespace slipstream
