// MPK_LAYOUT_WIDE on the CPU target.
#pragma once

#include "mpk/abi.h"

namespace mpk {

// Place of column `column` within row `row` of a tile that is `width` (MPK_WIDE_COLUMNS or MPK_WIDE_NARROW)
// wide.
static inline uint32_t wide_place(uint32_t row, uint32_t column, uint32_t width) {
  const uint32_t c = column % 16, in_group = c % 4 / 2 * 8 + c / 4 * 2 + c % 2;
  const uint32_t turned = width == MPK_WIDE_NARROW ? row / 2 % 4 : row % 8;
  return ((column / 16 * 2 + in_group / 8) ^ turned) * 8 + in_group % 8;
}

} // namespace mpk
