// The configuration of the matrix unit's eight tiles (AMX). Compiled for its level.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace slipstream::SLIPSTREAM_LEVEL {

#if defined(__AMX_TILE__)
// Rows of each tile, and bytes of a row.
inline void configure_tiles(const uint8_t (&rows)[8], const uint16_t (&row_bytes)[8]) {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    std::memcpy(config.rows, rows, sizeof rows);
    std::memcpy(config.row_bytes, row_bytes, sizeof row_bytes);
    // gcc 12 believes that the instruction reads 8 bytes of its 64, and drops the other stores.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}
#endif

}  // namespace slipstream::SLIPSTREAM_LEVEL
