/* Rows of a table in MPK_LAYOUT_FRAGMENT that belong to the iteration's tokens. */
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
    const uint32_t first_column = static_cast<uint32_t>(context.slot->task.args[0]);
    const auto* const values = reinterpret_cast<const typename Number<Table>::Type*>(table.addr);
    for (Walk walk(context.thread, rows, columns); walk.row < rows; walk.next()) {
      const uint32_t row = walk.row, column = walk.at;
      /* Of another rank's tokens, and of none, this rank's summand is 0. */
      const int64_t token = static_cast<int64_t>(context.batch()->row_token[row]) - params.first_token;
      float value = 0.0f;
      if (token >= 0 && token < params.num_tokens)
        value = Number<Table>::to_f32(values[fragment_index<Table>(static_cast<uint32_t>(token), first_column + column, table.strides[0])]);
      uint8_t* const to = row_address(out, row);
      if constexpr (Out == MPK_F32_FLAGGED)
        push_flagged(context, reinterpret_cast<uint64_t*>(to) + column, value);
      else
        reinterpret_cast<typename Number<Out>::Type*>(to)[column] = Number<Out>::from_f32(value);
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
