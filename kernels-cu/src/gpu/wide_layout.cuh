/* MPK_LAYOUT_WIDE (mpk/abi.h): where rows and columns lie. */
#pragma once

#include "mpk/abi.h"

namespace mpk {
namespace gpu {

/* A row of a tile in MPK_LAYOUT_WIDE has 4 groups of 16 columns. Returns the bytes from the row's start to half `half` of group
 * `group`. */
__device__ __forceinline__ uint32_t wide_piece(uint32_t row, uint32_t group, uint32_t half) { return ((group * 2 + half) ^ (row & 7u)) * 16; }
/* The same for a tile of 16 columns, which is one group. */
__device__ __forceinline__ uint32_t narrow_piece(uint32_t row, uint32_t half) { return (half ^ (row / 4 & 1u)) * 16; }

/* A head of row `row` of a whole tensor of 2-byte elements. The head has whole column tiles of `Columns` columns, from column `first`
 * on. */
template <uint32_t Columns>
struct WideHead {
  static_assert(Columns == MPK_WIDE_COLUMNS || Columns == MPK_WIDE_NARROW, "a column tile of the layout");
  uint64_t address, tile_bytes; /* of the row in the head's first column tile; from one column tile to the next */
  uint32_t row;

  __device__ __forceinline__ WideHead(const mpk_operand& out, uint32_t row, uint32_t first)
      : address(out.addr), tile_bytes(static_cast<uint64_t>(out.strides[1]) * 2), row(row) {
    address += static_cast<uint64_t>(row / MPK_WIDE_ROWS) * out.strides[0] * 2 + row % MPK_WIDE_ROWS * (Columns * 2) + first / Columns * tile_bytes;
  }
  /* The address of half `half` of the 16 columns of the head that begin at `column`: of its odd or its even pairs of columns. */
  __device__ __forceinline__ uint64_t piece(uint32_t column, uint32_t half) const {
    const uint32_t group = column % Columns / 16;
    return address + column / Columns * tile_bytes + (Columns == MPK_WIDE_NARROW ? narrow_piece(row, half) : wide_piece(row, group, half));
  }
  /* The address of a column of the head. */
  __device__ __forceinline__ uint64_t of(uint32_t column) const {
    return piece(column / 16 * 16, column / 2 % 2) + (column % 16 / 4 * 2 + column % 2) * 2;
  }
};

}  // namespace gpu
}  // namespace mpk
