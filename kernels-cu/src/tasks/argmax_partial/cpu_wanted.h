// How many candidates a sample's request needs.
#pragma once

#include "cpu/task.h"

namespace mpk {

// Of the `kept` candidates that a record has room for. Requests that want no log-probabilities need one, for the greedy token, or
// none, if the sampling operators find it (`sampled`).
static inline uint32_t wanted_candidates(const mpk_kernel_args* args, uint32_t sample, uint32_t kept, bool sampled) {
  const mpk_batch* batch = args->batch;
  if ((kept == 1 && !sampled) || batch->sampling == nullptr) return kept;
  if (sample >= batch->num_samples) return 1; // its row is written for the sake of its tags only
  const uint32_t wanted = batch->sampling[batch->active_slot[batch->sample_active[sample]]].logprobs, least = sampled ? 0 : 1;
  return wanted < least ? least : wanted < kept ? wanted : kept;
}

} // namespace mpk
