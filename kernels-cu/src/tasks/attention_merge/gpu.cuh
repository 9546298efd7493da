/* Combines the partial results of attention's splits, for all rows of one active slot and the query heads of
 * one key-value head. Splits are taken in order; those without keys are skipped.
 *
 * Each warp has one piece of a query's values. First, each of its lanes reads the state of one split. The
 * code is so short that it is fetched before the values arrive. */
#pragma once

#include "gpu/task.cuh"
#include "gpu/wide_layout.cuh"
#include "tasks/attention_merge/params.h"

namespace mpk {
namespace gpu {

/* `Columns`: of a column tile of the output if it is in MPK_LAYOUT_WIDE; 0: it is rows. */
template <uint32_t OutDtype, uint32_t Dim, uint32_t Columns = 0>
struct AttentionMerge : TaskCode {
  using Out = typename Number<OutDtype>::Type;
  static constexpr uint32_t kMostSplits = 32; /* mod.rs refuses more */

  static __device__ __forceinline__ int run(Context& context) {
    const int32_t* args = context.slot->task.args;
    const uint32_t active = static_cast<uint32_t>(args[0]);
    uint32_t first_row = 0, rows = 0;
    if (active < context.slot->num_active) {
      const Context::Active numbers = context.active(active);
      first_row = numbers.first_row;
      rows = numbers.num_rows;
    }
    if (rows != 0 && first_row + rows > (Columns == 0 ? context.output(0) : context.input(0)).dims[0]) context.fail(MPK_ABORT_KERNEL);
    const int code = context.wait_inputs();
    if (code != MPK_OK || rows == 0) return code;

    const mpk_operand& partial = context.input(0);
    const uint64_t strides = partial.strides[0] | partial.strides[1] | partial.strides[2];
    /* Two values per lane if pairs of floats are aligned. */
    if (Dim % 2 == 0 && ((partial.addr | strides * 4) & 7) == 0) merge<2>(context, first_row, rows);
    else merge<1>(context, first_row, rows);
    return MPK_OK;
  }

 private:
  template <uint32_t Width>
  static __device__ __forceinline__ void merge(Context& context, uint32_t first_row, uint32_t rows) {
    const mpk_operand &partial = context.input(0), &state = context.input(1), &out = context.output(0);
    const uint32_t first_head = static_cast<uint32_t>(context.slot->task.args[1]);
    const uint32_t heads = static_cast<uint32_t>(context.slot->task.args[2]);
    const uint32_t splits = partial.dims[2], lane = context.lane;
    constexpr uint32_t kPieces = (Dim + 32 * Width - 1) / (32 * Width); /* of a query; one per warp */
    constexpr uint32_t kAtOnce = 8;
#pragma unroll 1
    for (uint32_t i = context.warp; i < rows * heads * kPieces; i += kComputeWarps) {
      const uint32_t query = i / kPieces, d = (i % kPieces * 32 + lane) * Width;
      const uint32_t row = first_row + query / heads, head = first_head + query % heads;
      const float* values = reinterpret_cast<const float*>(partial.addr) + static_cast<uint64_t>(row) * partial.strides[0] +
                            static_cast<uint64_t>(head) * partial.strides[1] + d;
      const float* of_query = reinterpret_cast<const float*>(state.addr) + static_cast<uint64_t>(row) * state.strides[0] +
                              static_cast<uint64_t>(head) * state.strides[1];
      const bool has_values = Dim % (32 * Width) == 0 || d < Dim;
      float own = -INFINITY, weight = 0.0f;
      if (lane < splits) {
        own = of_query[static_cast<uint64_t>(lane) * state.strides[2]];
        weight = of_query[static_cast<uint64_t>(lane) * state.strides[2] + 1];
      }
      const uint32_t with_keys = __ballot_sync(0xFFFFFFFFu, weight != 0.0f);
      float sum = 0.0f, total[Width] = {};
#pragma unroll 1
      for (uint32_t begin = 0; begin < splits; begin += kAtOnce) {
        float v[kAtOnce][Width];
#pragma unroll
        for (uint32_t s = 0; s < kAtOnce; ++s) {
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) v[s][e] = 0.0f;
          if (begin + s < splits && has_values) {
            const float* from = values + static_cast<uint64_t>(begin + s) * partial.strides[2];
            if constexpr (Width == 2) {
              const float2 two = *reinterpret_cast<const float2*>(from);
              v[s][0] = two.x, v[s][1] = two.y;
            } else {
              v[s][0] = from[0];
            }
          }
        }
        if (begin == 0) {
          float highest = own;
#pragma unroll
          for (uint32_t x = 16; x > 0; x /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, x));
          own = weight == 0.0f ? 0.0f : __expf(own - highest);
          sum = own * weight;
#pragma unroll
          for (uint32_t x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, x);
        }
#pragma unroll
        for (uint32_t s = 0; s < kAtOnce; ++s) {
          const float factor = __shfl_sync(0xFFFFFFFFu, own, (begin + s) % kMostSplits);
          if ((with_keys >> (begin + s) % kMostSplits & 1) == 0) continue; /* its values may be anything */
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) total[e] = fmaf(factor, v[s][e], total[e]);
        }
      }
      if (!has_values) continue;
      Out* to;
      if constexpr (Columns == 0) to = reinterpret_cast<Out*>(out.addr) + static_cast<uint64_t>(row) * out.strides[0] + static_cast<uint64_t>(head) * Dim + d;
      else to = reinterpret_cast<Out*>(WideHead<Columns>(out, row, head * Dim).of(d)); /* pairs of columns are adjacent */
      const float inverse = reciprocal(sum);
#pragma unroll
      for (uint32_t e = 0; e < Width; ++e) to[e] = Number<OutDtype>::from_f32(total[e] * inverse);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
