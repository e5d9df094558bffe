// Products with packed weights. Compiled once for each level of instructions.
#include "matmul.h"
#include "matmul_four_bits.h"
#include "matmul_integers.h"
#include "matmul_rows.h"
#include "simd.h"
#include "threads.h"
#if defined(__AMX_BF16__)
#include "matmul_four_bits_tiles.h"
#include "matmul_tiles.h"
#else
#include "matmul_dot.h"
#endif

namespace slipstream::SLIPSTREAM_LEVEL {
namespace {

// Lines that stay in the second cache while blocks of the weight pass.
constexpr int64_t resident_bytes = 768 << 10;

// Lines that a task multiplies by a block: all when they are few; whole rows and whole tiles.
template <typename Number>
int64_t lines_per_task(const Lines<Number>& lines) {
    constexpr int64_t unit = 96;  // of 32 lines, and of rows of 1, 2 or 3 lines
    const int64_t most = resident_bytes / (lines.columns * int64_t{sizeof(Number)}) / unit * unit;
    return most < unit ? unit : most;
}

// Calls work(unit, block, first, count) for all parts of a product.
template <typename Number, typename Work>
void for_parts(const Matrix& weight, const Lines<Number>& lines, Work&& work) {
    const int64_t blocks = weight.num_blocks(), most = lines_per_task(lines);
    const int64_t parts = (lines.count + most - 1) / most;
    parallel_for(blocks * parts, [&](int64_t task) {
        const int64_t first = task / blocks * most;
        const int64_t count = lines.count - first < most ? lines.count - first : most;
        ProductUnit unit;
        work(unit, task % blocks, first, count);
    });
}

void run_bf16(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const Lines<Factor> lines = pack_rows(call);
    for_parts(weight, lines, [&](ProductUnit& unit, int64_t block, int64_t first, int64_t count) {
        auto* sums = sums_of<float>(count);
        unit.multiply(lines, first, count, 0, reinterpret_cast<const bf16*>(weight.block(block)),
                      weight.num_tiles(), sums);
        for (int64_t row = 0; row < count; ++row)
            finish_row(call, block, first + row, sums + row * block_rows, nullptr);
    });
}

// ---- integer weights --------------------------------------------------------------------------

// values [64] of a row times the row's scale, to its place.
void finish_rounded(const MatmulCall& call, const Rounded& rows, int64_t block, int64_t row,
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

void run_int8(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const Rounded rows = round_rows(call);
    for_parts(weight, rows.lines, [&](ProductUnit& unit, int64_t block, int64_t first, int64_t count) {
        auto* sums = sums_of<int32_t>(count);
        unit.multiply(rows.lines, first, count, 0,
                      reinterpret_cast<const uint8_t*>(weight.block(block)), weight.num_tiles(),
                      sums);
        for (int64_t line = 0; line < count; line += rows.digits) {
            float values[block_rows];
            for (int n = 0; n < block_rows; n += lanes)
                store(values + n, join_digits(sums + line * block_rows + n,
                                              rows.sums + first + line, rows.digits));
            finish_rounded(call, rows, block, (first + line) / rows.digits, values);
        }
    });
}

template <Storage storage, int digits>
void run_four_bits(const MatmulCall& call, const Rounded& rows) {
    const Matrix& weight = *call.weight;
    for_parts(weight, rows.lines, [&]([[maybe_unused]] ProductUnit& unit, int64_t index,
                                      int64_t first, int64_t count) {
        const int64_t row = first / digits, num_rows = count / digits;
        const FourBitBlock<storage> block(weight, index);
        auto* values = static_cast<float*>(
            scratch(Scratch::values, num_rows * block_rows * sizeof(float)));
        // Sums are exact, so the way to them does not show in the result.
#if defined(__AMX_BF16__)
        if (rows.lines.count > most_direct_lines)
            FourBitTiles<storage, digits>(block, rows, unit).multiply(row, num_rows, values);
        else
#endif
            FourBitRows<storage, digits>(block, rows).multiply(row, num_rows, values);
        for (int64_t i = 0; i < num_rows; ++i) {
            float* of_row = values + i * block_rows;
            if constexpr (is_e2m1(storage)) finish_by_groups(call, index, row + i, of_row);
            else finish_rounded(call, rows, index, row + i, of_row);
        }
    });
}

template <Storage storage>
void run_four_bits(const MatmulCall& call) {
    const Rounded rows = round_rows(call);
    switch (rows.digits) {
        case 1: run_four_bits<storage, 1>(call, rows); break;
        case 2: run_four_bits<storage, 2>(call, rows); break;
        case 3: run_four_bits<storage, 3>(call, rows); break;
    }
}

// ---- float32 ----------------------------------------------------------------------------------

template <int R>
void multiply_f32(const float* x, int64_t stride, const float* block, int64_t columns,
                  float* sums) {
    F16 acc[R][block_panels];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p) acc[r][p] = zero();
    for (int64_t k = 0; k < columns; ++k) {
        // A tile is 16 columns of 4 panels, one behind the other.
        const float* at = block + k / 16 * 16 * block_rows + k % 16 * panel_rows;
        F16 w[block_panels];
        for (int p = 0; p < block_panels; ++p) w[p] = load(at + p * 16 * panel_rows);
        for (int r = 0; r < R; ++r) {
            const F16 factor = broadcast(x[r * stride + k]);
            for (int p = 0; p < block_panels; ++p) acc[r][p] = fma(factor, w[p], acc[r][p]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < block_panels; ++p)
            store(sums + r * block_rows + p * panel_rows, acc[r][p]);
}

void run_f32(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const auto* x = static_cast<const float*>(call.x);
    parallel_for(weight.num_blocks(), [&](int64_t block) {
        const auto* values = reinterpret_cast<const float*>(weight.block(block));
        float sums[4 * block_rows];
        for (int64_t row = 0; row < call.num_rows; row += 4) {
            const float* from = x + row * call.x_stride;
            const int64_t count = call.num_rows - row < 4 ? call.num_rows - row : 4;
            switch (count) {
                case 1: multiply_f32<1>(from, call.x_stride, values, weight.columns, sums); break;
                case 2: multiply_f32<2>(from, call.x_stride, values, weight.columns, sums); break;
                case 3: multiply_f32<3>(from, call.x_stride, values, weight.columns, sums); break;
                default: multiply_f32<4>(from, call.x_stride, values, weight.columns, sums);
            }
            for (int64_t i = 0; i < count; ++i)
                finish_row(call, block, row + i, sums + i * block_rows, nullptr);
        }
    });
}

void run(const MatmulCall& call) {
    if (!call.num_rows) return;
    switch (call.weight->storage) {
        case Storage::f32: run_f32(call); break;
        case Storage::bf16: run_bf16(call); break;
        case Storage::i8: run_int8(call); break;
        case Storage::i4: run_four_bits<Storage::i4>(call); break;
        case Storage::mxfp4: run_four_bits<Storage::mxfp4>(call); break;
        case Storage::nvfp4: run_four_bits<Storage::nvfp4>(call); break;
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

const MatmulKernels kernels = {run, look_up};
const bool entered = matmul_kernels.enter(this_level, &kernels);

}  // namespace
}  // namespace slipstream::SLIPSTREAM_LEVEL
