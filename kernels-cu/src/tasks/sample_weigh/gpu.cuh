/* Computes, for each entry of the sample's frontier, the number and the weight of the part's tokens before it. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace gpu {

struct SampleWeigh : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_weigh_params>().kept;
    const SampleRow row(context, static_cast<uint32_t>(context.slot->task.args[3]), kept);
    const SampleColumns columns(context, row, 1);
    if (columns.count > kColumns) context.fail(MPK_ABORT_KERNEL);
    int code = context.wait_inputs();
    if (code != MPK_OK || row.mode != sampling::kFrontier) return code;

    Work* work = reinterpret_cast<Work*>(context.work());
    const float highest = join_frontiers(context, SampleRecords(context.input(0)), work);
    const uint32_t count = work->joined;
    /* Each thread reads only what it wrote itself, until the sums of the warps are added. */
    columns.bring(work->columns.value, context.thread);
    uint64_t all = 0;
#pragma unroll 2
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float value = columns.value(work->columns.value[i], i, row.sampling);
      const uint32_t weight = sampling::weight(value, highest);
      if (sampling::passes_min_p(value, highest, row.sampling)) all += weight;
      work->columns.value[i] = value;
      work->columns.weight[i] = weight;
    }
    all = sum_of_warp(all);
    if (context.lane == 0) work->all[context.warp] = all;
    /* This many entries at a time. */
    constexpr uint32_t kTogether = 4;
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kTogether) {
      uint64_t key[kTogether], before[kTogether] = {};
      uint32_t tokens[kTogether] = {};
#pragma unroll
      for (uint32_t e = 0; e < kTogether; ++e) key[e] = first + e < count ? work->frontier[first + e].key : ~uint64_t{0};
#pragma unroll 2
      for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
        const uint64_t own = sampling::key_of(work->columns.value[i], columns.first_token + i);
        const uint32_t weight = work->columns.weight[i];
#pragma unroll
        for (uint32_t e = 0; e < kTogether; ++e) {
          if (own <= key[e]) continue;
          before[e] += weight;
          ++tokens[e];
        }
      }
