/* Joins the frontiers of all parts of a sample. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

/* A sample's frontier. */
struct Joined {
  uint32_t count;
  float highest;                            /* the highest logit */
  NoisyToken frontier[MPK_SAMPLE_FRONTIER]; /* the lowest logit first */
};

/* The shared memory that `join_frontiers` needs. */
struct JoinRoom {
  /* Entries that a thread loads at a time, and room for all teams' entries that may be in their frontiers. */
  static constexpr uint32_t kTogether = 4, kList = kComputeThreads * kTogether + Team::kMost * MPK_SAMPLE_FRONTIER;
  NoisyToken list[kList];
  uint64_t tops[kComputeWarps];
  NoisyToken bests[kComputeWarps];
  uint32_t most[kComputeWarps];
  uint32_t held[Team::kMost];
};

/* A team: writes the frontier of all parts' entries of a sample to `joined`. Nobody may need what is in there. */
__device__ __forceinline__ void join_frontiers(Context& context, const Team& team, const SampleRecords& records, JoinRoom& room, Joined& joined) {
  constexpr uint32_t kTogether = JoinRoom::kTogether;
  const uint32_t lane = context.lane, threads = team.threads();
  /* Entry e of each record, then entry e + 1 of each. `held`: the number of the record's entries. */
  struct Loaded {
    uint4 words;
    uint32_t e, held;
  };
  const auto load = [&](uint32_t i) {
    const uint32_t e = quotient(i, records.count);
    if (e >= MPK_SAMPLE_FRONTIER) return Loaded{};
    const uint32_t* record = records.at(i - e * records.count);
    return Loaded{entry_words(record, e), e, record[MPK_SAMPLE_COUNT]};
  };
  /* They are loaded together with what decides about them. */
  Loaded loaded[kTogether];
#pragma unroll
  for (uint32_t u = 0; u < kTogether; ++u) loaded[u] = load(team.thread + u * threads);

  /* A record's first entry has its highest noisy value. */
  uint64_t top = 0;
  NoisyToken best = {0, 0.0f};
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t r = team.thread; r < records.count; r += threads) {
    const uint32_t* record = records.at(r);
    const uint4 head = head_of(record), words = entry_words(record, 0);
    const NoisyToken entry = entry_of(words);
    if (head.z != 0 && entry.beats(best)) best = entry;
    const uint64_t highest = highest_of(head);
    if (highest > top) top = highest;
    most = max(most, head.z);
  }
  top = highest_of_warp(top);
  best = best_of_warp(best);
  most = warp_maximum(most);
  if (lane == 0) {
    room.tops[context.warp] = top;
    room.bests[context.warp] = best;
    room.most[context.warp] = most;
  }
  if (team.thread == 0) room.held[team.index] = 0;
  team.sync();
  top = highest_of_warp(team.of_warps(room.tops, lane, uint64_t{0}));
  best = best_of_warp(team.of_warps(room.bests, lane, NoisyToken{0, 0.0f}));
  most = min(warp_maximum(team.of_warps(room.most, lane, 0u)), MPK_SAMPLE_FRONTIER);

  NoisyToken* list = room.list + team.index * (JoinRoom::kList >> team.shift());
  const uint32_t pairs = records.count * most;
  uint32_t from = 0;
  do {
    /* The best entry beats all that come after it in this order. */
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) {
      const NoisyToken entry = entry_of(loaded[u].words);
      if (loaded[u].e < loaded[u].held && entry.key >= best.key) list[atomicAdd(&room.held[team.index], 1u)] = entry;
    }
    from += kTogether * threads;
    team.sync();
    const bool last = from >= pairs;
    if (team.warp == 0) {
      /* Only what is in the frontier of these can be in that of all. */
      const uint32_t held = room.held[team.index];
      const uint32_t count = frontier_of(list, held, MPK_SAMPLE_FRONTIER + 1, top, lane, [&](uint32_t i, const NoisyToken& found) {
        if (lane == 0 && i < MPK_SAMPLE_FRONTIER) joined.frontier[i] = found;
      });
      if (count > MPK_SAMPLE_FRONTIER) context.fail(MPK_ABORT_KERNEL);
      const uint32_t kept = min(count, MPK_SAMPLE_FRONTIER);
      __syncwarp();
      if (!last)
        for (uint32_t i = lane; i < kept; i += 32) list[i] = joined.frontier[i];
      if (lane == 0) {
        room.held[team.index] = kept;
        joined.count = kept;
        joined.highest = sampling::value_of_key(top);
      }
    }
    if (!last) {
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) loaded[u] = load(from + team.thread + u * threads);
    }
    team.sync();
  } while (from < pairs);
}

}  // namespace gpu
}  // namespace mpk
