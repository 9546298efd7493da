/* The highest pairs (value, token) of a warp and of a block: highest value first, lowest token first among equals. */
#pragma once

#include "gpu/task.cuh"
#include "tasks/argmax_partial/params.h"

namespace mpk {
namespace gpu {

struct TokenPair {
  float value;
  uint32_t token;
  __device__ __forceinline__ bool before(const TokenPair& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

__device__ __forceinline__ TokenPair no_pair() { return {-INFINITY, MPK_ARGMAX_NO_TOKEN}; }
/* A pair that comes before every other. */
__device__ __forceinline__ TokenPair first_pair() { return {__uint_as_float(0x7FC00000u), 0}; }
/* Whether `pair` comes after `last`, which may be first_pair (not a number, so no comparison holds). */
__device__ __forceinline__ bool comes_after(const TokenPair& pair, const TokenPair& last) { return last.value != last.value || last.before(pair); }

/* The best of the lanes' pairs, in all lanes; `Lanes` neighbours each. */
template <uint32_t Lanes>
__device__ __forceinline__ TokenPair best_of_lanes(TokenPair pair) {
#pragma unroll
  for (uint32_t s = Lanes / 2; s > 0; s /= 2) {
    const TokenPair other = {__shfl_xor_sync(0xFFFFFFFFu, pair.value, s), __shfl_xor_sync(0xFFFFFFFFu, pair.token, s)};
    if (other.before(pair)) pair = other;
  }
  return pair;
}

/* Called by a warp: writes its `kept` best pairs to `list`. `mine` is this lane's best pair, and `best_after(pair)`
 * this lane's best one that comes after `pair`. No two pairs with a token have the same token. */
template <typename BestAfter>
__device__ __forceinline__ void top_of_warp(TokenPair* list, uint32_t kept, uint32_t lane, TokenPair mine, BestAfter best_after) {
  for (uint32_t i = 0; i < kept; ++i) {
    const TokenPair best = best_of_lanes<32>(mine);
    if (lane == 0) list[i] = best;
    if (i + 1 < kept && best.token != MPK_ARGMAX_NO_TOKEN && mine.token == best.token) mine = best_after(best);
  }
}

/* Room for the pairs among which are the best of a warp. */
constexpr uint32_t kGathered = 128;

/* Called by a warp: the `kept`-th best of the lanes' pairs, or no_pair if there are fewer. So at least as many of all pairs of the warp
 * are as good. */
__device__ __forceinline__ TokenPair ranked_lane(const TokenPair& mine, uint32_t kept) {
  uint32_t better = 0;
#pragma unroll 8
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const TokenPair other = {__shfl_sync(0xFFFFFFFFu, mine.value, lane), __shfl_sync(0xFFFFFFFFu, mine.token, lane)};
    better += other.before(mine) ? 1 : 0;
  }
  const uint32_t found = __ballot_sync(0xFFFFFFFFu, better + 1 == kept);
  if (found == 0) return no_pair();
  const uint32_t lane = __ffs(found) - 1;
  return {__shfl_sync(0xFFFFFFFFu, mine.value, lane), __shfl_sync(0xFFFFFFFFu, mine.token, lane)};
}

/* Called by a warp: writes the `kept` best of `count` pairs in shared memory to `list`. No two have the same token. */
__device__ __forceinline__ void sort_pairs(TokenPair* list, uint32_t kept, const TokenPair* pairs, uint32_t count, uint32_t lane) {
  __syncwarp();
  for (uint32_t i = lane; i < count; i += 32) {
    const TokenPair own = pairs[i];
    uint32_t better = 0;
    for (uint32_t other = 0; other < count; ++other) better += pairs[other].before(own) ? 1 : 0;
    if (better < kept) list[better] = own;
  }
  for (uint32_t i = count + lane; i < kept; i += 32) list[i] = no_pair();
}

/* Called by a warp, as top_of_warp. If a look for the next best pair takes long, pairs that are good enough are gathered at once instead:
 * `gather(limit)` writes the warp's pairs that are as good as `limit` to `room`, as many as there is room for, and returns their number.
 * `least`: from this number of pairs on. More than 32 are not gathered, because each lane knows only its best. */
template <typename Gather, typename BestAfter>
__device__ __forceinline__ void top_gathered(TokenPair* list, const TokenPair* room, uint32_t kept, uint32_t least, uint32_t lane, const TokenPair& mine,
                                             Gather gather, BestAfter best_after) {
  if (kept >= least && kept <= 32) {
    const uint32_t found = gather(ranked_lane(mine, kept));
    if (found <= kGathered) return sort_pairs(list, kept, room, found, lane);
  }
  top_of_warp(list, kept, lane, mine, best_after);
}

/* Called by a warp: the `kept` best pairs of kComputeWarps sorted lists, one after the other. Each list has room for `Room` and is
 * `kept` long. */
template <uint32_t Room, typename Each>
__device__ __forceinline__ void merge_lists(const TokenPair* lists, uint32_t kept, uint32_t lane, Each each) {
  const TokenPair* own = lists + lane % kComputeWarps * Room;
  uint32_t at = 0;
  for (uint32_t i = 0; i < kept; ++i) {
    const TokenPair mine = at < kept ? own[at] : no_pair();
    const TokenPair best = best_of_lanes<kComputeWarps>(mine);
    if (best.token != MPK_ARGMAX_NO_TOKEN && mine.token == best.token) ++at;
    each(i, best);
  }
}

/* A maximum and a sum of exponentials of differences to it. */
struct MaximumSum {
  float maximum;
  double sum;
};

__device__ __forceinline__ double sum_at(const MaximumSum& part, float maximum) {
  if (part.maximum == maximum) return part.sum;
  return part.maximum == -INFINITY ? 0.0 : part.sum * exp(static_cast<double>(part.maximum) - static_cast<double>(maximum));
}

template <uint32_t Lanes>
__device__ __forceinline__ double sum_of_lanes(double sum) {
#pragma unroll
  for (uint32_t s = Lanes / 2; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
  return sum;
}

template <uint32_t Lanes>
__device__ __forceinline__ MaximumSum joined(MaximumSum part) {
  float highest = part.maximum;
#pragma unroll
  for (uint32_t s = Lanes / 2; s > 0; s /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, s));
  return {highest, sum_of_lanes<Lanes>(sum_at(part, highest))};
}

}  // namespace gpu
}  // namespace mpk
