// Products with packed weights. Compiled once for each level of instructions.
#include "matmul.h"
#include "matmul_integers.h"
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

constexpr int narrow_lines = 16, wide_lines = 32;
// Tiles of a block that stay in the first cache while many lines pass: 32 KiB of two panels.
constexpr int64_t resident_tiles = 16;
// Lines that stay in the second cache while blocks of the weight pass.
constexpr int64_t resident_bytes = 768 << 10;

// Lines that a task multiplies by a block: all when they are few; whole rows and whole tiles.
template <typename Number>
int64_t lines_per_task(const Lines<Number>& lines) {
    constexpr int64_t unit = 96;  // of 32 lines, and of rows of 1, 2 or 3 lines
    const int64_t most = resident_bytes / (lines.columns * int64_t{sizeof(Number)}) / unit * unit;
    return most < unit ? unit : most;
}

// Sums [count][64] of lines first .. first + count times all of some tiles of a block.
template <typename Number, typename Weight, typename Sum>
void multiply_lines(ProductUnit& unit, const Lines<Number>& lines, int64_t first, int64_t count,
                    int64_t tile, const Weight* weight, int64_t num_tiles, Sum* sums) {
    if (lines.count <= narrow_lines) {
        unit.narrow(lines, first, tile, weight, num_tiles, sums);
        return;
    }
    const int64_t tile_numbers = lines.depth * int64_t{block_rows};
    for (int64_t done = 0; done < num_tiles; done += resident_tiles) {
        const int64_t part = num_tiles - done < resident_tiles ? num_tiles - done : resident_tiles;
        for (int half = 0; half < 2; ++half)
            for (int64_t line = 0; line < count; line += wide_lines)
                unit.wide(lines, first + line, tile + done, weight + done * tile_numbers, part,
                          half, done > 0, sums + line * block_rows);
    }
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

template <typename Sum>
Sum* sums_of(int64_t count) {
    // A wide product writes whole tiles, so one more of them has room.
    return static_cast<Sum*>(
        scratch(Scratch::sums, (count + wide_lines) * block_rows * sizeof(Sum)));
}

void run_bf16(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const Lines<bf16> lines = pack_rows(call);
    for_parts(weight, lines, [&](ProductUnit& unit, int64_t block, int64_t first, int64_t count) {
        auto* sums = sums_of<float>(count);
        multiply_lines(unit, lines, first, count, 0,
                       reinterpret_cast<const bf16*>(weight.block(block)), weight.num_tiles(), sums);
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

void run_int8(const MatmulCall& call) {
    const Matrix& weight = *call.weight;
    const Rounded rows = round_rows(call);
    for_parts(weight, rows.lines, [&](ProductUnit& unit, int64_t block, int64_t first, int64_t count) {
        auto* sums = sums_of<int32_t>(count);
        multiply_lines(unit, rows.lines, first, count, 0,
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

// A group is unpacked while the one before it is multiplied, and folded into the values a group
// later: what was just stored cannot be loaded as a tile, or from one, before it is in the cache.
void run_int4_block(const MatmulCall& call, const Rounded& rows, ProductUnit& unit, int64_t block,
                    int64_t first, int64_t count) {
    const Matrix& weight = *call.weight;
    const int64_t groups = weight.num_groups(), tiles = weight.group / rows.lines.depth;
    const int64_t part_size = (count + wide_lines) * block_rows, num_rows = count / rows.digits;
    const int64_t unpacked_bytes = weight.group * block_rows;
    auto* unpacked = static_cast<uint8_t*>(scratch(Scratch::weights, 2 * unpacked_bytes));
    auto* sums = static_cast<int32_t*>(
        scratch(Scratch::sums, (2 * part_size + num_rows * block_rows) * sizeof(int32_t)));
    auto* values = reinterpret_cast<float*>(sums + 2 * part_size);
    const auto group_at = [&](int64_t group) {
        return weight.block(block) + group * weight.group_bytes();
    };
    const auto fold = [&](int64_t group) {
        const GroupScales scales(weight, group_at(group));
        for (int64_t row = 0; row < num_rows; ++row)
            fold_group(values + row * block_rows,
                       sums + group % 2 * part_size + row * rows.digits * block_rows, scales, rows,
                       first / rows.digits + row, group, groups);
    };
    // Sums are exact, so the way to them does not show in the result.
    const bool is_few = rows.lines.count <= few_lines;
    if (!is_few) unpack_group(weight, group_at(0), rows.lines.depth, unpacked);
    for (int64_t group = 0; group < groups; ++group) {
        look_ahead(group_at(group), weight.group_bytes());
        if (is_few) {
            multiply_few(rows.lines, weight, group_at(group), group * weight.tiles_per_group(),
                         sums + group % 2 * part_size);
            fold(group);
            continue;
        }
        if (group + 1 < groups)
            unpack_group(weight, group_at(group + 1), rows.lines.depth,
                         unpacked + (group + 1) % 2 * unpacked_bytes);
        multiply_lines(unit, rows.lines, first, count, group * tiles,
                       unpacked + group % 2 * unpacked_bytes, tiles, sums + group % 2 * part_size);
        if (group) fold(group - 1);
    }
    if (!is_few) fold(groups - 1);
    for (int64_t row = 0; row < num_rows; ++row)
        finish_rounded(call, rows, block, first / rows.digits + row, values + row * block_rows);
}

void run_int4(const MatmulCall& call) {
    const Rounded rows = round_rows(call);
    for_parts(*call.weight, rows.lines,
              [&](ProductUnit& unit, int64_t block, int64_t first, int64_t count) {
                  run_int4_block(call, rows, unit, block, first, count);
              });
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
        case Storage::i4: run_int4(call); break;
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
