// How many candidates a sample's request needs.
#pragma once

#include "cpu/task.h"

namespace mpk {

// Of the `kept` candidates that a record has room for. Requests that want no log-probabilities need one, for the greedy token.
static inline uint32_t wanted_candidates(const mpk_kernel_args* args, uint32_t sample, uint32_t kept) {
  const mpk_batch* batch = args->batch;
  if (kept == 1 || batch->sampling == nullptr) return kept;
  if (sample >= batch->num_samples) return 1; // its row is written for the sake of its tags only
  const int32_t slot = batch->active_slot[batch->sample_active[sample]];
  const uint32_t wanted = batch->sampling[slot].logprobs;
  return wanted < 1 ? 1 : wanted < kept ? wanted : kept;
}

} // namespace mpk
