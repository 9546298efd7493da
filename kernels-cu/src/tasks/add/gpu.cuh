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
        to[i] = nullptr;
        if (walk.row >= rows) continue;
#pragma unroll
        for (uint32_t s = 0; s < Summands; ++s) take(context, s, walk.row, walk.at * Width, value[i][s]);
        to[i] = row_address(out, walk.row) + walk.at * Width * element_bytes(out.dtype);
        walk.next();
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        float result[Width];
#pragma unroll
        for (uint32_t c = 0; c < Width; ++c) {
          result[c] = value[i][1][c] + value[i][0][c];
#pragma unroll
          for (uint32_t s = 2; s < Summands; ++s) result[c] += value[i][s][c];
        }
        if (to[i] == nullptr) continue;
        if (Width == 4 && out.dtype == MPK_F32) {
          *reinterpret_cast<float4*>(to[i]) = {result[0], result[1 % Width], result[2 % Width], result[3 % Width]};
        } else {
#pragma unroll
          for (uint32_t c = 0; c < Width; ++c) store_rounded(to[i], out.dtype, c, result[c]);
        }
      }
    }
  }
};

}  // namespace gpu
}  // namespace mpk
