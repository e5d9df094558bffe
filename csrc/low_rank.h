// Adapters: products of low rank that are added to what a matrix makes of some rows.
//
// A row's arithmetic depends only on the shapes and the level of instructions, never on other rows.
// See `slipstream/kernels/adapters.py`.
#pragma once

#include <cstdint>

#include "levels.h"

namespace slipstream {

// The factors of one matrix in S slots, in one type. Part p of the matrix has its rows before
// ends[p], and its own factors.
struct LowRankFactors {
    bool is_bf16;
    int64_t slots, parts, rank;  // S, P, R
    int64_t rows, columns;       // of the matrix: N, K
    const void* down;            // [S, P R, K]
    const void* up;              // [S, R, N]
    const int64_t* ends;         // [P]
};

// y[t] [N] += up (down x[t]) of the slot adapters[t]; rows with -1 stay as they are. Sums are
// float32, and a row is rounded once.
struct LowRankCall {
    const LowRankFactors* factors;
    int64_t num_rows;
    const int64_t* adapters;
    const void* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride;
};

struct LowRankKernels {
    void (*add)(const LowRankCall& call);
};

extern ByLevel<LowRankKernels> low_rank_kernels;

inline void add_low_rank(const LowRankCall& call) {
    if (call.num_rows) low_rank_kernels.active().add(call);
}

}  // namespace slipstream
