// Products with packed weights. Compiled once for each level of instructions.
#include <algorithm>

#include "matmul.h"
#include "matmul_groups.h"
#include "matmul_integers.h"
#include "matmul_rows.h"
#include "simd.h"
#include "threads.h"
#if defined(__AMX_BF16__)
#include "matmul_groups_tiles.h"
#include "matmul_tiles.h"
#include "matmul_whole_tiles.h"
#else
#include "matmul_dot.h"
#endif
#include "matmul_calls.h"

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

void run_bf16(const Calls<PackedRows>& calls) {
    calls.for_parts([](const auto& part, ProductUnit& unit) {
        const Matrix& weight = *part.call.weight;
        auto* sums = sums_of<float>(part.count);
        unit.multiply(part.rows.lines, part.first, part.count, 0,
                      reinterpret_cast<const bf16*>(weight.block(part.block)), weight.num_tiles(),
                      sums);
        for (int64_t row = 0; row < part.count; ++row)
            finish_row(part.call, part.block, part.first + row, sums + row * block_rows, nullptr);
    });
}

// ---- integer weights --------------------------------------------------------------------------

// values [64] of a row times the row's scale, to its place.
void finish_rounded(const MatmulCall& call, const RoundedRows& rows, int64_t block, int64_t row,
                    float* values) {
    const float* scales = call.weight->row_scales();
    for (int n = 0; n < block_rows; n += lanes)
        store(values + n, load(values + n) * broadcast(rows.scales[row]));
    finish_row(call, block, row, values, scales + block * block_rows);
}

// values [64] of a row that meets e2m1, whose scales are in it.
void finish_by_groups(const MatmulCall& call, int64_t block, int64_t row, const float* values) {
    const float* factors = call.weight->row_scales();
    finish_row(call, block, row, values, factors ? factors + block * block_rows : nullptr);
}

// Sums of lines first .. first + count with a block: of two digits joined for so many tiles at a time
// as fit into 32 bits, which are added in float64, exactly.
constexpr int64_t joined_tiles = 8;  // of 64 columns of up to 255, times numbers up to 127 * 128

template <typename Part>
const double* joined_sums(const Part& part, ProductUnit& unit, const uint8_t* weight) {
    const auto& lines = part.rows.lines;
    const int64_t tiles = part.call.weight->num_tiles(), numbers = part.count * block_rows;
    auto* sums = sums_of<int32_t>(part.count);
    auto* totals = static_cast<double*>(scratch(Scratch::values, numbers * int64_t{sizeof(double)}));
    std::fill_n(totals, numbers, 0.0);
    for (int64_t tile = 0; tile < tiles; tile += joined_tiles) {
        const int64_t some = std::min(joined_tiles, tiles - tile);
        unit.multiply(lines, part.first, part.count, tile, weight + tile * lines.depth * block_rows,
                      some, sums);
        for (int64_t i = 0; i < numbers; ++i) totals[i] += sums[i];
    }
    return totals;
}

template <typename Part, typename Sum>
void finish_int8(const Part& part, const Sum* sums) {
    const RoundedRows& rows = part.rows;
    for (int64_t line = 0; line < part.count; line += rows.row_lines) {
        float values[block_rows];
        for (int n = 0; n < block_rows; n += lanes)
            store(values + n, join_digits(sums + line * block_rows + n,
                                          rows.sums + part.first + line, rows.row_lines));
        finish_rounded(part.call, rows, part.block, (part.first + line) / rows.row_lines, values);
    }
}

void run_int8(const Calls<RoundedRows>& calls) {
    calls.for_parts([](const auto& part, ProductUnit& unit) {
        const auto* weight = reinterpret_cast<const uint8_t*>(part.call.weight->block(part.block));
        if (part.rows.row_lines < part.rows.digits)
            return finish_int8(part, joined_sums(part, unit, weight));
        auto* sums = sums_of<int32_t>(part.count);
        unit.multiply(part.rows.lines, part.first, part.count, 0, weight,
                      part.call.weight->num_tiles(), sums);
        finish_int8(part, sums);
    });
}

