// Packing of row-major weights into MPK_LAYOUT_TILED.
#include "cpu/ops.h"

#include <cstring>

extern "C" void mpk_pack_rows(uint8_t* dst, uint32_t dst_dtype, uint64_t k, uint64_t first_dst_row,
                              const uint8_t* src, uint32_t src_dtype, uint64_t src_stride, uint64_t rows) {
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint64_t stride = (k + MPK_TILE_K - 1) / MPK_TILE_K * MPK_TILE_K;
  const uint64_t dst_bytes = mpk::element_bytes(dst_dtype), src_bytes = mpk::element_bytes(src_dtype);
  constexpr uint64_t BLOCK = 256;
  for (uint64_t row = 0; row < rows; ++row) {
    const uint64_t dst_row = first_dst_row + row;
    uint8_t* tile = dst + dst_row / 16 * 16 * stride * dst_bytes;
    const uint64_t lane = dst_row % 16;
    for (uint64_t first = 0; first < stride; first += BLOCK) {
      const uint64_t n = stride - first < BLOCK ? stride - first : BLOCK;
      const uint64_t real = k - first < n ? k - first : n;
      float values[BLOCK] = {};
      alignas(64) uint8_t rounded[BLOCK * 4];
      ops.to_f32(values, src + (row * src_stride + first) * src_bytes, src_dtype, real);
      ops.from_f32(rounded, dst_dtype, values, n);
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t at =
            dst_dtype == MPK_BF16 ? ((first + i) / 2 * 16 + lane) * 2 + (first + i) % 2 : (first + i) * 16 + lane;
        std::memcpy(tile + at * dst_bytes, rounded + i * dst_bytes, dst_bytes);
      }
    }
  }
}
