/* Sums the ranks' rows as gpu.cuh does, and norms them. */
#pragma once

#include "gpu/sum_rows.cuh"
#include "tasks/reduce/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The residual, input `Rest`, and what else does not depend on how the summands come. */
template <bool Residual, uint32_t Rest>
struct ReduceSummands {
  static constexpr bool kResidual = Residual;
  static constexpr uint32_t kNorm = Residual ? Rest + 1 : Rest;

  __device__ __forceinline__ explicit ReduceSummands(const Context& context)
      : rest_(Residual ? context.input(Rest).addr : 0), rest_row_(Residual ? context.input(Rest).strides[0] * 4 : 0) {}

  __device__ __forceinline__ uint64_t rest(uint32_t row) const { return rest_ + static_cast<uint64_t>(row) * rest_row_; }
  __device__ __forceinline__ uint64_t rest_addresses() const { return rest_ | rest_row_; }

  static __device__ __forceinline__ const mpk_wide_rows_params& rows(const Context& context) { return params(context).rows; }
  static __device__ __forceinline__ uint32_t used(const Context& context) {
    return context.rows_in_use_from(params(context).sum.rows_kind, static_cast<uint32_t>(context.slot->task.args[0]), context.output(0).dims[0]);
  }

 protected:
  static __device__ __forceinline__ const mpk_reduce_rows_params& params(const Context& context) { return context.params<mpk_reduce_rows_params>(); }

 private:
  uint64_t rest_;     /* address of the first row */
  uint32_t rest_row_; /* bytes from one row to the next */
};

/* The summands of a `reduce` that is not flagged, in rank order. */
template <uint32_t World, bool Residual, uint32_t In>
struct RankSummands : ReduceSummands<Residual, 2> {
  static constexpr uint32_t kCount = World, kDtype = In;
  static constexpr bool kFlagged = false;

  __device__ __forceinline__ explicit RankSummands(const Context& context) : ReduceSummands<Residual, 2>(context) {
    constexpr uint32_t kBytes = sizeof(typename Number<In>::Type);
    const mpk_operand &mine = context.input(0), &others = context.input(1);
    own_ = mine.addr, own_row_ = mine.strides[0] * kBytes;
    received_ = others.addr, apart_ = static_cast<uint64_t>(others.strides[0]) * kBytes, received_row_ = others.strides[1] * kBytes;
    self_ = this->params(context).sum.rank;
  }

  __device__ __forceinline__ uint64_t of(uint32_t rank, uint32_t row) const {
    return rank == self_ ? own_ + static_cast<uint64_t>(row) * own_row_ : received_ + rank * apart_ + static_cast<uint64_t>(row) * received_row_;
  }
  __device__ __forceinline__ uint64_t addresses() const { return own_ | received_ | apart_ | own_row_ | received_row_; }

 private:
  uint64_t own_, received_;          /* addresses of the first row */
  uint64_t apart_;                   /* bytes from one rank's received rows to the next */
  uint32_t own_row_, received_row_; /* bytes from one row to the next */
  uint32_t self_;
};

/* The summands of a flagged `reduce`, in rank order. The rank has pushed its own ones too. */
template <uint32_t World, bool Residual>
struct PushedSummands : ReduceSummands<Residual, 1> {
  static constexpr uint32_t kCount = World, kDtype = MPK_F32;
  static constexpr bool kFlagged = true;

  __device__ __forceinline__ explicit PushedSummands(const Context& context) : ReduceSummands<Residual, 1>(context) {
    const mpk_operand& words = context.input(0);
    words_ = words.addr, apart_ = static_cast<uint64_t>(words.strides[0]) * 8, row_ = words.strides[1] * 8;
  }

  __device__ __forceinline__ uint64_t of(uint32_t rank, uint32_t row) const { return words_ + rank * apart_ + static_cast<uint64_t>(row) * row_; }
  __device__ __forceinline__ uint64_t addresses() const { return words_ | apart_ | row_; }

 private:
  uint64_t words_, apart_; /* address of the first row; bytes from one rank's rows to the next */
  uint32_t row_;           /* bytes from one row to the next */
};

/* In, Norm, Out: enum mpk_dtype of the summands, the norm weight and the normed rows. Pieces: number of pieces of a row per thread.
 * Columns: columns of a column tile. */
template <uint32_t World, bool Residual, uint32_t In, uint32_t Norm, uint32_t Out, uint32_t Pieces, uint32_t Columns>
using ReduceRows = SumRows<RankSummands<World, Residual, In>, Norm, Out, Pieces, Columns>;

/* The same for flagged words. */
template <uint32_t World, bool Residual, uint32_t Norm, uint32_t Out, uint32_t Pieces, uint32_t Columns>
struct ReducePushedRows : SumRows<PushedSummands<World, Residual>, Norm, Out, Pieces, Columns> {
  static __device__ __forceinline__ bool ready(const TaskSlot& slot, const mpk_rank*, uint32_t lane) {
    return words_arrived<World>(slot, reinterpret_cast<const mpk_reduce_params*>(slot.params)->rows_kind, lane);
  }
};

#endif

}  // namespace gpu
}  // namespace mpk
