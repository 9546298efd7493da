/* x / sqrt(mean(x^2) + eps) * weight, row by row, computed in f32 and rounded once. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "tasks/rmsnorm/params.h"

namespace mpk {
namespace gpu {

/* X, Weight, Out: enum mpk_dtype of x, weight and output. */
template <uint32_t X, uint32_t Weight, uint32_t Out>
struct RmsNorm : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_rmsnorm_params& params = context.params<mpk_rmsnorm_params>();
    const mpk_operand& out = context.output(0);
    const uint32_t used = context.rows_in_use(params.rows_kind, params.rows), first = static_cast<uint32_t>(context.slot->task.args[0]);
    const uint32_t rows = used > first ? min(used - first, out.dims[0]) : 0, columns = out.dims[1];
    const auto* const weight = reinterpret_cast<const typename Number<Weight>::Type*>(context.input(1).addr);
    float* const sums = reinterpret_cast<float*>(context.work());
    for (uint32_t row = 0; row < rows; ++row) {
      const auto* const x = reinterpret_cast<const typename Number<X>::Type*>(row_address(context.input(0), row));
      auto* const to = reinterpret_cast<typename Number<Out>::Type*>(row_address(out, row));
      float squares = 0.0f;
#pragma unroll 4
      for (uint32_t i = context.thread; i < columns; i += kComputeThreads) {
        const float v = Number<X>::to_f32(x[i]);
        squares = fmaf(v, v, squares);
      }
#pragma unroll
      for (uint32_t distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
      /* Rows alternate between two places: one barrier per row. */
      float* const parts = sums + row % 2 * kComputeWarps;
      if (context.lane == 0) parts[context.warp] = squares;
      if (const int code = context.sync(); code != MPK_OK) return code;
      squares = 0.0f;
#pragma unroll
      for (uint32_t warp = 0; warp < kComputeWarps; ++warp) squares += parts[warp];
      const float scale = rsqrtf(fmaf(squares, reciprocal(static_cast<float>(columns)), params.eps));
#pragma unroll 4
      for (uint32_t i = context.thread; i < columns; i += kComputeThreads)
        to[i] = Number<Out>::from_f32(Number<X>::to_f32(x[i]) * scale * Number<Weight>::to_f32(weight[i]));
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
