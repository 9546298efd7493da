// A sample as the sampling tasks of the CPU target see it.
#pragma once

#include "cpu/task.h"
#include "tasks/sample_partial/noise.h"

namespace mpk {
namespace sampling {

struct Row {
  uint32_t mode; // of the request
  mpk_sampling sampling;
  uint32_t position; // of the token that is sampled
  uint32_t slot;
};

static inline Row row_of(const mpk_kernel_args* args, uint32_t sample, uint32_t kept) {
  Row row = {kUnused, {}, 0, 0};
  const mpk_batch* batch = args->batch;
  if (sample >= batch->num_samples) return row;
  const uint32_t active = static_cast<uint32_t>(batch->sample_active[sample]);
  row.slot = static_cast<uint32_t>(batch->active_slot[active]);
  row.sampling = taken(batch->sampling == nullptr ? mpk_sampling{} : batch->sampling[row.slot], kept);
  row.position = static_cast<uint32_t>(batch->active_context[active] + batch->active_num_rows[active]);
  row.mode = mode_of(row.sampling, kept);
  return row;
}

// The samples of a task that are in use: the first, and how many follow.
struct Samples {
  uint32_t first, count;
  explicit Samples(const mpk_kernel_args* args) : first(static_cast<uint32_t>(args->task->args[3])), count(static_cast<uint32_t>(args->task->args[4])) {
    const uint32_t used = args->batch->num_samples > first ? args->batch->num_samples - first : 0;
    count = count < used ? count : used;
  }
};

// The columns of a task's sample `sample`, of logits [samples, columns] and counts [slots, columns].
struct Columns {
  const float* logits = nullptr;
  const uint32_t* counts = nullptr; // null: nothing is counted
  uint32_t first_token, count;

  Columns(const mpk_kernel_args* args, const Row& row, uint32_t sample, uint32_t input) {
    first_token = static_cast<uint32_t>(args->task->args[1]);
    count = static_cast<uint32_t>(args->task->args[2]);
    if (count == 0) return; // no such inputs
    logits = reinterpret_cast<const float*>(row_address(args->inputs[input], sample));
    if ((row.sampling.flags & MPK_SAMPLING_PENALTIES) != 0)
      counts = reinterpret_cast<const uint32_t*>(row_address(args->inputs[input + 1], row.slot));
  }
  float value(uint32_t i, const mpk_sampling& s) const { return processed(logits[i], counts == nullptr ? 0 : counts[i], s); }
};

} // namespace sampling
} // namespace mpk
