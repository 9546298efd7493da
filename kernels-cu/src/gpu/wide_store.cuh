/* Stores the sums of a wide product as rows of tokens. In a warp's registers they lie as 8 tokens x 16 rows of the weight. */
#pragma once

#include "gpu/barrier.cuh"
#include "gpu/loads.cuh"
#include "gpu/numbers.cuh"
#include "gpu/wide_layout.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Shared memory in which a warp transposes its sums. */
constexpr uint32_t kTurnBytes = 1024;

/* Two numbers of 2 bytes, the first in the low half. */
template <uint32_t Dtype>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  uint32_t both;
  if constexpr (Dtype == MPK_BF16) asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

/* In a buffer, a token has 16 columns of 2 bytes, as two halves. Returns the offset of half `half`; the order avoids bank conflicts. */
__device__ __forceinline__ uint32_t turn_place(uint32_t token, uint32_t half) { return token * 32 + (half ^ (token / 4 & 1u)) * 16; }

/* All lanes of a warp: stores four matrices of 8 x 8, transposed. A lane has the address of a row. */
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* A lane gets from the buffer columns lane % 2 * 8 .. + 8 of the tokens lane / 2 and lane / 2 + 16. */
__device__ __forceinline__ void turned(uint32_t buffer, uint32_t lane, uint4 (&pieces)[2]) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) pieces[i] = load_shared16(buffer + turn_place(i * 16 + lane / 2, lane % 2));
}

/* All lanes of a warp. `pairs`: for each of four groups of 8 tokens, rows 0..7 and then rows 8..15, as pairs of neighbouring
 * tokens. A lane gets rows lane % 2 * 8 .. + 8 of the tokens lane / 2 and lane / 2 + 16. */
__device__ __forceinline__ void turn(uint32_t buffer, uint32_t lane, const uint32_t (&pairs)[8], uint4 (&pieces)[2]) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i)
    store_transposed(buffer + turn_place(i * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2), pairs[i * 4], pairs[i * 4 + 1], pairs[i * 4 + 2], pairs[i * 4 + 3]);
  __syncwarp();
  turned(buffer, lane, pieces);
  __syncwarp();
}

/* All lanes of a warp: writes 8 columns, half `half` of 16, of 64 tokens. `pairs`: for each of eight groups of 8 tokens, pairs of
 * neighbouring tokens. */
__device__ __forceinline__ void turn_half(uint32_t buffer, uint32_t lane, uint32_t half, const uint32_t (&pairs)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i)
    store_transposed(buffer + turn_place(i * 32 + lane, half), pairs[i * 4], pairs[i * 4 + 1], pairs[i * 4 + 2], pairs[i * 4 + 3]);
}

/* All lanes of a warp: turns 8 neighbouring columns of 16 into the 8 columns that MPK_LAYOUT_WIDE keeps together. */
__device__ __forceinline__ uint4 wide_order(const uint4& piece, uint32_t lane) {
  const bool second = (lane & 1u) != 0;
  const uint32_t x = __shfl_xor_sync(0xFFFFFFFFu, second ? piece.x : piece.y, 1);
  const uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, second ? piece.z : piece.w, 1);
  return second ? uint4{x, y, piece.y, piece.w} : uint4{piece.x, piece.z, x, y};
}

/* All lanes of a warp: stores the 16 columns `group` of the task for 32 tokens, as `turned` gives them. Columns from `columns` on become
 * 0. `out` is a view in MPK_LAYOUT_WIDE: column tiles of `Columns`, one column tile unless they are narrow. */
template <uint32_t Columns>
__device__ __forceinline__ void store_wide(const mpk_operand& out, uint32_t lane, uint32_t first_token, uint32_t tokens, uint32_t group, uint32_t columns,
                                           uint4 (&pieces)[2]) {
  constexpr bool kNarrow = Columns == MPK_WIDE_NARROW;
  const uint32_t column = group * 16 + lane % 2 * 8, left = columns > column ? columns - column : 0;
  /* The weight's last rows may be fewer than the task's. */
  if (kNarrow && group >= out.dims[1]) return;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    if (left < 8) {
      uint32_t* const words[4] = {&pieces[i].x, &pieces[i].y, &pieces[i].z, &pieces[i].w};
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) *words[c] &= left >= 2 * c + 2 ? 0xFFFFFFFFu : left == 2 * c + 1 ? 0xFFFFu : 0u;
    }
    const uint4 piece = wide_order(pieces[i], lane);
    const uint32_t token = first_token + i * 16 + lane / 2;
    if (token >= tokens) continue;
    uint8_t* to = reinterpret_cast<uint8_t*>(out.addr) + static_cast<uint64_t>(token / MPK_WIDE_ROWS) * out.strides[0] * 2 + token % MPK_WIDE_ROWS * (Columns * 2);
    if constexpr (kNarrow) to += static_cast<uint64_t>(group) * out.strides[1] * 2 + narrow_piece(token, lane % 2);
    else to += wide_piece(token, group, lane % 2);
    *reinterpret_cast<uint4*>(to) = piece;
  }
}

#endif

}  // namespace gpu
}  // namespace mpk
