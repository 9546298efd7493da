/* The few highest of many keys. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

/* The shared memory that `select_few` needs. */
struct FewRoom {
  static constexpr uint32_t kGroups = 64, kKeys = 320;
  static constexpr uint32_t kThreads = kComputeThreads / kGroups; /* of a group */
  uint64_t keys[kKeys];
  uint32_t tops[kGroups];
  uint32_t bound, found;
  SelectRoom select;
};

struct FewKeys {
  uint32_t count;
  bool in_order; /* the highest first */
};

/* As `select_keys`, and in order if few are wanted. `top` is the highest of the thread's own keys, those of key_at(thread),
 * key_at(thread + kComputeThreads), ...; the threads call key_at for these only. The highest keys of groups of threads give a bound
 * that at least `wanted` keys reach, and hardly more. */
template <typename KeyAt, typename Each>
__device__ __forceinline__ FewKeys select_few(Context& context, uint32_t count, uint32_t wanted, uint64_t top, FewRoom* room, KeyAt key_at, Each each) {
  if (wanted <= FewRoom::kGroups) {
    static_assert(FewRoom::kThreads == 4, "two exchanges");
    uint32_t high = static_cast<uint32_t>(top >> 32);
    high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, 1));
    high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, 2));
    const uint32_t group = context.thread / FewRoom::kThreads, share = context.thread % FewRoom::kThreads;
    if (share == 0) room->tops[group] = high;
    if (context.thread == 0) room->bound = room->found = 0;
    context.sync();
    uint32_t before = 0;
    constexpr uint32_t kShare = FewRoom::kGroups / FewRoom::kThreads;
#pragma unroll
    for (uint32_t i = share * kShare, end = i + kShare; i < end; ++i) {
      const uint32_t other = room->tops[i];
      before += other > high || (other == high && i < group) ? 1 : 0;
    }
    before += __shfl_xor_sync(0xFFFFFFFFu, before, 1);
    before += __shfl_xor_sync(0xFFFFFFFFu, before, 2);
    if (share == 0 && before == wanted - 1) room->bound = high;
    context.sync();
    const uint32_t bound = room->bound;
    if (top != 0 && static_cast<uint32_t>(top >> 32) >= bound) {
#pragma unroll 2
      for (uint32_t i = context.thread; i < count; i += kComputeThreads) {
        const uint64_t key = key_at(i);
        if (key == 0 || static_cast<uint32_t>(key >> 32) < bound) continue;
        const uint32_t place = atomicAdd(&room->found, 1u);
        if (place < FewRoom::kKeys) room->keys[place] = key;
      }
    }
    context.sync();
    const uint32_t found = room->found;
    if (found <= FewRoom::kKeys) {
#pragma unroll 1
      for (uint32_t i = context.thread; i < found; i += kComputeThreads) {
        const uint64_t own = room->keys[i];
        uint32_t place = 0;
#pragma unroll 4
        for (uint32_t j = 0; j < found; ++j) place += room->keys[j] > own ? 1 : 0;
        if (place < wanted) each(place, own);
      }
      context.sync();
      return {min(found, wanted), true};
    }
  }
  return {select_keys(context, count, wanted, &room->select, key_at, each), false};
}

}  // namespace gpu
}  // namespace mpk
