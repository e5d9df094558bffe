// The matrix unit: tiles of up to 16 rows of 64 bytes (AMX).
#pragma once

#include <immintrin.h>

#include "matmul.h"
#include "matmul_rows.h"
#include "tile_config.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Tile `to` += tile `lines` times tile `part`: numbers that the instruction holds, so no function's
// arguments.
#define SLIPSTREAM_MULTIPLY(to, lines, part)                                  \
    if constexpr (sizeof(Number) == sizeof(bf16)) _tile_dpbf16ps(to, lines, part); \
    else _tile_dpbsud(to, lines, part)

// Sums of a product: [lines][64], float32 of bf16 and int32 of bytes. Holds the unit while it lives.
class ProductUnit {
  public:
    ~ProductUnit() {
        if (rows_[0]) _tile_release();
    }

    // Lines first .. first + count times some tiles of a block; the lines' tiles begin with number
    // `tile`. Writes whole tiles, so up to 31 lines more than there are.
    template <typename Number, typename Weight, typename Sum>
    void multiply(const Lines<Number>& lines, int64_t first, int64_t count, int64_t tile,
                  const Weight* weight, int64_t num_tiles, Sum* sums) {
        if (lines.count <= 16) {
            narrow(lines, first, tile, weight, num_tiles, sums);
            return;
        }
        const int64_t tile_numbers = lines.depth * int64_t{block_rows};
        // A weight that is multiplied from end to end comes from memory; groups were unpacked.
        const bool streams = num_tiles * lines.depth == lines.columns;
        Ahead ahead(streams ? tile_numbers * int64_t{sizeof(Weight)} : 0, 2 * ((count + 31) / 32));
        const int64_t most = count <= 32 ? 16 : resident_tiles(sizeof(Number));
        for (int64_t done = 0; done < num_tiles; done += most) {
            const int64_t left = num_tiles - done, part = left < most ? left : most;
            // The weights after this part, in this block or in the next.
            ahead.from(reinterpret_cast<const char*>(weight + (done + part) * tile_numbers));
            for (int half = 0; half < 2; ++half)
                for (int64_t line = 0; line < count; line += 32)
                    wide(lines, first + line, tile + done, weight + done * tile_numbers, part, half,
                         done > 0, sums + line * block_rows, ahead);
        }
    }

    // Tiles 0-3 hold sums, 4 and 5 lines, 6 and 7 parts of the weight. Narrow products have all
    // sums of the same lines; wide ones those of 5 in 2 and 3.
    void configure(int upper, int lower, int depth_bytes) {
        if (rows_[0] == upper && rows_[1] == lower && depth_bytes_ == depth_bytes) return;
        rows_[0] = upper;
        rows_[1] = lower;
        depth_bytes_ = depth_bytes;
        const auto lines = static_cast<uint16_t>(depth_bytes);
        const auto weight_rows = static_cast<uint8_t>(depth_bytes / 4);
        const auto first = static_cast<uint8_t>(upper), second = static_cast<uint8_t>(lower);
        configure_tiles({first, first, second, second, first, second, weight_rows, weight_rows},
                        {64, 64, 64, 64, lines, lines, 64, 64});
    }

  private:
    // Prefetches the next part of a weight while this one is multiplied, a little in every step.
    class Ahead {
      public:
        // For a tile of `tile_bytes`, prefetched over `steps` steps.
        Ahead(int64_t tile_bytes, int64_t steps) : step_((tile_bytes / 64 + steps - 1) / steps * 64) {}
        void from(const char* at) { at_ = at; }
        void step() {
            for (int64_t line = 0; line < step_; line += 64) _mm_prefetch(at_ + line, _MM_HINT_T1);
            at_ += step_;
        }

      private:
        int64_t step_;
        const char* at_ = nullptr;
    };

