// Products with packed weights. Compiled once for each level of instructions.
#include "matmul.h"
#include "matmul_decode.h"
#include "matmul_rows.h"
#include "simd.h"
#include "threads.h"
#if defined(__AMX_BF16__)
#include "matmul_tiles.h"
#else
#include "matmul_dot.h"
#endif

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

// ---- bf16 rows: products in pairs, sums in float32 --------------------------------------------

void run_bf16_block(const MatmulCall& call, const PackedRows& rows, int64_t block) {
    const Matrix& weight = *call.weight;
    const int64_t num_rows = call.num_rows, groups = weight.num_groups();
    // Few rows take tiles as they come; for many the group is decoded once.
    const bool in_passing = num_rows <= narrow_rows;
    bf16* decoded = nullptr;
    if (weight.storage != Storage::bf16)
        decoded = static_cast<bf16*>(scratch(
            Scratch::weights, (in_passing ? 1 : weight.tiles_per_group()) * block_panels * 1024));
    const bool is_grouped = weight.group > 0;
    auto* sums = static_cast<float*>(
        scratch(Scratch::sums, (num_rows + wide_rows) * block_rows * sizeof(float)));
    float* part = is_grouped ? sums + num_rows * block_rows : sums;
    float scales[block_rows], products[block_rows];
    TileUnit unit(num_rows);
    for (int64_t group = 0; group < groups; ++group) {
        const char* start = weight.block(block) + group * weight.group_bytes();
        const bf16* tiles = in_passing ? nullptr : decode_group(weight, start, decoded);
        if (is_grouped)
            group_scales(weight, start + weight.group_bytes() - weight.group_tail_bytes(), scales,
                         products);
        for (int64_t row = 0; row < num_rows; row += wide_rows) {
            const int count = static_cast<int>(num_rows - row < wide_rows ? num_rows - row : wide_rows);
            float* out = is_grouped ? part : sums + row * block_rows;
            if (in_passing) unit.narrow(weight, start, rows, group, count, decoded, out);
            else unit.wide(weight, tiles, rows, group, row, count, out);
            if (!is_grouped) continue;
            for (int i = 0; i < count; ++i)
                fold_group(sums + (row + i) * block_rows, part + i * block_rows, scales,
                           weight.has_zeros ? products : nullptr,
                           rows.group_sum(row + i, group), group == 0);
        }
    }
    const auto* row_scales = reinterpret_cast<const float*>(weight.scales.data());
    for (int64_t row = 0; row < num_rows; ++row)
        finish_row(call, block, row, sums + row * block_rows,
                   row_scales ? row_scales + block * block_rows : nullptr);
}

// ---- float32 rows -----------------------------------------------------------------------------

