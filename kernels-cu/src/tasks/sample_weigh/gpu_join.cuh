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
  /* Lanes that read a record together, 16 bytes each, records that a thread takes part in at a time, and room for all teams' entries
   * that may be in their frontiers. */
  static constexpr uint32_t kLanes = 8, kTogether = 4, kList = kComputeThreads * kTogether + Team::kMost * MPK_SAMPLE_FRONTIER;
  NoisyToken list[kList];
  uint64_t tops[kComputeWarps];
  NoisyToken bests[kComputeWarps];
  uint32_t most[kComputeWarps];
  uint32_t held[Team::kMost];
};

/* A team: writes the frontier of all parts' entries of a sample to `joined`. Nobody may need what is in there. Calls beside() while the
 * first loads are under way. */
template <typename Beside>
__device__ __forceinline__ void join_frontiers(Context& context, const Team& team, const SampleRecords& records, JoinRoom& room, Joined& joined, Beside beside) {
  constexpr uint32_t kLanes = JoinRoom::kLanes, kTogether = JoinRoom::kTogether;
  static_assert(MPK_SAMPLE_ENTRIES == MPK_SAMPLE_ENTRY_WORDS && MPK_SAMPLE_WORDS == 4 * (MPK_SAMPLE_FRONTIER + 1), "a record is its head and 64 entries, 16 bytes each");
  const uint32_t lane = context.lane, threads = team.threads(), own = team.thread % kLanes;
  /* Records are read side by side, so that a warp touches few lines. */
  const uint32_t at_a_time = threads / kLanes * kTogether;
  struct Loaded {
    uint4 words;   /* the head, or an entry */
    uint32_t held; /* number of the record's entries */
  };
  /* The thread's 16 bytes of a piece of its u-th record from `first` on. Piece 0 has the head and the first entries. */
  const auto load = [&](uint32_t first, uint32_t piece, uint32_t u) {
    const uint32_t r = first + team.thread / kLanes + u * (threads / kLanes), at = piece * kLanes + own;
    if (r >= records.count || at > MPK_SAMPLE_FRONTIER) return Loaded{};
    const uint32_t* record = records.at(r);
    return Loaded{*reinterpret_cast<const uint4*>(record + 4 * at), record[MPK_SAMPLE_COUNT]};
  };
  Loaded loaded[kTogether];
  const auto load_all = [&](uint32_t first, uint32_t piece) {
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) loaded[u] = load(first, piece, u);
  };

  /* A record's first entry has its highest noisy value. From the back, so that the first records stay loaded. */
  uint64_t top = 0;
  NoisyToken best = {0, 0.0f};
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t first = (records.count - 1) / at_a_time * at_a_time;; first -= at_a_time) {
    load_all(first, 0);
    if (first == 0) beside();
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) {
      most = max(most, loaded[u].held);
      if (own == 0 && first + team.thread / kLanes + u * (threads / kLanes) < records.count) top = max(top, highest_of(loaded[u].words));
      if (own != 1 || loaded[u].held == 0) continue;
      const NoisyToken entry = entry_of(loaded[u].words);
      if (entry.beats(best)) best = entry;
    }
    if (first == 0) break;
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
  if (best.key == top) { /* the highest logit beats all others */
    if (team.thread == 0) {
      joined.frontier[0] = best;
      joined.count = 1;
      joined.highest = sampling::value_of_key(top);
    }
    team.sync();
    return;
  }

  NoisyToken* list = room.list + team.index * (JoinRoom::kList >> team.shift());
  uint32_t first = 0, piece = 0; /* what is loaded */
  bool last = false;
#pragma unroll 1
  do {
    /* The best entry beats all that come after it in order. */
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) {
      const uint32_t at = piece * kLanes + own; /* 0: the head */
      const NoisyToken entry = entry_of(loaded[u].words);
      if (at != 0 && at <= loaded[u].held && entry.key >= best.key) list[atomicAdd(&room.held[team.index], 1u)] = entry;
    }
    first += at_a_time;
    if (first >= records.count) {
      first = 0;
      ++piece;
    }
    last = piece * kLanes > most;
    team.sync();
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
    if (!last) load_all(first, piece);
    team.sync();
  } while (!last);
}

}  // namespace gpu
}  // namespace mpk
