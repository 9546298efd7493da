// MPK_LAYOUT_WIDE on the CPU target.
#pragma once

#include "cpu/task.h"

namespace mpk {

// Place of column `column` within row `row` of a tile that is `width` (MPK_WIDE_COLUMNS or MPK_WIDE_NARROW)
// wide.
static inline uint32_t wide_place(uint32_t row, uint32_t column, uint32_t width) {
  const uint32_t c = column % 16, in_group = c % 4 / 2 * 8 + c / 4 * 2 + c % 2;
  const uint32_t turned = width == MPK_WIDE_NARROW ? row / 4 % 2 : row % 8;
  return ((column / 16 * 2 + in_group / 8) ^ turned) * 8 + in_group % 8;
}

// Writes columns [first, first + n) of row `row` of a whole tensor of 2-byte elements.
static inline void store_wide(const mpk_operand& out, uint32_t row, uint32_t first, const uint16_t* from, uint32_t n) {
  const uint32_t width = out.dims[3], in_tile = row % MPK_WIDE_ROWS;
  uint16_t* to = reinterpret_cast<uint16_t*>(out.addr) + uint64_t{row / MPK_WIDE_ROWS} * out.strides[0] + uint64_t{in_tile} * out.strides[2];
  for (uint32_t c = first; c < first + n; ++c) to[uint64_t{c / width} * out.strides[1] + wide_place(in_tile, c % width, width)] = from[c - first];
}

// Rows of a result of attention: its first dimension, or row tiles.
static inline uint64_t rows_of_result(const mpk_operand& out) { return out.ndim == 4 ? uint64_t{out.dims[0]} * out.dims[2] : out.dims[0]; }

} // namespace mpk
