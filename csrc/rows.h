// Norms and activations of rows.
#pragma once

#include <cstdint>

#include "levels.h"

namespace slipstream {

// RMS norm over rows: out = norm(x + residual) * weight, rounded once; the sum is rounded to the
// rows' type first, and the norm is computed in float32 of the rounded sum.
struct NormCall {
    bool is_bf16;
    int64_t num_rows, columns;
    const void* x;
    int64_t x_stride;
    const void* residual;  // or null: x is the sum
    int64_t residual_stride;
    const void* weight;  // [columns]
    float eps;
    void* out;
    int64_t out_stride;
    void* sum;  // where x + residual goes, which may be x or residual itself; null without one
    int64_t sum_stride;
};

// gate_up [rows, 2 columns], gate first -> out [rows, columns] = silu(gate), rounded, times up.
struct GatedCall {
    bool is_bf16;
    int64_t num_rows, columns;
    const void* gate_up;
    int64_t gate_up_stride;
    void* out;
    int64_t out_stride;
};

struct RowKernels {
    void (*norm)(const NormCall& call);
    void (*gated)(const GatedCall& call);
};

extern ByLevel<RowKernels> row_kernels;

inline void norm_rows(const NormCall& call) { row_kernels.active().norm(call); }
inline void gated_rows(const GatedCall& call) { row_kernels.active().gated(call); }

}  // namespace slipstream
