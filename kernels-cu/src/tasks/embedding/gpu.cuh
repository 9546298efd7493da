/* The rows of a table in MPK_LAYOUT_FRAGMENT for the iteration's tokens. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/push.cuh"
#include "gpu/walk.cuh"
#include "tasks/embedding/params.h"

namespace mpk {
namespace gpu {

/* enum mpk_dtype of table and output. */
template <uint32_t Table, uint32_t Out>
struct Embedding : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_embedding_params& params = context.params<mpk_embedding_params>();
    const mpk_operand& table = context.input(0);
    const mpk_operand& out = context.output(0);
    const uint32_t rows = context.rows_in_use(0, out.dims[0]), columns = out.dims[1];
    Walk walk(context.thread, rows, columns);
    /* Decode has at most one number for each thread. Its code should be short: the multiprocessor has to fetch it, and the tasks of an
     * iteration begin here. */
    if (rows * columns <= kComputeThreads) {
      if (walk.row < rows) copy<1>(context, walk, rows, params, table, out);
    } else {
      while (walk.row < rows) copy<8>(context, walk, rows, params, table, out);
    }
    return MPK_OK;
  }

 private:
  /* The thread's next `kBatch` numbers, whose loads are in flight together. */
  template <uint32_t kBatch>
  static __device__ __forceinline__ void copy(Context& context, Walk& walk, uint32_t rows, const mpk_embedding_params& params, const mpk_operand& table, const mpk_operand& out) {
    const uint32_t first_column = static_cast<uint32_t>(context.slot->task.args[0]);
    const auto* const values = reinterpret_cast<const typename Number<Table>::Type*>(table.addr);
    uint32_t at_row[kBatch], at_column[kBatch];
    int64_t token[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b, walk.next()) {
      at_row[b] = walk.row;
      at_column[b] = walk.at;
      token[b] = walk.row < rows ? static_cast<int64_t>(context.batch()->row_token[walk.row]) - params.first_token : -1;
    }
    float value[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      value[b] = 0.0f;
      /* For another rank's tokens, and for no token, this rank's summand is
       * 0. */
      if (token[b] >= 0 && token[b] < params.num_tokens)
        value[b] = Number<Table>::to_f32(values[fragment_index<Table>(static_cast<uint32_t>(token[b]), first_column + at_column[b], table.strides[0])]);
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      if (at_row[b] >= rows) continue;
      uint8_t* const to = row_address(out, at_row[b]);
      if constexpr (Out == MPK_F32_FLAGGED)
        push_flagged(context, reinterpret_cast<uint64_t*>(to) + at_column[b], value[b]);
      else
        reinterpret_cast<typename Number<Out>::Type*>(to)[at_column[b]] = Number<Out>::from_f32(value[b]);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
