/* Counts the tokens that an iteration feeds to the model, for requests with penalties. */
#pragma once

#include "gpu/task.cuh"
#include "tasks/token_counts/params.h"

namespace mpk {
namespace gpu {

struct TokenCounts : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const mpk_batch* batch = context.batch();
    if (batch->sampling == nullptr) return MPK_OK;
    /* Usually no request has penalties: the lanes of a warp check all requests at once. */
    bool any = false;
#pragma unroll 1
    for (uint32_t a = context.lane; a < context.slot->num_active; a += 32)
      any |= (batch->sampling[Context::active(a).slot].flags & MPK_SAMPLING_PENALTIES) != 0;
    if (!__any_sync(0xFFFFFFFFu, any)) return MPK_OK;
    const mpk_operand& counts = context.output(0); /* [slots, columns] */
    const uint32_t first_token = static_cast<uint32_t>(context.slot->task.args[0]), columns = counts.dims[1];
#pragma unroll 1
    for (uint32_t a = 0; a < context.slot->num_active; ++a) {
      const Context::Active active = Context::active(a);
      const mpk_sampling* sampling = batch->sampling + active.slot;
      if ((sampling->flags & MPK_SAMPLING_PENALTIES) == 0) continue;
      if (active.slot >= counts.dims[0]) {
        context.fail(MPK_ABORT_KERNEL);
        return context.sync();
      }
      uint32_t* row = reinterpret_cast<uint32_t*>(row_address(counts, active.slot));
      const uint32_t prompt = sampling->num_prompt_tokens;
      /* A request starts at position 0, also when it restarts: clear the counts of the request before it. */
      if (active.context == 0) {
#pragma unroll 1
        for (uint32_t i = context.thread; i < columns; i += kComputeThreads) row[i] = 0;
        code = context.sync();
        if (code != MPK_OK) return code;
      }
#pragma unroll 1
      for (uint32_t r = context.thread; r < active.num_rows; r += kComputeThreads) {
        const uint32_t column = static_cast<uint32_t>(batch->row_token[active.first_row + r]) - first_token;
        if (column >= columns) continue; /* belongs to another task */
        /* Several rows may have the same token. */
        if (static_cast<uint32_t>(batch->row_position[active.first_row + r]) < prompt) atomicOr(row + column, MPK_COUNT_IN_PROMPT);
        else atomicAdd(row + column, 1u);
      }
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
