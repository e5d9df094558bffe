// The matrix unit: tiles of 16 rows of 64 bytes (AMX).
#pragma once

#include <immintrin.h>

#include "matmul.h"
#include "matmul_decode.h"
#include "matmul_rows.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 parts of the weight. Holds the unit while it lives.
class TileUnit {
  public:
    explicit TileUnit(int64_t) {}
    ~TileUnit() {
        if (rows_[0]) _tile_release();
    }

    // Up to 16 rows (all there are) times a group of a block that is decoded in passing:
    // sums [count][64].
    void narrow(const Matrix& weight, const char* group, const PackedRows& rows, int64_t index,
                int count, bf16* decoded, float* sums) {
        configure(count, count, false);
        const TileShape shape = tile_shape(weight.storage);
        const int64_t tiles = weight.tiles_per_group();
        const bf16* x = rows.values + index * tiles * count * 32;
        const Int4Table table(weight.has_zeros ? 0 : 8);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const char* from = group + tile * shape.block_bytes();
            const bf16* w = reinterpret_cast<const bf16*>(from);
            for (int ahead = 0; ahead < shape.block_bytes(); ahead += 64)
                _mm_prefetch(from + prefetch_bytes + ahead, _MM_HINT_T0);
            if (weight.storage != Storage::bf16) {
                for (int panel = 0; panel < block_panels; ++panel) {
                    const char* part = from + panel * shape.panel_bytes();
                    if (weight.storage == Storage::i8) decode_int8_panel(part, decoded + panel * 512);
                    else decode_int4_panel(part, decoded + panel * 512, table);
                }
                w = decoded;
            }
            _tile_loadd(4, x + tile * count * 32, 64);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + 512, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, w + 1024, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 1536, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        store_sums(sums);
    }

    // Rows row .. row + count, up to 32, times a group of a block in bf16 tiles: sums [count][64].
    void wide(const Matrix& weight, const bf16* tiles, const PackedRows& rows, int64_t index,
              int64_t row, int count, float* sums) {
        const int upper = rows.together(row), lower = count - upper;
        const int64_t in_group = weight.tiles_per_group(), first = index * in_group;
        const bf16* x0 = rows.at(row) + first * upper * 32;
        const bf16* x1 = lower ? rows.at(row + 16) + first * lower * 32 : nullptr;
        configure(upper, lower ? lower : upper, true);
        for (int half = 0; half < 2; ++half) {
            const bf16* w = tiles + half * 1024;
            _tile_zero(0);
            _tile_zero(1);
            if (lower) {
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t tile = 0; tile < in_group; ++tile) {
                    _tile_loadd(4, x0 + tile * upper * 32, 64);
                    _tile_loadd(6, w + tile * 2048, 64);
                    _tile_loadd(5, x1 + tile * lower * 32, 64);
                    _tile_loadd(7, w + tile * 2048 + 512, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            } else {
                for (int64_t tile = 0; tile < in_group; ++tile) {
                    _tile_loadd(4, x0 + tile * upper * 32, 64);
                    _tile_loadd(6, w + tile * 2048, 64);
                    _tile_loadd(7, w + tile * 2048 + 512, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                }
            }
            float* out = sums + half * 32;
            _tile_stored(0, out, block_rows * 4);
            _tile_stored(1, out + 16, block_rows * 4);
            if (!lower) continue;
            _tile_stored(2, out + 16 * block_rows, block_rows * 4);
            _tile_stored(3, out + 16 * block_rows + 16, block_rows * 4);
        }
    }

    // Up to 16 rounded rows times a block of int8: exact sums [count][64].
    void integers(const Matrix& weight, int64_t block, const RoundedRows& rows, int64_t row,
                  int count, const int32_t*, int32_t* sums) {
        configure(count, count, false);
        const char* w = weight.block(block);
        const int8_t* x = rows.values + row * rows.columns;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t tile = 0; tile < weight.num_tiles(); ++tile, w += 4096) {
            if (row == 0)
                for (int ahead = 0; ahead < 4096; ahead += 64)
                    _mm_prefetch(w + prefetch_bytes + ahead, _MM_HINT_T0);
            _tile_loadd(4, x + tile * count * 64, 64);
            _tile_loadd(6, w, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, w + 1024, 64);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(6, w + 2048, 64);
            _tile_dpbssd(2, 4, 6);
            _tile_loadd(7, w + 3072, 64);
            _tile_dpbssd(3, 4, 7);
        }
        store_sums(sums);
    }

  private:
    static constexpr int prefetch_bytes = 8192;

    template <typename Sum>
    static void store_sums(Sum* sums) {
        _tile_stored(0, sums, block_rows * 4);
        _tile_stored(1, sums + 16, block_rows * 4);
        _tile_stored(2, sums + 32, block_rows * 4);
        _tile_stored(3, sums + 48, block_rows * 4);
    }

    // Rows in the tiles 0, 1 and 4, and in 2, 3 and 5 (where these are of other rows).
    void configure(int upper, int lower, bool is_wide) {
        if (rows_[0] == upper && rows_[1] == lower && is_wide == is_wide_) return;
        rows_[0] = upper;
        rows_[1] = lower;
        is_wide_ = is_wide;
        struct alignas(64) Config {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        const auto first = static_cast<uint8_t>(upper);
        const auto second = static_cast<uint8_t>(is_wide ? lower : upper);
        const uint8_t tile_rows[8] = {first, first, second, second, first, second, 16, 16};
        for (int tile = 0; tile < 8; ++tile) {
            config.row_bytes[tile] = 64;
            config.rows[tile] = tile_rows[tile];
        }
        // gcc 12 believes that the instruction reads 8 bytes of its 64, and drops the other stores.
        __asm__ volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }

    int rows_[2] = {0, 0};
    bool is_wide_ = false;
};

}  // namespace slipstream::SLIPSTREAM_LEVEL
