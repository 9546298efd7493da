/* An activation plus the residual stream, and further summands if there are any, for a column
 * tile. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/walk.cuh"
#include "tasks/add/params.h"

namespace mpk {
namespace gpu {

/* A: enum mpk_dtype of the activation; the other summands and the output are f32. */
template <uint32_t A, uint32_t Summands = 2>
struct Add : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_operand& out = context.output(0);
    const uint32_t rows = context.rows_in_use(context.params<mpk_add_params>().rows_kind, out.dims[0]), columns = out.dims[1];
    constexpr uint32_t kAtOnce = 4; /* loads in flight together: the output may alias an input, so a store in between would hold them back */
    for (Walk walk(context.thread, rows, columns); walk.row < rows;) {
      float a[kAtOnce], others[kAtOnce][Summands - 1];
      float* to[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t row = walk.row, column = walk.at;
        a[i] = 0.0f;
#pragma unroll
        for (uint32_t s = 0; s < Summands - 1; ++s) others[i][s] = 0.0f;
        to[i] = nullptr;
        if (row >= rows) continue;
        a[i] = Number<A>::to_f32(reinterpret_cast<const typename Number<A>::Type*>(row_address(context.input(0), row))[column]);
#pragma unroll
        for (uint32_t s = 0; s < Summands - 1; ++s) others[i][s] = reinterpret_cast<const float*>(row_address(context.input(1 + s), row))[column];
        to[i] = reinterpret_cast<float*>(row_address(out, row)) + column;
        walk.next();
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        float sum = others[i][0] + a[i];
#pragma unroll
        for (uint32_t s = 1; s < Summands - 1; ++s) sum += others[i][s];
        if (to[i] != nullptr) *to[i] = sum;
      }
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
