// Products of low rank. Compiled once for each level of instructions.
#include "buffer.h"
#include "low_rank.h"
#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

constexpr int inner_group = 4;       // inner numbers that share what is read of x
constexpr int column_vectors = 4;    // of y that are held while the inner numbers pass
constexpr int64_t column_task = 512; // columns of y that a task makes

// `count` inner numbers of a row from `first` on: down[first + i] . x.
template <typename Number>
inline void shrink(const LowRankFactors& factors, const Number* down, const Number* x,
                   int64_t first, int64_t count, float* inner) {
    F16 sums[inner_group];
    for (F16& total : sums) total = zero();
    for (int64_t column = 0; column < factors.columns; column += lanes) {
        const int64_t left = factors.columns - column;
        const F16 value = load_some(x + column, left);
        for (int64_t i = 0; i < count; ++i) {
            const Number* row = down + (first + i) * factors.columns;
            sums[i] = fma(load_some(row + column, left), value, sums[i]);
        }
    }
    for (int64_t i = 0; i < count; ++i) inner[first + i] = sum(sums[i]);
}

// Columns from `column` to before `stop`, all of one part, whose inner numbers are given.
template <typename Number>
inline void expand(const LowRankFactors& factors, const Number* up, const float* inner,
                   int64_t column, int64_t stop, Number* y) {
    constexpr int64_t width = column_vectors * lanes;
    for (; column < stop; column += width) {
        F16 sums[column_vectors];
        for (int i = 0; i < column_vectors; ++i) {
            const int64_t left = stop - column - i * lanes;
            sums[i] = left > 0 ? load_some(y + column + i * lanes, left) : zero();
        }
        for (int64_t r = 0; r < factors.rank; ++r) {
            const F16 factor = broadcast(inner[r]);
            const Number* row = up + r * factors.rows + column;
            for (int i = 0; i < column_vectors; ++i) {
                const int64_t left = stop - column - i * lanes;
                if (left > 0) sums[i] = fma(factor, load_some(row + i * lanes, left), sums[i]);
            }
        }
        for (int i = 0; i < column_vectors; ++i) {
            const int64_t left = stop - column - i * lanes;
            if (left >= lanes) store(y + column + i * lanes, sums[i]);
            else if (left > 0) store_first(y + column + i * lanes, sums[i], static_cast<int>(left));
        }
    }
}

template <typename Number>
void add(const LowRankCall& call) {
    const LowRankFactors& factors = *call.factors;
    const int64_t width = factors.parts * factors.rank;  // inner numbers of a row
    const int64_t groups = (width + inner_group - 1) / inner_group;
    auto* inner = static_cast<float*>(
        scratch(Scratch::low_rank, call.num_rows * width * int64_t{sizeof(float)}));
    parallel_for(call.num_rows * groups, [&](int64_t task) {
        const int64_t row = task / groups, first = task % groups * inner_group;
        const int64_t slot = call.adapters[row];
        if (slot < 0) return;
        const auto* x = static_cast<const Number*>(call.x) + row * call.x_stride;
        const auto* down = static_cast<const Number*>(factors.down) + slot * width * factors.columns;
        const int64_t count = width - first < inner_group ? width - first : inner_group;
        shrink(factors, down, x, first, count, inner + row * width);
    });
    const int64_t chunks = (factors.rows + column_task - 1) / column_task;
    parallel_for(call.num_rows * chunks, [&](int64_t task) {
        const int64_t row = task / chunks, slot = call.adapters[row];
        if (slot < 0) return;
        auto* y = static_cast<Number*>(call.y) + row * call.y_stride;
        const auto* up =
            static_cast<const Number*>(factors.up) + slot * factors.rank * factors.rows;
        int64_t column = task % chunks * column_task;
        const int64_t last = column + column_task < factors.rows ? column + column_task : factors.rows;
        for (int64_t part = 0; part < factors.parts && column < last; ++part) {
            const int64_t stop = factors.ends[part] < last ? factors.ends[part] : last;
            if (stop <= column) continue;
            expand(factors, up, inner + row * width + part * factors.rank, column, stop, y);
            column = stop;
        }
    });
}

void run(const LowRankCall& call) {
    if (call.factors->is_bf16) add<bf16>(call);
    else add<float>(call);
}

const LowRankKernels low_rank_here = {run};
const bool low_rank_entered = low_rank_kernels.enter(this_level, &low_rank_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
