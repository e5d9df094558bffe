// The rows that a weight is multiplied by, laid out for the kernels. Compiled for each level.
#pragma once

#include "matmul.h"
#include "matmul_quads.h"
#include "simd.h"
#include "threads.h"

namespace slipstream::SLIPSTREAM_LEVEL {

#if defined(__AMX_BF16__)
constexpr bool in_tiles = true;
#else
constexpr bool in_tiles = false;
#endif

// How many lines lie together, a power of two: one, a tile of the matrix unit, or all.
constexpr int one_line = 0, tile_lines = 4, all_lines = 62;

// What is multiplied: rows of bf16, or the digits of rounded rows one after the other; K is filled
// up with zeros to whole tiles. Lines that lie together (less at the end) are [tile][line][depth].
template <typename Number>
struct Lines {
    Number* values;
    int64_t columns, count;
    int depth;  // columns of a tile
    int bundle = in_tiles ? tile_lines : one_line;

    // Where a tile of a line begins.
    Number* at(int64_t line, int64_t tile) const {
        if (bundle == one_line) return values + line * columns + tile * depth;
        const int64_t first = line >> bundle << bundle;
        return values + first * columns + (tile * together(first) + line - first) * depth;
    }
    // Where a column of a line lies; depths are powers of two.
    Number* number(int64_t line, int64_t column) const {
        return at(line, column >> __builtin_ctz(depth)) + (column & (depth - 1));
    }
    // How many of the lines that lie together from `first` on there are.
    int64_t together(int64_t first) const {
        const int64_t left = count - first, most = int64_t{1} << bundle;
        return left < most ? left : most;
    }
    // From one line of a tile to the next.
    int64_t stride() const { return bundle == one_line ? columns : depth; }
};

// Prefetches what is read later: few rows are done with a weight so soon that the hardware
// prefetcher, which stops at the end of a page, falls behind. First into the second cache, whose
// requests for memory are more than the first one's, and later from there into the first.
// Always inlined: gcc treats a function that only prefetches as one without effect, and drops it.
template <int64_t bytes>
inline __attribute__((always_inline)) void look_ahead([[maybe_unused]] const void* from) {
#if defined(__AVX2__)
    constexpr int64_t far = 4096, near = 2048;
    for (int64_t line = 0; line < bytes; line += 64) {
        _mm_prefetch(static_cast<const char*>(from) + far + line, _MM_HINT_T1);
        _mm_prefetch(static_cast<const char*>(from) + near + line, _MM_HINT_T0);
    }
#endif
}

// Memory for sums [count][64] of a task. The matrix unit writes whole tiles, so more has room.
constexpr int64_t spare_lines = 32;
template <typename Sum>
inline Sum* sums_of(int64_t count) {
    return static_cast<Sum*>(
        scratch(Scratch::sums, (count + spare_lines) * block_rows * sizeof(Sum)));
}

// What rows of bf16 are multiplied as: floats where no instruction takes pairs.
#if defined(__AVX512BF16__)
using Factor = bf16;
inline void copy_tile(const bf16* from, int64_t count, bf16* to) {
    if (count < 32) std::memset(to, 0, 64);
    std::memcpy(to, from, count * 2);
}
#else
using Factor = float;
inline void copy_tile(const bf16* from, int64_t count, float* to) {
    for (int half = 0; half < 32; half += lanes) {
        const int64_t left = count - half;
        const int some = static_cast<int>(left < 0 ? 0 : left < lanes ? left : lanes);
        store(to + half, some == lanes ? load(from + half) : load_first(from + half, some));
    }
}
#endif

// Where a row of the result begins in x.
inline int64_t place_of(const MatmulCall& call, int64_t row) {
    return (call.row_ids ? call.row_ids[row] : row) * call.x_stride;
}

// Rows in the form that a call's kernels take: their size, their layout in memory, and the conversion
// of one row. These are float32 rows, which are copied.
struct PlainRows {
    Lines<float> lines;

