/* The few highest of many keys. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

/* The shared memory that `select_few` needs. */
struct FewRoom {
  static constexpr uint32_t kGroups = 64, kKeys = 320;
  static_assert(kGroups <= kComputeThreads / Team::kMost, "a group has a thread at least");
  uint64_t keys[kKeys];
  uint32_t tops[kGroups];
  uint32_t bound, found;
  SelectRoom select;
};

struct FewKeys {
  uint32_t count;
  bool in_order; /* the highest first */
};

/* The keys of a sample's lists [ranks, lists of a rank, 1, words], `wanted` of each. They stay in shared memory, if there is room. */
struct ListedKeys {
  static constexpr uint32_t kRoom = 4096;
  const uint32_t* first;
  uint64_t rank_stride, list_stride;
  uint32_t lists_of_rank, wanted, count;
  uint64_t* room; /* NULL: too many */

  __device__ __forceinline__ ListedKeys(const mpk_operand& lists, uint32_t wanted_, uint64_t* room_)
      : first(reinterpret_cast<const uint32_t*>(lists.addr)), rank_stride(lists.strides[0]), list_stride(lists.strides[1]), lists_of_rank(lists.dims[1]), wanted(wanted_),
        count(lists.dims[0] * lists.dims[1] * wanted_), room(count <= kRoom ? room_ : nullptr) {}

  __device__ __forceinline__ uint64_t load(uint32_t i) const {
    const uint32_t list = quotient(i, wanted), rank = quotient(list, lists_of_rank);
    return pair_key(first + rank * rank_stride + (list - rank * lists_of_rank) * list_stride, i - list * wanted);
  }
  /* Loads the thread's own keys, four at once. Returns the highest of them. */
  __device__ __forceinline__ uint64_t bring(uint32_t thread) const {
    uint64_t top = 0;
#pragma unroll 1
    for (uint32_t i = thread; i < count; i += 4 * kComputeThreads) {
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        const uint32_t own = i + u * kComputeThreads;
        const uint64_t key = own < count ? load(own) : 0;
        if (room != nullptr && own < count) room[own] = key;
        top = max(top, key);
      }
    }
    return top;
  }
  /* One of the thread's own. */
  __device__ __forceinline__ uint64_t operator()(uint32_t i) const { return room != nullptr ? room[i] : load(i); }
};

/* For select_few: a thread's own keys by key_at. */
template <typename KeyAt>
struct OwnKeys {
  const Team& team;
  uint32_t count;
  KeyAt key_at;
  template <typename Take>
  __device__ __forceinline__ void operator()(uint32_t bound, Take take) const {
#pragma unroll 2
    for (uint32_t i = team.thread; i < count; i += team.threads()) {
      const uint64_t key = key_at(i);
      if (key != 0 && static_cast<uint32_t>(key >> 32) >= bound) take(key);
    }
  }
};
template <typename KeyAt>
__device__ __forceinline__ OwnKeys<KeyAt> own_keys(const Team& team, uint32_t count, KeyAt key_at) { return {team, count, key_at}; }

/* As `select_keys`, and in order if few are wanted. `top` is the highest of the thread's own keys, those of key_at(thread),
 * key_at(thread + threads), ...; the threads call key_at for these only. each_own(bound, take) calls take(key) for those of them whose
 * upper half is `bound` at least. The highest keys of groups of threads give a bound that at least `wanted` keys reach, and hardly more. */
template <typename KeyAt, typename EachOwn, typename Each>
__device__ __forceinline__ FewKeys select_few(const Context& context, const Team& team, uint32_t count, uint32_t wanted, uint64_t top, FewRoom* room,
                                              KeyAt key_at, EachOwn each_own, Each each) {
  if (wanted <= FewRoom::kGroups) {
    /* A group has four threads of a team of all warps, two of a half, one of a quarter. */
    static_assert(kComputeThreads == 4 * FewRoom::kGroups && Team::kMostShift == 2, "two exchanges at most");
    const bool pairs = team.shift() <= 1, fours = team.shift() == 0;
    uint32_t high = static_cast<uint32_t>(top >> 32);
    if (pairs) high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, 1));
    if (fours) high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, 2));
    const uint32_t log_group = 2 - team.shift();
    const uint32_t group = team.thread >> log_group, member = team.thread & ((1u << log_group) - 1);
    if (member == 0) room->tops[group] = high;
    if (team.thread == 0) room->bound = room->found = 0;
    team.sync();
    uint32_t before = 0;
    const uint32_t each_member = FewRoom::kGroups >> log_group;
#pragma unroll 8
    for (uint32_t i = member * each_member, end = i + each_member; i < end; ++i) {
      const uint32_t other = room->tops[i];
      before += other > high || (other == high && i < group) ? 1 : 0;
    }
    if (pairs) before += __shfl_xor_sync(0xFFFFFFFFu, before, 1);
    if (fours) before += __shfl_xor_sync(0xFFFFFFFFu, before, 2);
    if (member == 0 && before == wanted - 1) room->bound = high;
    team.sync();
    const uint32_t bound = room->bound;
    if (top != 0 && static_cast<uint32_t>(top >> 32) >= bound) {
      each_own(bound, [&](uint64_t key) {
        const uint32_t place = atomicAdd(&room->found, 1u);
        if (place < FewRoom::kKeys) room->keys[place] = key;
      });
    }
    team.sync();
    const uint32_t found = room->found;
    if (found <= FewRoom::kKeys) {
#pragma unroll 1
      for (uint32_t i = team.thread; i < found; i += team.threads()) {
        const uint64_t own = room->keys[i];
        uint32_t place = 0;
#pragma unroll 4
        for (uint32_t j = 0; j < found; ++j) place += room->keys[j] > own ? 1 : 0;
        if (place < wanted) each(place, own);
      }
      team.sync();
      return {min(found, wanted), true};
    }
  }
  return {select_keys(context, team, count, wanted, &room->select, key_at, each), false};
}

}  // namespace gpu
}  // namespace mpk