    // All of up to 16 lines times some tiles of a block.
    template <typename Number, typename Weight, typename Sum>
    void narrow(const Lines<Number>& lines, int64_t line, int64_t tile, const Weight* weight,
                int64_t num_tiles, Sum* sums) {
        const int count = static_cast<int>(lines.together(line));
        const int depth_bytes = lines.depth * int{sizeof(Number)};
        configure(count, count, depth_bytes);
        const Number* x = lines.at(line, tile);
        const int64_t x_step = int64_t{count} * lines.depth;
        const int64_t panel = 4 * depth_bytes * 4 / int{sizeof(Weight)};
        zero_sums();
        for (int64_t step = 0; step < num_tiles; ++step) {
            const Weight* w = weight + step * 4 * panel;
            for (int ahead = 0; ahead < 4096; ahead += 64)
                _mm_prefetch(reinterpret_cast<const char*>(w) + prefetch_bytes + ahead, _MM_HINT_T0);
            _tile_loadd(4, x + step * x_step, depth_bytes);
            _tile_loadd(6, w, 64);
            SLIPSTREAM_MULTIPLY(0, 4, 6);
            _tile_loadd(7, w + panel, 64);
            SLIPSTREAM_MULTIPLY(1, 4, 7);
            _tile_loadd(6, w + 2 * panel, 64);
            SLIPSTREAM_MULTIPLY(2, 4, 6);
            _tile_loadd(7, w + 3 * panel, 64);
            SLIPSTREAM_MULTIPLY(3, 4, 7);
        }
        _tile_stored(0, sums, row_bytes);
        _tile_stored(1, sums + 16, row_bytes);
        _tile_stored(2, sums + 32, row_bytes);
        _tile_stored(3, sums + 48, row_bytes);
    }

    // Up to 32 lines times two panels (`half`) of some tiles; with `adds` to the sums that are
    // there, whose bits are what the unit had.
    template <typename Number, typename Weight, typename Sum>
    void wide(const Lines<Number>& lines, int64_t line, int64_t tile, const Weight* weight,
              int64_t num_tiles, int half, bool adds, Sum* sums, Ahead& ahead) {
        const int upper = static_cast<int>(lines.together(line));
        const int lower =
            line + 16 < lines.count ? static_cast<int>(lines.together(line + 16)) : 0;
        const int depth_bytes = lines.depth * int{sizeof(Number)};
        configure(upper, lower ? lower : upper, depth_bytes);
        const Number* x0 = lines.at(line, tile);
        const Number* x1 = lower ? lines.at(line + 16, tile) : x0;
        const int64_t x0_step = int64_t{upper} * lines.depth;
        const int64_t x1_step = int64_t{lower ? lower : upper} * lines.depth;
        const int64_t panel = 4 * depth_bytes * 4 / int{sizeof(Weight)};
        Sum* out = sums + half * 32;
        if (adds) load_sums(out, lower > 0);
        else zero_sums();
        for (int64_t step = 0; step < num_tiles; ++step) {
            const Weight* w = weight + (step * 4 + half * 2) * panel;
            ahead.step();
            _tile_loadd(4, x0 + step * x0_step, depth_bytes);
            _tile_loadd(6, w, 64);
            SLIPSTREAM_MULTIPLY(0, 4, 6);
            _tile_loadd(7, w + panel, 64);
            SLIPSTREAM_MULTIPLY(1, 4, 7);
            if (!lower) continue;
            _tile_loadd(5, x1 + step * x1_step, depth_bytes);
            SLIPSTREAM_MULTIPLY(2, 5, 6);
            SLIPSTREAM_MULTIPLY(3, 5, 7);
        }
        _tile_stored(0, out, row_bytes);
        _tile_stored(1, out + 16, row_bytes);
        if (!lower) return;
        _tile_stored(2, out + 16 * block_rows, row_bytes);
        _tile_stored(3, out + 16 * block_rows + 16, row_bytes);
    }

    static constexpr int row_bytes = block_rows * 4;
    // Tiles of a block, 2 KiB of two panels each, that stay in the first cache together with the
    // lines' while these pass by 32. Up to 32 lines pass but once.
    static constexpr int64_t resident_tiles(size_t number_bytes) { return number_bytes == 1 ? 8 : 4; }
    // The machine's own look-ahead is a tenth slower; further ahead than this it is as slow.
    static constexpr int prefetch_bytes = 1024;

    static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    template <typename Sum>
    static void load_sums(const Sum* sums, bool has_lower) {
        _tile_loadd(0, sums, row_bytes);
        _tile_loadd(1, sums + 16, row_bytes);
        if (!has_lower) return;
        _tile_loadd(2, sums + 16 * block_rows, row_bytes);
        _tile_loadd(3, sums + 16 * block_rows + 16, row_bytes);
    }

    int rows_[2] = {0, 0}, depth_bytes_ = 0;
};

#undef SLIPSTREAM_MULTIPLY

}  // namespace slipstream::SLIPSTREAM_LEVEL
