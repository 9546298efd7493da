/* An activation plus the residual stream, and more summands if there are any, for a column tile. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/walk.cuh"
#include "tasks/add/gpu_rows.cuh"
#include "tasks/add/params.h"

namespace mpk {
namespace gpu {

/* enum mpk_dtype of the activation; the other summands are f32. The output is f32, or rounded if the summands are the parts
 * of a product. */
template <uint32_t A, uint32_t Summands = 2>
struct Add : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_operand& out = context.output(0);
    const mpk_add_params& params = context.params<mpk_add_params>();
    const uint32_t rows = context.rows_in_use_from(params.rows_kind, params.first_row, out.dims[0]), columns = out.dims[1];
    if constexpr (A == MPK_F32) {
      bool fours = in_fours(out);
#pragma unroll
      for (uint32_t s = 0; s < Summands; ++s) fours = fours && in_fours(context.input(s));
      if (fours) {
        sum<4>(context, rows, columns);
        return MPK_OK;
      }
    }
    sum<1>(context, rows, columns);
    return MPK_OK;
  }

 private:
  /* True if groups of four numbers are aligned in all rows. */
  static __device__ __forceinline__ bool in_fours(const mpk_operand& view) { return ((view.addr / 4 | view.strides[0] | view.dims[1]) & 3) == 0; }

  template <uint32_t Width>
  static __device__ __forceinline__ void take(const Context& context, uint32_t summand, uint32_t row, uint32_t column, float (&value)[Width]) {
    const uint8_t* const from = row_address(context.input(summand), row);
    if constexpr (Width == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + column * 4);
      value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
    } else {
      value[0] = summand == 0 ? Number<A>::to_f32(reinterpret_cast<const typename Number<A>::Type*>(from)[column]) : reinterpret_cast<const float*>(from)[column];
    }
  }

  template <uint32_t Width>
  static __device__ __forceinline__ void sum(const Context& context, uint32_t rows, uint32_t columns) {
    const mpk_operand& out = context.output(0);
    constexpr uint32_t kAtOnce = 4; /* loads that are on their way together: the output may be an input's memory */
    for (Walk walk(context.thread, rows, columns / Width); walk.row < rows;) {
      float value[kAtOnce][Summands][Width] = {};
      uint8_t* to[kAtOnce];
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
