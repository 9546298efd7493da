/* How many candidates a sample's request needs. */
#pragma once

#include "gpu/task.cuh"

namespace mpk {
namespace gpu {

/* Of the `Kept` candidates that a record has room for. Requests that want no log-probabilities need one, for the greedy token, or
 * none, if the sampling operators find it (`Sampled`). The request is constant during an iteration, so this may be read before the task's events. */
template <uint32_t Kept, bool Sampled>
__device__ __forceinline__ uint32_t wanted_candidates(const Context& context, uint32_t sample) {
  if constexpr (Kept == 1 && !Sampled) {
    return 1;
  } else {
    const mpk_batch* batch = context.batch();
    if (batch->sampling == nullptr) return Kept;
    if (sample >= batch->num_samples) return 1; /* its row is written for the sake of its tags only */
    const uint32_t wanted = batch->sampling[Context::active(static_cast<uint32_t>(batch->sample_active[sample])).slot].logprobs;
    constexpr uint32_t kLeast = Sampled ? 0 : 1;
    return wanted < kLeast ? kLeast : wanted < Kept ? wanted : Kept;
  }
}

/* The same for the samples first, first + step, ...: each lane asks for one of the first 32 at once. */
template <uint32_t Kept, bool Sampled>
struct WantedCandidates {
  const Context& context;
  uint32_t first, step, of_lane;

  __device__ __forceinline__ WantedCandidates(const Context& context_, uint32_t first_, uint32_t step_)
      : context(context_), first(first_), step(step_), of_lane(wanted_candidates<Kept, Sampled>(context_, first_ + context_.lane * step_)) {}
  /* Of the i-th of them. Called by whole warps. */
  __device__ __forceinline__ uint32_t of(uint32_t i) const {
    if constexpr (Kept == 1 && !Sampled) return 1;
    return i < 32 ? __shfl_sync(0xFFFFFFFFu, of_lane, i) : wanted_candidates<Kept, Sampled>(context, first + i * step);
  }
};

}  // namespace gpu
}  // namespace mpk
