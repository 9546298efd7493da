/* Computes, for each entry of the frontiers of some samples, the number and the weight of the part's tokens before it. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace gpu {

struct SampleWeigh : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_weigh_params>().kept;
    const uint32_t first = static_cast<uint32_t>(context.slot->task.args[3]);
    const uint32_t samples = samples_of(context, first, static_cast<uint32_t>(context.slot->task.args[4]));
    const SampleColumns columns(context);
    /* Each warp joins the frontiers of one sample, so that many are taken at a time. */
    SampleRow joined(context, context.warp < samples ? first + context.warp : kNoSample, kept);
    SampleRow row(context, first, kept);
    if (columns.count > SampleColumns::kMost) context.fail(MPK_ABORT_KERNEL);
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;

    Work* work = reinterpret_cast<Work*>(context.work());
    uint32_t turn = 0;
#pragma unroll 1
    for (uint32_t begin = 0; begin < samples; begin += kComputeWarps) {
      const uint32_t here = min(samples - begin, kComputeWarps);
      if (begin != 0) {
        context.sync(); /* the sums have been read */
        joined = SampleRow(context, context.warp < here ? first + begin + context.warp : kNoSample, kept);
      }
      columns.bring(work->value, context, context.input(1), begin);
      if (joined.mode == sampling::kFrontier) join_frontiers(context, SampleRecords(context.input(0), begin + context.warp), work);
      code = context.sync();
      if (code != MPK_OK) return code;
#pragma unroll 1
      for (uint32_t i = 0; i < here; ++i) {
        const uint32_t sample = begin + i;
        const SampleRow next(context, first + sample + 1, kept); /* not needed yet: its loads are under way */
        SampleColumns::arrive();
        if (i + 1 < here) columns.bring(i % 2 == 0 ? work->other.value : work->value, context, context.input(1), sample + 1);
        if (row.mode == sampling::kFrontier) {
          const Pass pass = {columns, row, columns.counts_of(context.input(2), row), i % 2 == 0 ? work->value : work->other.value, work->joined[i]};
          uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr) + static_cast<uint64_t>(sample) * context.output(0).strides[2];
          code = one_sample(context, pass, work->other.sums[turn], record);
          if (code != MPK_OK) return code;
          turn ^= 1;
        }
        row = next;
      }
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kNoSample = 0xFFFFFFFFu;
  /* Entries of the records that a lane loads at a time, and room for those that may be in the frontier. */
  static constexpr uint32_t kTogether = 4, kList = MPK_SAMPLE_FRONTIER + 32 * kTogether;
  struct Joined {
    uint32_t count;
    float highest;
    NoisyToken frontier[MPK_SAMPLE_FRONTIER]; /* the lowest logit first */
  };
  struct Sums {
    uint64_t all[kComputeWarps], before[MPK_SAMPLE_FRONTIER][kComputeWarps];
    uint32_t tokens[MPK_SAMPLE_FRONTIER][kComputeWarps];
  };
  struct Work {
    float value[SampleColumns::kMost];
    union {
      struct {
        float value[SampleColumns::kMost];
        Sums sums[2];
      } other;
      NoisyToken lists[kComputeWarps][kList]; /* while frontiers are joined */
    };
    Joined joined[kComputeWarps];
  };
  static_assert(sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  /* A warp: writes the frontier of all parts' entries of a sample. */
  static __device__ __forceinline__ void join_frontiers(Context& context, const SampleRecords& records, Work* work) {
    const uint32_t lane = context.lane;
    uint64_t top = 0;
    NoisyToken best = {0, 0.0f};
    uint32_t most = 0;
#pragma unroll 2
    for (uint32_t r = lane; r < records.count; r += 32) {
      const uint32_t* record = records.at(r);
      /* The first entry is loaded even if it has no meaning, so that the loads do not wait for each other. */
      const uint4 head = head_of(record), words = entry_words(record, 0);
      const uint64_t highest = highest_of(head);
      const NoisyToken entry = entry_of(words);
      if (highest > top) top = highest;
      if (head.z != 0 && entry.beats(best)) best = entry;
      most = max(most, head.z);
    }
    top = highest_of_warp(top);
    best = best_of_warp(best);
    most = min(warp_maximum(most), MPK_SAMPLE_FRONTIER);

    /* The best entry beats all that come after it in this order. */
    NoisyToken* list = work->lists[context.warp];
    Joined& joined = work->joined[context.warp];
    const uint32_t pairs = records.count * most;
    uint32_t held = 0, count = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < pairs; from += 32 * kTogether) {
      uint4 words[kTogether];
      bool takes[kTogether];
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const uint32_t i = min(from + u * 32 + lane, pairs - 1), e = quotient(i, records.count);
        const uint32_t* record = records.at(i - e * records.count);
        takes[u] = from + u * 32 + lane < pairs && e < record[MPK_SAMPLE_COUNT];
        words[u] = entry_words(record, e);
      }
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const NoisyToken entry = entry_of(words[u]);
        const bool taken = takes[u] && entry.key >= best.key;
        const uint32_t all = __ballot_sync(0xFFFFFFFFu, taken);
        if (taken) list[held + __popc(all & ((1u << lane) - 1))] = entry;
        held += __popc(all);
      }
      __syncwarp();
      if (from + 32 * kTogether < pairs && held + 32 * kTogether <= kList) continue;
      /* Only what is in the frontier of these can be in that of all. */
      count = frontier_of(held, MPK_SAMPLE_FRONTIER + 1, top, lane, [&](uint32_t i) { return list[i]; },
                          [&](uint32_t i, const NoisyToken& entry) {
                            if (lane == 0 && i < MPK_SAMPLE_FRONTIER) joined.frontier[i] = entry;
                          });
      __syncwarp();
      if (count > MPK_SAMPLE_FRONTIER) {
        context.fail(MPK_ABORT_KERNEL);
        break;
      }
      for (uint32_t i = lane; i < count; i += 32) list[i] = joined.frontier[i];
      held = count;
      __syncwarp();
    }
    if (lane == 0) {
      joined.count = min(count, MPK_SAMPLE_FRONTIER);
      joined.highest = sampling::value_of_key(top);
    }
  }

  /* The columns of a sample, whose logits are in `value`, and the sample's frontier. */
  struct Pass {
    const SampleColumns& columns;
    const SampleRow& row;
    const uint32_t* counts;
    float* value;
    const Joined& joined;

    /* Adds up what is before each of `Entries` entries from `first` on. An entry's index counts from the highest logit. The first
     * pass also processes the logits, and adds what min-p keeps to `all`. */
    template <uint32_t Entries>
    __device__ __forceinline__ void add(const Context& context, uint32_t first, uint64_t& all, Sums& sums) const {
      uint64_t key[Entries], before[Entries] = {};
      uint32_t tokens[Entries] = {};
#pragma unroll
      for (uint32_t e = 0; e < Entries; ++e) key[e] = first + e < joined.count ? joined.frontier[joined.count - 1 - first - e].key : ~uint64_t{0};
      const float highest = joined.highest;
#pragma unroll 2
      for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
        float own = value[i];
        if (first == 0) own = value[i] = sampling::processed(own, counts == nullptr ? 0 : counts[i], row.sampling);
        const uint32_t weight = sampling::weight(own, highest);
        if (first == 0 && sampling::passes_min_p(own, highest, row.sampling)) all += weight;
        const uint64_t own_key = sampling::key_of(own, columns.first_token + i);
#pragma unroll
        for (uint32_t e = 0; e < Entries; ++e) {
          if (own_key <= key[e]) continue;
          before[e] += weight;
          ++tokens[e];
        }
      }
#pragma unroll
      for (uint32_t e = 0; e < Entries; ++e) {
        if (first + e >= joined.count) break;
        before[e] = sum_of_warp(before[e]);
        tokens[e] = warp_sum(tokens[e]);
        if (context.lane == 0) {
          sums.before[first + e][context.warp] = before[e];
          sums.tokens[first + e][context.warp] = tokens[e];
        }
      }
    }
  };

  static __device__ __forceinline__ int one_sample(Context& context, const Pass& pass, Sums& sums, uint32_t* record) {
    const Joined& joined = pass.joined;
    const uint32_t count = joined.count;
    uint64_t all = 0;
    /* With trained weights one or two entries are usual; with flat logits about ten. */
    if (count <= 2) {
      pass.add<2>(context, 0, all, sums);
    } else {
#pragma unroll 1
      for (uint32_t first = 0; first < count; first += 6) pass.add<6>(context, first, all, sums);
    }
    all = sum_of_warp(all);
    if (context.lane == 0) sums.all[context.warp] = all;
    const int code = context.sync();
    if (code != MPK_OK) return code;
    if (context.thread < count) {
      uint64_t before = 0;
      uint32_t tokens = 0;
#pragma unroll
      for (uint32_t w = 0; w < kComputeWarps; ++w) {
        before += sums.before[context.thread][w];
        tokens += sums.tokens[context.thread][w];
      }
      const NoisyToken own = joined.frontier[count - 1 - context.thread];
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
      for (uint32_t w = 0; w < kComputeWarps; ++w) sum += sums.all[w];
      record[MPK_WEIGH_COUNT] = count;
      record[MPK_WEIGH_HIGHEST] = sampling::bits_of(joined.highest);
      record[MPK_WEIGH_SUM] = static_cast<uint32_t>(sum);
      record[MPK_WEIGH_SUM + 1] = static_cast<uint32_t>(sum >> 32);
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
