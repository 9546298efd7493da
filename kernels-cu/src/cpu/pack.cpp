// Packing of row-major weights into MPK_LAYOUT_TILED.
#include "cpu/ops.h"

#include <cstring>

namespace {

constexpr uint64_t BLOCK = 256; // values of k at a time
constexpr uint64_t BLOCK_BYTES = BLOCK * 4 + 64; // of one row; rows are not a power of two apart

// Lanes [lane, lane + rows) of the tile at `out`: unit i of row r goes to out[i * 16 + lane + r]. A unit is an
// element, or a pair of bf16.
template <class Unit> void transpose(Unit* out, const uint8_t* rows_in, uint64_t lane, uint64_t rows, uint64_t units) {
  if (rows == 16) {
    for (uint64_t i = 0; i < units; ++i)
      for (uint64_t r = 0; r < 16; ++r) std::memcpy(out + i * 16 + r, rows_in + r * BLOCK_BYTES + i * sizeof(Unit), sizeof(Unit));
    return;
  }
  for (uint64_t r = 0; r < rows; ++r)
    for (uint64_t i = 0; i < units; ++i)
      std::memcpy(out + i * 16 + lane + r, rows_in + r * BLOCK_BYTES + i * sizeof(Unit), sizeof(Unit));
}

} // namespace

extern "C" void mpk_pack_rows(uint8_t* dst, uint32_t dst_dtype, uint64_t k, uint64_t first_dst_row,
                              const uint8_t* src, uint32_t src_dtype, uint64_t src_stride, uint64_t rows) {
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint64_t stride = (k + MPK_TILE_K - 1) / MPK_TILE_K * MPK_TILE_K;
  const uint64_t dst_bytes = mpk::element_bytes(dst_dtype), src_bytes = mpk::element_bytes(src_dtype);
  alignas(64) uint8_t block[16 * BLOCK_BYTES];
  for (uint64_t row = 0; row < rows;) {
    const uint64_t lane = (first_dst_row + row) % 16;
    const uint64_t count = rows - row < 16 - lane ? rows - row : 16 - lane;
    uint8_t* tile = dst + (first_dst_row + row - lane) * stride * dst_bytes;
    for (uint64_t first = 0; first < k; first += BLOCK) {
      const uint64_t n = k - first < BLOCK ? k - first : BLOCK;
      for (uint64_t r = 0; r < count; ++r) {
        const uint8_t* from = src + ((row + r) * src_stride + first) * src_bytes;
        uint8_t* to = block + r * BLOCK_BYTES;
        if (src_dtype == dst_dtype) {
          std::memcpy(to, from, n * dst_bytes);
        } else if (dst_dtype == MPK_F32) {
          ops.to_f32(reinterpret_cast<float*>(to), from, src_dtype, n);
        } else {
          float values[BLOCK];
          ops.to_f32(values, from, src_dtype, n);
          ops.from_f32(to, dst_dtype, values, n);
        }
        std::memset(to + n * dst_bytes, 0, dst_bytes); // padding, if k is odd
      }
      const uint64_t padded = (n + 1) / 2 * 2;
      uint8_t* out = tile + first * 16 * dst_bytes;
      if (dst_dtype == MPK_BF16)
        transpose(reinterpret_cast<uint32_t*>(out), block, lane, count, padded / 2);
      else if (dst_dtype == MPK_F16)
        transpose(reinterpret_cast<uint16_t*>(out), block, lane, count, padded);
      else
        transpose(reinterpret_cast<uint32_t*>(out), block, lane, count, padded);
    }
    row += count;
  }
}
