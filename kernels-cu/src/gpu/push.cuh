/* Pushing flagged words (MPK_F32_FLAGGED) to every rank. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if MPK_HOST_PROXY
/* Sends the words of the active lanes as one frame if they are adjacent. */
__device__ __noinline__ bool push_by_host(const mpk_rank* rank, uint32_t pe, uint64_t* word, uint64_t bits) {
  const uint32_t lanes = __activemask(), lane = threadIdx.x % 32;
  const uint32_t first = static_cast<uint32_t>(__ffs(static_cast<int>(lanes))) - 1, count = static_cast<uint32_t>(__popc(lanes));
  const uint32_t place = static_cast<uint32_t>(__popc(lanes & ((1u << lane) - 1)));
  uint64_t* const begin = reinterpret_cast<uint64_t*>(__shfl_sync(lanes, reinterpret_cast<uint64_t>(word), static_cast<int>(first)));
  if (!__all_sync(lanes, word == begin + place)) return platform::proxy_words(rank, pe, word, &bits, 1);
  uint64_t position = 0;
  uint32_t open = 0;
  if (lane == first) {
    mpk_frame frame = platform::make_frame(rank, pe, MPK_FRAME_WORDS, begin, count * sizeof(uint64_t));
    frame.rows = count;
    open = platform::frame_open(rank, frame, &position);
  }
  position = __shfl_sync(lanes, position, static_cast<int>(first));
  if (__shfl_sync(lanes, open, static_cast<int>(first)) == 0) return false;
  reinterpret_cast<uint64_t*>(platform::frame_payload(rank->proxy, position))[place] = bits;
  __syncwarp(lanes);
  if (lane == first) platform::frame_close(rank->proxy, position);
  return true;
}
#endif

/* Writes `value` with the task's tag to the word at `word` (an address in this rank's symmetric heap) on every
 * rank, including this one. One thread per word; a warp's words should be adjacent. Words carry their own flag,
 * so the stores need no order with others. */
__device__ __forceinline__ void push_flagged(Context& context, uint64_t* word, float value) {
  if constexpr (kWithoutAllreduces) return;
  const uint64_t bits = (static_cast<uint64_t>(context.slot->tag) << 32) | __float_as_uint(value);
  const mpk_rank* rank = context.rank();
  for (uint32_t i = 0; i < rank->world; ++i) {
    /* Ranks start with different peers. */
    uint32_t pe = rank->rank + 1 + i;
    if (pe >= rank->world) pe -= rank->world;
#if MPK_HOST_PROXY
    if (pe != rank->rank) {
      if (!push_by_host(rank, pe, word, bits)) context.fail(MPK_ABORT_PEER);
      continue;
    }
#endif
    if (!platform::put_word(rank, pe, word, bits)) context.fail(MPK_ABORT_PEER);
  }
}

}  // namespace gpu
}  // namespace mpk