template <Storage storage, int digits>
void run_groups(const Calls<RoundedRows>& calls) {
    calls.for_parts([](const auto& part, [[maybe_unused]] ProductUnit& unit) {
        const RoundedRows& rows = part.rows;
        const int64_t row = part.first / rows.row_lines, num_rows = part.count / rows.row_lines;
        const GroupedBlock<storage> block(*part.call.weight, part.block);
        auto* values = static_cast<float*>(
            scratch(Scratch::values, (num_rows + spare_lines) * block_rows * sizeof(float)));
        // Sums are exact, so the way to them does not show in the result.
#if defined(__AMX_BF16__)
        if (rows.is_whole)
            WholeTiles<storage>(block, rows.whole, unit).multiply(row, num_rows, values);
        else if (rows.lines.count > most_direct_lines)
            GroupedTiles<storage, digits>(block, rows, unit).multiply(row, num_rows, values);
        else
#endif
            GroupedRows<storage, digits>(block, rows).multiply(row, num_rows, values);
        for (int64_t i = 0; i < num_rows; ++i) {
            float* of_row = values + i * block_rows;
            if constexpr (is_e2m1(storage)) finish_by_groups(part.call, part.block, row + i, of_row);
            else finish_rounded(part.call, rows, part.block, row + i, of_row);
        }
    });
}

template <Storage storage>
void run_groups(const Calls<RoundedRows>& calls) {
    if (calls.rows(0).digits == 2) run_groups<storage, 2>(calls);
    else run_groups<storage, 3>(calls);
}

// ---- float32 ----------------------------------------------------------------------------------

// Panels that are multiplied at once: as many as have room for R rows' sums in registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int f32_panels(int rows) { return 4 / rows; }
#else
constexpr int f32_panels(int) { return block_panels; }
#endif

template <int R>
void multiply_f32(const float* const* x, const float* block, int64_t columns, float* sums) {
    constexpr int panels = f32_panels(R);
    for (int panel = 0; panel < block_panels; panel += panels) {
        F16 acc[R][panels];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p) acc[r][p] = zero();
        for (int64_t k = 0; k < columns; ++k) {
            // A tile is 16 columns of 4 panels, one after the other.
            const float* at = block + k / 16 * 16 * block_rows + k % 16 * panel_rows +
                              panel * 16 * panel_rows;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < panels; ++p)
                    acc[r][p] = fma(broadcast(x[r][k]), load(at + p * 16 * panel_rows), acc[r][p]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < panels; ++p)
                store(sums + r * block_rows + (panel + p) * panel_rows, acc[r][p]);
    }
}

void run_f32(const Calls<PlainRows>& calls) {
    calls.for_parts([](const auto& part, ProductUnit&) {
        const MatmulCall& call = part.call;
        const auto* values = reinterpret_cast<const float*>(call.weight->block(part.block));
        float sums[4 * block_rows];
        for (int64_t row = part.first; row < part.first + part.count; row += 4) {
            const int64_t left = part.first + part.count - row, count = left < 4 ? left : 4;
            const float* x[4];
            for (int64_t i = 0; i < count; ++i)
                x[i] = static_cast<const float*>(call.x) + place_of(call, row + i);
            switch (count) {
                case 1: multiply_f32<1>(x, values, call.weight->columns, sums); break;
                case 2: multiply_f32<2>(x, values, call.weight->columns, sums); break;
                case 3: multiply_f32<3>(x, values, call.weight->columns, sums); break;
                default: multiply_f32<4>(x, values, call.weight->columns, sums);
            }
            for (int64_t i = 0; i < count; ++i)
                finish_row(call, part.block, row + i, sums + i * block_rows, nullptr);
        }
    });
}

void run(const MatmulCall* calls, int64_t count) {
    switch (calls[0].weight->storage) {
        case Storage::f32: run_f32({calls, count}); break;
        case Storage::bf16: run_bf16({calls, count}); break;
        case Storage::i8: run_int8({calls, count}); break;
        case Storage::i4: run_groups<Storage::i4>({calls, count}); break;
        case Storage::i6: run_groups<Storage::i6>({calls, count}); break;
        case Storage::g8: run_groups<Storage::g8>({calls, count}); break;
        case Storage::mxfp4: run_groups<Storage::mxfp4>({calls, count}); break;
        case Storage::nvfp4: run_groups<Storage::nvfp4>({calls, count}); break;
    }
}

void look_up(const Matrix& table, const int64_t* ids, int64_t count, void* out, int64_t stride) {
    const TileShape shape = tile_shape(table.storage);
    const int64_t number = table.storage == Storage::f32 ? 4 : 2, row_bytes = table.columns * number;
    parallel_for(count, [&](int64_t index) {
        char* to = static_cast<char*>(out) + index * stride * number;
        for (int64_t tile = 0, done = 0; tile < table.num_tiles(); ++tile) {
            const char* lane = table.lane(ids[index], tile);
            for (int step = 0; step < shape.steps && done < row_bytes; ++step, done += 4)
                std::memcpy(to + done, lane + step * panel_rows * 4,
                            row_bytes - done < 4 ? row_bytes - done : 4);
        }
    });
}

const MatmulKernels matmul_here = {run, look_up};
const bool matmul_entered = matmul_kernels.enter(this_level, &matmul_here);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
