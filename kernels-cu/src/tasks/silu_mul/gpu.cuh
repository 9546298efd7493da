/* activation(gate) * up of a column tile, computed in f32 and rounded once. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/walk.cuh"
#include "tasks/silu_mul/params.h"

namespace mpk {
namespace gpu {

/* Applies an activation to x. */
__device__ __forceinline__ float activated(uint32_t activation, float x) {
  if (activation == MPK_ACTIVATION_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  /* 2 sqrt(2 / pi) (x + 0.044715 x^3) */
  if (activation == MPK_ACTIVATION_GELU_TANH) return x * reciprocal(1.0f + expf(-x * fmaf(x * x, 0.0713548162726f, 1.5957691216057308f)));
  return silu(x);
}

/* Dtype: enum mpk_dtype of gate, up and output. */
template <uint32_t Dtype>
struct SiluMul : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    using N = Number<Dtype>;
    const mpk_operand& out = context.output(0);
    const uint32_t activation = context.params<mpk_silu_mul_params>().activation;
    const uint32_t rows = context.rows_in_use(context.params<mpk_silu_mul_params>().rows_kind, out.dims[0]), columns = out.dims[1];
    for (Walk walk(context.thread, rows, columns); walk.row < rows; walk.next()) {
      const uint32_t row = walk.row, column = walk.at;
      const float gate = N::to_f32(reinterpret_cast<const typename N::Type*>(row_address(context.input(0), row))[column]);
      const float up = N::to_f32(reinterpret_cast<const typename N::Type*>(row_address(context.input(1), row))[column]);
      reinterpret_cast<typename N::Type*>(row_address(out, row))[column] = N::from_f32(activated(activation, gate) * up);
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
