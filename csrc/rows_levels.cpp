// Norms and activations of rows. Compiled once for each level of instructions.
#include "rows.h"

#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

// Calls step(column, count) for each 16 columns; count is less at the end.
template <typename Step>
inline void for_columns(int64_t columns, Step&& step) {
    int64_t column = 0;
    for (; column + lanes <= columns; column += lanes) step(column, lanes);
    if (column < columns) step(column, static_cast<int>(columns - column));
}

// By what a row is multiplied: 1 / sqrt(mean of its squares + eps).
template <typename Number>
inline F16 norm_factor(const Number* x, int64_t columns, float eps) {
    F16 squares[4] = {zero(), zero(), zero(), zero()};
    for_columns(columns, [&](int64_t column, int count) {
        const F16 part = load_some(x + column, count);
        F16& sums = squares[column / lanes % 4];
        sums = fma(part, part, sums);
    });
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    return broadcast(1.0f / __builtin_sqrtf(total / static_cast<float>(columns) + eps));
}

// (norm of x + residual) * factor to the sum's row.
template <typename Number>
inline const Number* join_row(const NormCall& call, const Number* x, int64_t row) {
    const Number* residual = static_cast<const Number*>(call.residual) + row * call.residual_stride;
    Number* sum = static_cast<Number*>(call.sum) + row * call.sum_stride;
    if (!call.post_norm.weight && call.factor == 1.0f) {
        for_columns(call.columns, [&](int64_t column, int count) {
            store_some(sum + column, load_some(x + column, count) + load_some(residual + column, count), count);
        });
        return sum;
    }
    const auto* weight = static_cast<const Number*>(call.post_norm.weight);
    const F16 scale = weight ? norm_factor(x, call.columns, call.post_norm.eps) : zero();
    const F16 factor = broadcast(call.factor);
    for_columns(call.columns, [&](int64_t column, int count) {
        F16 part = load_some(x + column, count);
        if (weight) part = rounded<Number>(part * scale * load_some(weight + column, count));
        const F16 total = rounded<Number>(part + load_some(residual + column, count));
        store_some(sum + column, total * factor, count);
    });
    return sum;
}

template <typename Number>
void norm_row(const NormCall& call, int64_t row) {
    const Number* x = static_cast<const Number*>(call.x) + row * call.x_stride;
    const auto* weight = static_cast<const Number*>(call.norm.weight);
    Number* out = static_cast<Number*>(call.out) + row * call.out_stride;
    if (call.residual) x = join_row(call, x, row);
    if (!weight) {
        for_columns(call.columns, [&](int64_t column, int count) {
            store_some(out + column, load_some(x + column, count), count);
        });
        return;
    }
    const F16 factor = norm_factor(x, call.columns, call.norm.eps);
    for_columns(call.columns, [&](int64_t column, int count) {
        store_some(out + column, load_some(x + column, count) * factor * load_some(weight + column, count), count);
    });
}

// The tanh form of GELU is x times a sigmoid, as SiLU is.
inline F16 activated(F16 x, Activation activation) {
    const F16 one = broadcast(1.0f);
    F16 power = x;
    if (activation == Activation::gelu_tanh)
        power = broadcast(1.5957691216057308f) * (x + broadcast(0.044715f) * x * x * x);
    return x / (one + exp(zero() - power));
}

template <typename Number>
void gated_row(const GatedCall& call, int64_t row) {
    const Number* gate = static_cast<const Number*>(call.gate_up) + row * call.gate_up_stride;
    const Number* up = gate + call.columns;
    Number* out = static_cast<Number*>(call.out) + row * call.out_stride;
    for_columns(call.columns, [&](int64_t column, int count) {
        const F16 active = activated(load_some(gate + column, count), call.activation);
        store_some(out + column, rounded<Number>(active) * load_some(up + column, count), count);
    });
}

template <typename Number>
void apply_gate(const GateCall& call, int64_t row) {
    const Number* gates = static_cast<const Number*>(call.gates) + row * call.gates_stride;
    Number* out = static_cast<Number*>(call.out) + row * call.out_stride;
    const F16 one = broadcast(1.0f);
    for_columns(call.columns, [&](int64_t column, int count) {
        const F16 gate = one / (one + exp(zero() - load_some(gates + column, count)));
        store_some(out + column, load_some(out + column, count) * gate, count);
    });
}

// What an expert's second matrix takes.
inline F16 gated(const ExpertGateCall& call, F16 gate, F16 up) {
    if (!call.clamps) return activated(gate, call.activation) * up;
    const F16 one = broadcast(1.0f);
    // Bounds come first: of two operands, one of them NaN, the second is taken.
    const F16 limit = broadcast(call.limit);
    gate = minimum(limit, gate);
    up = maximum(zero() - limit, minimum(limit, up));
    const F16 sigmoid = one / (one + exp(broadcast(-call.alpha) * gate));
    return (up + one) * gate * sigmoid;
}

template <typename Number>
void gate_row(const ExpertGateCall& call, int64_t row) {
    const float* gate = call.gate_up + row * 2 * call.columns;
    const float* up = gate + call.columns;
    Number* out = static_cast<Number*>(call.out) + row * call.columns;
    for_columns(call.columns, [&](int64_t column, int count) {
        store_some(out + column, gated(call, load_some(gate + column, count), load_some(up + column, count)), count);
    });
}

template <typename Number>
void sum_row(const ExpertSumCall& call, int64_t row) {
    const int32_t* places = call.places + row * call.num_chosen;
    const float* weights = call.weights + row * call.num_chosen;
    Number* out = static_cast<Number*>(call.out) + row * call.columns;
    F16 factor = broadcast(1.0f);
    if (call.last_gate) {
        const F16 gate = broadcast(call.last_gate[row * call.last_gate_stride]);
        factor = factor / (factor + exp(zero() - gate));
    }
    for_columns(call.columns, [&](int64_t column, int count) {
        F16 total = zero();
        for (int64_t i = 0; i < call.num_chosen; ++i) {
            const float* output = call.outputs + places[i] * call.columns + column;
            total = total + load_some(output, count) * broadcast(weights[i]);
        }
        if (call.last) total = total + load_some(call.last + row * call.columns + column, count) * factor;
        store_some(out + column, total, count);
    });
}

void run_norm(const NormCall& call) {
    for_rows(call.num_rows, call.columns, [&](int64_t row) {
        if (call.is_bf16) norm_row<bf16>(call, row);
        else norm_row<float>(call, row);
    });
}

void run_gated(const GatedCall& call) {
    for_rows(call.num_rows, call.columns, [&](int64_t row) {
        if (call.is_bf16) gated_row<bf16>(call, row);
        else gated_row<float>(call, row);
    });
}

void run_gate(const GateCall& call) {
    for_rows(call.num_rows, call.columns, [&](int64_t row) {
        if (call.is_bf16) apply_gate<bf16>(call, row);
        else apply_gate<float>(call, row);
    });
}

void gate_experts(const ExpertGateCall& call) {
    for_rows(call.num_rows, call.columns, [&](int64_t row) {
        if (call.is_bf16) gate_row<bf16>(call, row);
        else gate_row<float>(call, row);
    });
}

void sum_experts(const ExpertSumCall& call) {
    for_rows(call.num_rows, call.columns, [&](int64_t row) {
        if (call.is_bf16) sum_row<bf16>(call, row);
        else sum_row<float>(call, row);
    });
}

const RowKernels row_here = {run_norm, run_gated, run_gate, gate_experts, sum_experts};
const bool row_entered = row_kernels.enter(this_level, &row_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