template <int R>
void multiply_f32(const float* x, int64_t x_stride, const float* weight, int64_t columns,
                  int64_t panel_stride, int64_t column_stride, float* sums) {
    F16 acc[R][block_panels];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p) acc[r][p] = zero();
    for (int64_t k = 0; k < columns; ++k) {
        // In tiles a panel holds 16 columns in a row; decoded blocks hold 64 rows of each column.
        const float* at = panel_stride == panel_rows
                              ? weight + k * column_stride
                              : weight + k / 16 * 16 * block_rows + k % 16 * column_stride;
        F16 w[block_panels];
        for (int p = 0; p < block_panels; ++p) w[p] = load(at + p * panel_stride);
        for (int r = 0; r < R; ++r) {
            const F16 factor = broadcast(x[r * x_stride + k]);
            for (int p = 0; p < block_panels; ++p) acc[r][p] = fma(factor, w[p], acc[r][p]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p)
            store(sums + r * block_rows + p * panel_rows, acc[r][p]);
}

void run_f32_block(const MatmulCall& call, int64_t block) {
    const Matrix& weight = *call.weight;
    const auto* x = static_cast<const float*>(call.x);
    const auto* values = reinterpret_cast<const float*>(weight.block(block));
    int64_t panel_stride = 256, column_stride = panel_rows;
    if (weight.storage != Storage::f32) {
        auto* decoded = static_cast<float*>(
            scratch(Scratch::weights, weight.padded_columns() * block_rows * sizeof(float)));
        decode_block(weight, weight.block(block), decoded);
        values = decoded;
        panel_stride = panel_rows;
        column_stride = block_rows;
    }
    const auto* row_scales = reinterpret_cast<const float*>(weight.scales.data());
    float sums[4 * block_rows];
    for (int64_t row = 0; row < call.num_rows; row += 4) {
        const int count = static_cast<int>(call.num_rows - row < 4 ? call.num_rows - row : 4);
        const auto multiply = count == 1   ? multiply_f32<1>
                              : count == 2 ? multiply_f32<2>
                              : count == 3 ? multiply_f32<3>
                                           : multiply_f32<4>;
        multiply(x + row * call.x_stride, call.x_stride, values, weight.columns, panel_stride,
                 column_stride, sums);
        for (int i = 0; i < count; ++i)
            finish_row(call, block, row + i, sums + i * block_rows,
                       row_scales ? row_scales + block * block_rows : nullptr);
    }
}

// ---- rows rounded to int8 ---------------------------------------------------------------------

void run_int8_block(const MatmulCall& call, const RoundedRows& rows, int64_t block) {
    const Matrix& weight = *call.weight;
    auto* sums =
        static_cast<int32_t*>(scratch(Scratch::sums, wide_rows * block_rows * sizeof(int32_t)));
    const auto* row_sums = reinterpret_cast<const int32_t*>(weight.row_sums.data()) + block * block_rows;
    const auto* scales = reinterpret_cast<const float*>(weight.scales.data()) + block * block_rows;
    float scaled[block_rows];
    TileUnit unit(call.num_rows);
    for (int64_t row = 0; row < call.num_rows; row += narrow_rows) {
        const int count = static_cast<int>(
            call.num_rows - row < narrow_rows ? call.num_rows - row : narrow_rows);
        unit.integers(weight, block, rows, row, count, row_sums, sums);
        for (int i = 0; i < count; ++i) {
            for (int n = 0; n < block_rows; ++n)
                scaled[n] = static_cast<float>(sums[i * block_rows + n]) * rows.scales[row + i];
            finish_row(call, block, row + i, scaled, scales);
        }
    }
}

void run(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    if (!call.num_rows) return;
    const int64_t blocks = weight.num_blocks();
    if (weight.storage == Storage::i8_rounded) {
        const RoundedRows rows = round_rows(call);
        parallel_for(blocks, [&](int64_t block) { run_int8_block(call, rows, block); });
    } else if (call.x_is_bf16) {
        const PackedRows rows = pack_rows(call);
        parallel_for(blocks, [&](int64_t block) { run_bf16_block(call, rows, block); });
    } else {
        parallel_for(blocks, [&](int64_t block) { run_f32_block(call, block); });
    }
}

void look_up(const Matrix& table, const int64_t* ids, int64_t count, void* out, int64_t stride) {
    const TileShape shape = tile_shape(table.storage);
    const int64_t number = table.storage == Storage::f32 ? 4 : 2, row_bytes = table.columns * number;
    parallel_for(count, [&](int64_t index) {
        char* to = static_cast<char*>(out) + index * stride * number;
        for (int64_t tile = 0, done = 0; tile < table.num_tiles(); ++tile) {
            const char* lane = table.values.data() + table.lane_offset(ids[index], tile);
            for (int step = 0; step < shape.steps && done < row_bytes; ++step, done += 4)
                std::memcpy(to + done, lane + step * panel_rows * 4,
                            row_bytes - done < 4 ? row_bytes - done : 4);
        }
    });
}

const MatmulKernels kernels = {run, look_up};
const bool entered = matmul_kernels.enter(this_level, &kernels);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
