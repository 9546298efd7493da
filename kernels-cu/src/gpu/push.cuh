/* Pushing flagged words (MPK_F32_FLAGGED) to every rank. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

/* Writes `value` with the task's tag to the word at `word` (an address in this rank's symmetric heap) on every rank,
 * this one included. One thread a word; a warp's words should lie side by side. Words carry their own flag, so the
 * stores need no order with others. */
__device__ __forceinline__ void push_flagged(Context& context, uint64_t* word, float value) {
  const uint64_t bits = (static_cast<uint64_t>(context.slot->tag) << 32) | __float_as_uint(value);
  const mpk_rank* rank = context.rank();
  for (uint32_t i = 0; i < rank->world; ++i) {
    /* Not all ranks start with the same peer. */
    uint32_t pe = rank->rank + 1 + i;
    if (pe >= rank->world) pe -= rank->world;
    if (!platform::put_word(rank, pe, word, bits)) context.fail(MPK_ABORT_PEER);
  }
}

}  // namespace gpu
}  // namespace mpk
