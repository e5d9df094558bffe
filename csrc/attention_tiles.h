// The products of attention in the matrix unit (AMX). Compiled for its level.
#pragma once

#include "attention_mode.h"
#include "tile_config.h"

namespace slipstream::SLIPSTREAM_LEVEL {

// Where four panels of 16 tokens begin.
struct Panels {
    const char* at[4];
};

#if defined(__AMX_BF16__)

constexpr bool has_matrix_unit = true;

// Holds the unit while it lives: tiles 0-3 are sums, 4 and 5 lines, 6 and 7 of the right factor.
class AttentionUnit {
  public:
    ~AttentionUnit() {
        if (rows_) _tile_release();
    }

    template <typename Mode>
    void multiply(const Product& product) {
        if constexpr (Mode::in_lane == 1) {
            multiply_vectors<Mode>(product);
        } else {
            configure(product.lines < 16 ? product.lines : 16);
            if (product.lines > 16) wide(product);
            else narrow(product);
        }
    }

    // Scores of the tokens of four panels, whose keys lie `stride` bytes apart, by up to 16 queries
    // as right factors -> [panel][token][query]. The products and sums are those of `multiply`.
    // Meanwhile fetches as many bytes of the panels `ahead`, in the order of their addresses: in that
    // of the tiles, memory would deliver them at half the speed.
    void score_stored(const Panels& panels, const Panels& ahead, int64_t stride,
                      const char* queries, int64_t tiles, float* out) {
        configure(16);
        zero_sums();
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t next = tile * tile_bytes;
            _tile_loadd(6, queries + next, 64);
            _tile_loadd(4, panels.at[0] + tile * 64, stride);
            fetch_tile(ahead.at[0] + next);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, panels.at[1] + tile * 64, stride);
            fetch_tile(ahead.at[1] + next);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, panels.at[2] + tile * 64, stride);
            fetch_tile(ahead.at[2] + next);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, panels.at[3] + tile * 64, stride);
            fetch_tile(ahead.at[3] + next);
            _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, out, 64);
        _tile_stored(1, out + 256, 64);
        _tile_stored(2, out + 512, 64);
        _tile_stored(3, out + 768, 64);
    }

  private:
    static inline __attribute__((always_inline)) void fetch_tile(const char* from) {
        for (int at = 0; at < tile_bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
    }

    // Up to 16 lines.
    static void narrow(const Product& product) {
        for (int64_t panel = 0; panel < product.panels; panel += 4) {
            const int64_t width = product.panels - panel;
            const char* b = product.b + panel * product.panel_stride;
            // If there are fewer panels, one is multiplied again, and the result is not used.
            const int64_t second = (width > 1 ? 1 : 0) * product.panel_stride,
                          third = (width > 2 ? 2 : 0) * product.panel_stride,
                          fourth = (width > 3 ? 3 : 0) * product.panel_stride;
            zero_sums();
            for (int64_t tile = 0; tile < product.tiles; ++tile, b += product.tile_stride) {
                _tile_loadd(4, static_cast<const char*>(product.a) + tile * 64, product.a_stride);
                _tile_loadd(6, b, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, b + second, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (width <= 2) continue;
                _tile_loadd(6, b + third, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, b + fourth, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
            float* out = product.out + panel * lanes;
            const int64_t stride = product.out_stride * 4;
            _tile_stored(0, out, stride);
            if (width > 1) _tile_stored(1, out + lanes, stride);
            if (width > 2) _tile_stored(2, out + 2 * lanes, stride);
            if (width > 3) _tile_stored(3, out + 3 * lanes, stride);
        }
    }

    // 17 to 32 lines.
    static void wide(const Product& product) {
        const int64_t stride = product.out_stride * 4;
        for (int64_t panel = 0; panel < product.panels; panel += 2) {
            const bool two = product.panels - panel > 1;
            const char* b = product.b + panel * product.panel_stride;
            const char* a = static_cast<const char*>(product.a);
            const int64_t second = two ? product.panel_stride : 0;
            zero_sums();
            for (int64_t tile = 0; tile < product.tiles; ++tile, b += product.tile_stride, a += 64) {
                _tile_loadd(4, a, product.a_stride);
                _tile_loadd(6, b, 64);
                _tile_loadd(5, a + 16 * product.a_stride, product.a_stride);
                _tile_loadd(7, b + second, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            float* out = product.out + panel * lanes;
            float* lower = out + 16 * product.out_stride;
            _tile_stored(0, out, stride);
            _tile_stored(2, lower, stride);
            if (!two) continue;
            _tile_stored(1, out + lanes, stride);
            _tile_stored(3, lower + lanes, stride);
        }
    }

    static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const auto own = static_cast<uint8_t>(rows);
        configure_tiles({own, own, own, own, own, own, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
    }

    int rows_ = 0;
};

#else

constexpr bool has_matrix_unit = false;

class AttentionUnit {
  public:
    template <typename Mode>
    void multiply(const Product& product) {
        multiply_vectors<Mode>(product);
    }
    void score_stored(const Panels&, const Panels&, int64_t, const char*, int64_t, float*) {}
};

#endif

}  // namespace slipstream::SLIPSTREAM_LEVEL
