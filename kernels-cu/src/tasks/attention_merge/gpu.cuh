/* Combines the partial results of attention's splits, for all rows of one active slot and the query heads of one
 * key-value head. Splits are taken in order; those without keys are left out. */
#pragma once

#include "gpu/task.cuh"
#include "tasks/attention_merge/params.h"

namespace mpk {
namespace gpu {

template <uint32_t OutDtype, uint32_t Dim, uint32_t Splits>
struct AttentionMerge : TaskCode {
  using Out = typename Number<OutDtype>::Type;

  static __device__ __forceinline__ int run(Context& context) {
    const int32_t* args = context.slot->task.args;
    const uint32_t active = static_cast<uint32_t>(args[0]);
    uint32_t first_row = 0, rows = 0;
    if (active < context.slot->num_active) {
      const Context::Active numbers = context.active(active);
      first_row = numbers.first_row;
      rows = numbers.num_rows;
    }
    if (rows != 0 && first_row + rows > context.output(0).dims[0]) context.fail(MPK_ABORT_KERNEL);
    const int code = context.wait_inputs();
    if (code != MPK_OK || rows == 0) return code;

    const mpk_operand &partial = context.input(0), &state = context.input(1);
    const uint64_t strides = partial.strides[0] | partial.strides[1] | partial.strides[2];
    const uint64_t state_strides = state.strides[0] | state.strides[1] | state.strides[2];
    /* Two values a thread where pairs of floats are aligned. */
    const bool pairs = Dim % 2 == 0 && ((partial.addr | strides * 4 | state.addr | state_strides * 4) & 7) == 0;
    if (Dim % 2 == 0 && pairs) merge<2>(context, first_row, rows);
    else merge<1>(context, first_row, rows);
    return MPK_OK;
  }

 private:
  template <uint32_t Width>
  static __device__ __forceinline__ void merge(Context& context, uint32_t first_row, uint32_t rows) {
    const mpk_operand &partial = context.input(0), &state = context.input(1), &out = context.output(0);
    const uint32_t first_head = static_cast<uint32_t>(context.slot->task.args[1]);
    const uint32_t heads = static_cast<uint32_t>(context.slot->task.args[2]);
    constexpr uint32_t kPieces = Dim / Width;
    for (uint32_t i = context.thread; i < rows * heads * kPieces; i += kComputeThreads) {
      const uint32_t query = i / kPieces, d = i % kPieces * Width;
      const uint32_t row = first_row + query / heads, head = first_head + query % heads;
      const float* values = reinterpret_cast<const float*>(partial.addr) + static_cast<uint64_t>(row) * partial.strides[0] +
                            static_cast<uint64_t>(head) * partial.strides[1] + d;
      const float* of_query = reinterpret_cast<const float*>(state.addr) + static_cast<uint64_t>(row) * state.strides[0] +
                              static_cast<uint64_t>(head) * state.strides[1];
      float maximum[Splits], weights[Splits], v[Splits][Width];
#pragma unroll
      for (uint32_t s = 0; s < Splits; ++s) {
        const float* of_split = of_query + static_cast<uint64_t>(s) * state.strides[2];
        const float* from = values + static_cast<uint64_t>(s) * partial.strides[2];
        if constexpr (Width == 2) {
          const float2 both = *reinterpret_cast<const float2*>(of_split), two = *reinterpret_cast<const float2*>(from);
          maximum[s] = both.x, weights[s] = both.y, v[s][0] = two.x, v[s][1] = two.y;
        } else {
          maximum[s] = of_split[0], weights[s] = of_split[1], v[s][0] = from[0];
        }
      }
      float highest = -INFINITY;
#pragma unroll
      for (uint32_t s = 0; s < Splits; ++s) highest = fmaxf(highest, maximum[s]);
      float sum = 0.0f, total[Width] = {};
#pragma unroll
      for (uint32_t s = 0; s < Splits; ++s) {
        if (weights[s] == 0.0f) continue; /* no key: its values may be anything */
        const float weight = __expf(maximum[s] - highest);
        sum += weight * weights[s];
#pragma unroll
        for (uint32_t e = 0; e < Width; ++e) total[e] = fmaf(weight, v[s][e], total[e]);
      }
      Out* to = reinterpret_cast<Out*>(out.addr) + static_cast<uint64_t>(row) * out.strides[0] + static_cast<uint64_t>(head) * Dim + d;
#pragma unroll
      for (uint32_t e = 0; e < Width; ++e) to[e] = Number<OutDtype>::from_f32(total[e] / sum);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
