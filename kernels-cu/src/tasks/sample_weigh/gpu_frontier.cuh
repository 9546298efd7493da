/* The frontier of a sample, from the records of all parts. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace gpu {

struct FrontierRoom {
  static constexpr uint32_t kCounts = 1024;
  NoisyToken frontier[MPK_SAMPLE_FRONTIER]; /* the result */
  NoisyToken warps[2][kComputeWarps];
  uint32_t found, joined, most; /* most: entries of a record */
  uint8_t counts[kCounts];      /* of the first records */
};
static_assert(MPK_SAMPLE_FRONTIER <= 255, "a count is a byte");

/* `room`: `size` entries, of all parts those that the entry with the highest noisy value does not beat: as a rule a few dozen. */
/* The frontier of all parts' entries to work->frontier, the first in order first; gives the sample's highest logit. */
__device__ __forceinline__ float join_frontiers(Context& context, const SampleRecords& records, FrontierRoom* work, NoisyToken* room, uint32_t size) {
  NoisyToken best = {0, 0.0f}, top = {0, 0.0f};
  if (context.thread == 0) work->found = work->joined = work->most = 0;
  context.sync();
#pragma unroll 1
  for (uint32_t r = context.thread; r < records.count; r += kComputeThreads) {
    const uint32_t* record = records.at(r);
    /* The first entry is there also where it has no meaning: loads that do not wait for each other. */
    const uint32_t bits = record[MPK_SAMPLE_HIGHEST], token = record[MPK_SAMPLE_HIGHEST_TOKEN], entries = record[MPK_SAMPLE_COUNT];
    const NoisyToken first = entry_of(record, 0);
    const float value = sampling::float_of(bits);
    const NoisyToken own = {sampling::key_of(value, token), value};
    if (token != MPK_SAMPLE_NO_TOKEN && own.beats(top)) top = own;
    if (entries != 0 && first.beats(best)) best = first;
    if (r < FrontierRoom::kCounts) work->counts[r] = static_cast<uint8_t>(entries);
    atomicMax(&work->most, entries);
  }
  top = best_of_block(context, top, work->warps[0]);
  best = best_of_block(context, best, work->warps[1]);
  /* The best beats all that come after it in this order. All records' first entries, then all second ones, and so on. */
  const uint32_t pairs = records.count * min(work->most, MPK_SAMPLE_FRONTIER);
#pragma unroll 1
  for (uint32_t i = context.thread; i < pairs; i += kComputeThreads) {
    const uint32_t e = i / records.count, r = i - e * records.count;
    const uint32_t* record = records.at(r);
    if (e >= (r < FrontierRoom::kCounts ? work->counts[r] : record[MPK_SAMPLE_COUNT])) continue;
    const NoisyToken entry = entry_of(record, e);
    if (entry.key < best.key) continue;
    const uint32_t place = atomicAdd(&work->found, 1u);
    if (place < size) room[place] = entry;
  }
  if (context.sync() != MPK_OK) return 0.0f;
  const uint32_t found = work->found < size ? work->found : size;
  if (work->found > size) context.fail(MPK_ABORT_KERNEL);
  /* An entry that none beats stays. Its place is the number of entries before it that stay: those are found first. */
#pragma unroll 1
  for (uint32_t i = context.thread; i < found; i += kComputeThreads) {
    const NoisyToken own = room[i];
    bool stays = true;
#pragma unroll 1
    for (uint32_t j = 0; j < found && stays; j += 4) {
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        const NoisyToken other = room[min(j + u, found - 1)];
        if (other.key > own.key && other.noisy >= own.noisy) stays = false;
      }
    }
    if (!stays) continue;
    const uint32_t place = atomicAdd(&work->joined, 1u);
    if (place < MPK_SAMPLE_FRONTIER) work->frontier[place] = own;
  }
  if (context.sync() != MPK_OK) return 0.0f;
  if (work->joined > MPK_SAMPLE_FRONTIER) context.fail(MPK_ABORT_KERNEL);
  const uint32_t joined = work->joined < MPK_SAMPLE_FRONTIER ? work->joined : MPK_SAMPLE_FRONTIER;
  NoisyToken own = {0, 0.0f};
  uint32_t place = 0;
  if (context.thread < joined) {
    own = work->frontier[context.thread];
    for (uint32_t j = 0; j < joined; ++j) place += work->frontier[j].key > own.key;
  }
  context.sync();
  if (context.thread < joined) work->frontier[place] = own;
  context.sync();
  return sampling::value_of_key(top.key);
}

}  // namespace gpu
}  // namespace mpk