    int64_t num_lines() const { return lines.count; }
    int64_t line_bytes() const { return lines.columns * int64_t{sizeof(float)}; }
    static int64_t bytes(const MatmulCall&) { return 0; }
    static PlainRows lay_out(const MatmulCall& call, char*) {
        return {{nullptr, call.weight->columns, call.num_rows, 1}};
    }
    void fill(const MatmulCall&, int64_t) const {}
};

// Of bfloat16.
struct PackedRows {
    Lines<Factor> lines;

    int64_t num_lines() const { return lines.count; }
    int64_t line_bytes() const { return lines.columns * int64_t{sizeof(Factor)}; }
    static int64_t bytes(const MatmulCall& call) {
        return call.num_rows * call.weight->padded_columns() * int64_t{sizeof(Factor)};
    }
    static PackedRows lay_out(const MatmulCall& call, char* memory) {
        return {{reinterpret_cast<Factor*>(memory), call.weight->padded_columns(), call.num_rows, 32}};
    }
    void fill(const MatmulCall& call, int64_t row) const {
        const auto* from = static_cast<const bf16*>(call.x) + place_of(call, row);
        for (int64_t tile = 0; tile < lines.columns / 32; ++tile) {
            const int64_t left = call.weight->columns - tile * 32;
            copy_tile(from + tile * 32, left < 32 ? left : 32, lines.at(row, tile));
        }
    }
};

inline F16 numbers_at(const MatmulCall& call, int64_t row, int64_t k) {
    const int64_t left = call.weight->columns - k, at = place_of(call, row) + k;
    if (left <= 0) return zero();
    if (call.x_is_bf16) {
        const bf16* x = static_cast<const bf16*>(call.x) + at;
        return left >= lanes ? load(x) : load_first(x, static_cast<int>(left));
    }
    const float* x = static_cast<const float*>(call.x) + at;
    return left >= lanes ? load(x) : load_first(x, static_cast<int>(left));
}

// The largest magnitude in columns first .. last of a row.
inline float largest_of(const MatmulCall& call, int64_t row, int64_t first, int64_t last) {
    F16 most[2] = {zero(), zero()};  // neither waits for the other
    for (int64_t k = first; k < last; k += 2 * lanes) {
        const F16 x = numbers_at(call, row, k);
        most[0] = maximum(most[0], maximum(x, zero() - x));
        if (k + lanes >= last) break;
        const F16 next = numbers_at(call, row, k + lanes);
        most[1] = maximum(most[1], maximum(next, zero() - next));
    }
    return largest(maximum(most[0], most[1]));
}

inline int32_t sum(I16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(x.v);
#elif defined(__AVX2__)
    const __m256i half = _mm256_add_epi32(x.a, x.b);
    __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xb1)));
#else
    int32_t values[lanes], total = 0;
    store(values, x);
    for (int i = 0; i < lanes; ++i) total += values[i];
    return total;
#endif
}

// values [64] of a block, times `scales` where there are any, and bias, to the row's place.
inline void finish_row(const MatmulCall& call, int64_t block, int64_t row, const float* values,
                       const float* scales) {
    const int64_t first = block * block_rows;
    for (int n = 0; n < block_rows && first + n < call.weight->rows; n += lanes) {
        const int64_t left = call.weight->rows - first - n;
        const int count = static_cast<int>(left < lanes ? left : lanes);
        F16 value = load(values + n);
        if (scales) value = value * load(scales + n);
        if (call.bias) {
            const F16 bias =
                call.x_is_bf16
                    ? load_first(static_cast<const bf16*>(call.bias) + first + n, count)
                    : load_first(static_cast<const float*>(call.bias) + first + n, count);
            value = value + bias;
        }
        const int64_t to = row * call.out_stride + first + n;
        if (count == lanes) {
            if (call.out_is_bf16) store(static_cast<bf16*>(call.out) + to, value);
            else store(static_cast<float*>(call.out) + to, value);
        } else if (call.out_is_bf16) {
            store_first(static_cast<bf16*>(call.out) + to, value, count);
        } else {
            store_first(static_cast<float*>(call.out) + to, value, count);
        }
    }
}

}  // namespace slipstream::SLIPSTREAM_LEVEL
