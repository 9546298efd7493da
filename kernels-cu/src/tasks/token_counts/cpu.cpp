// Counts the tokens that an iteration feeds to the model, for requests with penalties.
#include <cstring>

#include "cpu/task.h"
#include "tasks/token_counts/params.h"

extern "C" int mpk_task_token_counts(const mpk_kernel_args* args) {
  const mpk_batch* batch = args->batch;
  if (batch->sampling == nullptr) return MPK_OK;
  const mpk_operand& counts = args->outputs[0]; // [slots, columns]
  const uint32_t first_token = static_cast<uint32_t>(args->task->args[0]), columns = counts.dims[1];
  for (uint32_t a = 0; a < batch->num_active; ++a) {
    const uint32_t slot = static_cast<uint32_t>(batch->active_slot[a]);
    const mpk_sampling& sampling = batch->sampling[slot];
    if ((sampling.flags & MPK_SAMPLING_PENALTIES) == 0) continue;
    if (slot >= counts.dims[0]) return MPK_ABORT_KERNEL;
    uint32_t* row = reinterpret_cast<uint32_t*>(mpk::row_address(counts, slot));
    // A request starts at position 0, also when it restarts: clear the counts of the request before it.
    if (batch->active_context[a] == 0) memset(row, 0, columns * sizeof(uint32_t));
    const uint32_t first = static_cast<uint32_t>(batch->active_first_row[a]);
    for (uint32_t r = first; r < first + static_cast<uint32_t>(batch->active_num_rows[a]); ++r) {
      const uint32_t column = static_cast<uint32_t>(batch->row_token[r]) - first_token;
      if (column >= columns) continue; // belongs to another task
      if (static_cast<uint32_t>(batch->row_position[r]) < sampling.num_prompt_tokens) row[column] |= MPK_COUNT_IN_PROMPT;
      else row[column] += 1;
    }
  }
  return MPK_OK;
}
