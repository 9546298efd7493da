/* Adds the parts of a product row by row, as gpu.cuh does, and norms the rows. */
#pragma once

#include "gpu/sum_rows.cuh"
#include "tasks/add/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The inputs of an `add`, all f32. It adds the first two in the other order, which gives the same bits. */
template <uint32_t Count>
struct PartSummands {
  static constexpr uint32_t kCount = Count, kDtype = MPK_F32, kNorm = Count;
  static constexpr bool kResidual = false, kFlagged = false;

  __device__ __forceinline__ explicit PartSummands(const Context& context) {
#pragma unroll
    for (uint32_t part = 0; part < Count; ++part) {
      first_[part] = context.input(part).addr;
      row_[part] = context.input(part).strides[0] * 4;
    }
  }

  __device__ __forceinline__ uint64_t of(uint32_t part, uint32_t row) const { return first_[part] + static_cast<uint64_t>(row) * row_[part]; }
  __device__ __forceinline__ uint64_t rest(uint32_t) const { return 0; }
  __device__ __forceinline__ uint64_t addresses() const {
    uint64_t all = 0;
#pragma unroll
    for (uint32_t part = 0; part < Count; ++part) all |= first_[part] | row_[part];
    return all;
  }
  __device__ __forceinline__ uint64_t rest_addresses() const { return 0; }

  static __device__ __forceinline__ const mpk_wide_rows_params& rows(const Context& context) { return params(context).rows; }
  static __device__ __forceinline__ uint32_t used(const Context& context) {
    return context.rows_in_use_from(params(context).sum.rows_kind, static_cast<uint32_t>(context.slot->task.args[0]), context.output(0).dims[0]);
  }

 private:
  static __device__ __forceinline__ const mpk_add_rows_params& params(const Context& context) { return context.params<mpk_add_rows_params>(); }

  uint64_t first_[Count]; /* addresses of the first row */
  uint32_t row_[Count];   /* bytes from one row to the next */
};

/* Norm, Out: enum mpk_dtype of the norm weight and the normed rows. Pieces: number of pieces of a row per thread. Columns: columns of a
 * column tile. */
template <uint32_t Count, uint32_t Norm, uint32_t Out, uint32_t Pieces, uint32_t Columns>
using AddRows = SumRows<PartSummands<Count>, Norm, Out, Pieces, Columns>;

#endif

}  // namespace gpu
}  // namespace mpk