#pragma unroll
      for (uint32_t e = 0; e < kTogether; ++e) {
        if (first + e >= count) break;
        before[e] = sum_of_warp(before[e]);
        tokens[e] = warp_sum(tokens[e]);
        if (context.lane == 0) {
          work->before[first + e][context.warp] = before[e];
          work->tokens[first + e][context.warp] = tokens[e];
        }
      }
    }
    code = context.sync();
    if (code != MPK_OK) return code;
    uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr);
    if (context.thread < count) {
      uint64_t before = 0;
      uint32_t tokens = 0;
#pragma unroll
      for (uint32_t w = 0; w < kComputeWarps; ++w) {
        before += work->before[context.thread][w];
        tokens += work->tokens[context.thread][w];
      }
      const NoisyToken own = work->frontier[context.thread];
      uint32_t* entry = record + MPK_WEIGH_ENTRIES + context.thread * MPK_WEIGH_ENTRY_WORDS;
      entry[0] = sampling::bits_of(sampling::value_of_key(own.key));
      entry[1] = sampling::bits_of(own.noisy);
      entry[2] = sampling::token_of_key(own.key);
      entry[3] = tokens;
      entry[4] = static_cast<uint32_t>(before);
      entry[5] = static_cast<uint32_t>(before >> 32);
    }
    if (context.thread == kComputeThreads - 1) {
      uint64_t sum = 0;
#pragma unroll
      for (uint32_t w = 0; w < kComputeWarps; ++w) sum += work->all[w];
      record[MPK_WEIGH_COUNT] = count;
      record[MPK_WEIGH_HIGHEST] = sampling::bits_of(highest);
      record[MPK_WEIGH_SUM] = static_cast<uint32_t>(sum);
      record[MPK_WEIGH_SUM + 1] = static_cast<uint32_t>(sum >> 32);
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kColumns = 7168; /* MOST_COLUMNS in sample_family.rs */
  /* Entries of all parts that the entry with the highest noisy value does not beat; usually a few dozen. */
  static constexpr uint32_t kEntries = 3584;
  static constexpr uint32_t kCounts = 1024;
  struct Columns {
    float value[kColumns];
    uint32_t weight[kColumns];
  };
  struct Work {
    union {
      Columns columns;
      NoisyToken entries[kEntries]; /* used before the columns */
    };
    NoisyToken frontier[MPK_SAMPLE_FRONTIER];
    NoisyToken warps[2][kComputeWarps];
    uint64_t all[kComputeWarps], before[MPK_SAMPLE_FRONTIER][kComputeWarps];
    uint32_t tokens[MPK_SAMPLE_FRONTIER][kComputeWarps];
    uint32_t found, joined, most; /* most: the most entries of a record */
    uint8_t counts[kCounts];      /* of the first records */
  };
  static_assert(MPK_SAMPLE_FRONTIER <= 255, "a count is a byte");
  static_assert(sizeof(NoisyToken) == 16 && sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  /* Writes the frontier of all parts' entries to work->frontier, in order. Returns the sample's highest logit. */
  static __device__ __forceinline__ float join_frontiers(Context& context, const SampleRecords& records, Work* work) {
    NoisyToken best = {0, 0.0f}, top = {0, 0.0f};
    if (context.thread == 0) work->found = work->joined = work->most = 0;
    context.sync();
#pragma unroll 1
    for (uint32_t r = context.thread; r < records.count; r += kComputeThreads) {
      const uint32_t* record = records.at(r);
      /* The first entry is loaded even if it has no meaning, so that the loads do not wait for each other. */
      const uint32_t bits = record[MPK_SAMPLE_HIGHEST], token = record[MPK_SAMPLE_HIGHEST_TOKEN], entries = record[MPK_SAMPLE_COUNT];
      const NoisyToken first = entry_of(record, 0);
      const float value = sampling::float_of(bits);
      const NoisyToken own = {sampling::key_of(value, token), value};
      if (token != MPK_SAMPLE_NO_TOKEN && own.beats(top)) top = own;
      if (entries != 0 && first.beats(best)) best = first;
      if (r < kCounts) work->counts[r] = static_cast<uint8_t>(entries);
      atomicMax(&work->most, entries);
    }
    top = best_of_block(context, top, work->warps[0]);
    best = best_of_block(context, best, work->warps[1]);
    /* The best entry beats all that come after it in this order: first all records' first entries, then all second entries, and so on. */
    const uint32_t pairs = records.count * min(work->most, MPK_SAMPLE_FRONTIER);
#pragma unroll 1
    for (uint32_t i = context.thread; i < pairs; i += kComputeThreads) {
      const uint32_t e = i / records.count, r = i - e * records.count;
      const uint32_t* record = records.at(r);
      if (e >= (r < kCounts ? work->counts[r] : record[MPK_SAMPLE_COUNT])) continue;
      const NoisyToken entry = entry_of(record, e);
      if (entry.key < best.key) continue;
      const uint32_t place = atomicAdd(&work->found, 1u);
      if (place < kEntries) work->entries[place] = entry;
    }
    if (context.sync() != MPK_OK) return 0.0f;
    const uint32_t found = work->found < kEntries ? work->found : kEntries;
    if (work->found > kEntries) context.fail(MPK_ABORT_KERNEL);
    /* An entry that no other beats stays. Its index is the number of such entries before it, so these are found first. */
#pragma unroll 1
    for (uint32_t i = context.thread; i < found; i += kComputeThreads) {
      const NoisyToken own = work->entries[i];
      bool stays = true;
#pragma unroll 1
      for (uint32_t j = 0; j < found && stays; j += 4) {
#pragma unroll
        for (uint32_t u = 0; u < 4; ++u) {
          const NoisyToken other = work->entries[min(j + u, found - 1)];
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
};

}  // namespace gpu
}  // namespace mpk
