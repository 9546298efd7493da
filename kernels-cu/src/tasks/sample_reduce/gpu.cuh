/* Chooses the token of one sample from the results of all ranks. */
#pragma once

#include "tasks/sample_partial/gpu_few.cuh"
#include "tasks/sample_reduce/params.h"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace gpu {

struct SampleReduce : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_reduce_params>().kept;
    const uint32_t sample = static_cast<uint32_t>(context.slot->task.args[3]);
    const SampleRow row(context, sample, kept);
    if (row.mode == sampling::kImpossible) context.fail(MPK_ABORT_KERNEL);
    const int code = context.wait_inputs(/*loads_under_way=*/false, /*always=*/true);
    if (code != MPK_OK || sample >= context.slot->num_samples) return code;

    Work* work = reinterpret_cast<Work*>(context.work());
    uint32_t token = MPK_SAMPLE_NO_TOKEN;
    if (row.mode == sampling::kList) token = from_list(context, row, work);
    else if (row.mode == sampling::kFrontier) token = from_frontier(context, row, work);
    else token = from_records(context, row, work);
    if (context.thread == 0) {
      if (token == MPK_SAMPLE_NO_TOKEN) context.fail(MPK_ABORT_KERNEL);
      *reinterpret_cast<uint32_t*>(context.output(0).addr) = token;
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kMostListed = 1024; /* MOST_LISTED in sample_family.rs */
  /* Entries that are added up at a time, usually all that there are. A thread adds one entry of each kShares-th record. */
  static constexpr uint32_t kEntries = 16, kShares = kComputeThreads / kEntries;
  struct Work {
    union {
      struct {
        uint64_t keys[kMostListed], held[ListedKeys::kRoom];
        FewRoom few;
      };
      struct {
        uint64_t before[kComputeWarps][MPK_SAMPLE_FRONTIER];
        uint32_t tokens[kComputeWarps][MPK_SAMPLE_FRONTIER];
      };
    };
    uint64_t sums[kComputeWarps];
    NoisyToken warps[kComputeWarps];
  };
  static_assert(sizeof(Work) <= kWorkBytes, "the work area is too small");

  /* Ranks whose batch states differ must not go on. */
  static __device__ __forceinline__ void compare_hash(Context& context, const uint4& head) {
    if (head.w != sampling::folded(context.slot->batch_hash)) context.fail(MPK_ABORT_DIVERGED);
  }

  /* The highest logit, or the highest noisy value. */
  static __device__ __forceinline__ uint32_t from_records(Context& context, const SampleRow& row, Work* work) {
    const SampleRecords records(context.input(0), 0);
    NoisyToken best = {0, 0.0f};
#pragma unroll 1
    for (uint32_t r = context.thread; r < records.count; r += kComputeThreads) {
      const uint4 head = head_of(records.at(r)), entry = entry_words(records.at(r), 0);
      compare_hash(context, head);
      NoisyToken own = {highest_of(head), sampling::float_of(head.x)};
      if (row.mode == sampling::kDraw) own = head.z != 0 ? entry_of(entry) : NoisyToken{0, 0.0f};
      if (own.beats(best)) best = own;
    }
    best = best_of_team(context, Team(context), best, work->warps);
    return best.key == 0 ? MPK_SAMPLE_NO_TOKEN : sampling::token_of_key(best.key);
  }

  /* The last entry of the frontier that the filters keep. The token of the first warp counts. No load waits for another one, unless
   * the frontier is long. */
  static __device__ __forceinline__ uint32_t from_frontier(Context& context, const SampleRow& row, Work* work) {
    const SampleRecords records(context.input(0), 0), weighed(context.input(1), 0);
    /* All records of sample_weigh have the same entries. */
    static_assert(MPK_WEIGH_COUNT == 0 && MPK_WEIGH_HIGHEST == 1 && MPK_WEIGH_SUM == 2 && MPK_WEIGH_ENTRIES == 4 && MPK_WEIGH_WORDS % 4 == 0, "16 bytes of head");
    const uint4 common = *reinterpret_cast<const uint4*>(weighed.first);
    /* A lane of the first warp has the entries lane and lane + 32: logit and token. */
    uint32_t logit[2] = {}, token[2] = {};
    if (context.warp == 0) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t* entry = weighed.first + MPK_WEIGH_ENTRIES + (context.lane + 32 * half) * MPK_WEIGH_ENTRY_WORDS;
        logit[half] = entry[0];
        token[half] = entry[2];
      }
    }
    uint64_t all = 0;
    uint4 head = {};
    const bool has_record = context.thread < records.count;
    if (has_record) {
      head = head_of(records.at(context.thread));
      all = sum_at(weighed.at(context.thread), MPK_WEIGH_SUM);
    }
    uint32_t count = kEntries;
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kEntries) {
      const uint32_t e = first + context.thread % kEntries, share = context.thread / kEntries;
      uint64_t before = 0;
      uint32_t tokens = 0;
      constexpr uint32_t kTogether = 4;
#pragma unroll 1
      for (uint32_t from = share; from < weighed.count; from += kTogether * kShares) {
#pragma unroll
        for (uint32_t u = 0; u < kTogether; ++u) {
          if (from + u * kShares >= weighed.count) continue;
          const uint32_t* entry = weighed.at(from + u * kShares) + MPK_WEIGH_ENTRIES + e * MPK_WEIGH_ENTRY_WORDS;
          tokens += entry[3];
          before += sum_at(entry, 4);
        }
      }
      /* A warp has two shares. */
      static_assert(2 * kEntries == 32, "a warp's entries");
      before += __shfl_xor_sync(0xFFFFFFFFu, before, kEntries);
      tokens += __shfl_xor_sync(0xFFFFFFFFu, tokens, kEntries);
      if (context.lane < kEntries) {
        work->before[context.warp][e] = before;
        work->tokens[context.warp][e] = tokens;
      }
      if (first == 0) count = common.x;
    }
    if (has_record) compare_hash(context, head);
#pragma unroll 1
    for (uint32_t r = context.thread + kComputeThreads; r < records.count; r += kComputeThreads) {
      compare_hash(context, head_of(records.at(r)));
      all += sum_at(weighed.at(r), MPK_WEIGH_SUM);
    }
    all = sum_of_warp(all);
    if (context.lane == 0) work->sums[context.warp] = all;
    context.sync();
    if (context.warp != 0) return 0;
    all = 0;
    for (uint32_t w = 0; w < kComputeWarps; ++w) all += work->sums[w];
    const float highest = sampling::float_of(common.y);
    /* The last entry has the highest noisy value, so it is drawn unless a filter drops it. */
#pragma unroll
    for (uint32_t half = 2; half-- > 0;) {
      if (32 * half >= count) continue;
      const uint32_t e = context.lane + 32 * half;
      bool stays = e < count;
      if (stays) {
        uint64_t before = 0;
        uint32_t tokens = 0;
#pragma unroll
        for (uint32_t w = 0; w < kComputeWarps; ++w) {
          before += work->before[w][e];
          tokens += work->tokens[w][e];
        }
        stays = (row.sampling.top_k == 0 || tokens < row.sampling.top_k) && sampling::passes_min_p(sampling::float_of(logit[half]), highest, row.sampling) &&
                sampling::passes_top_p(before, all, row.sampling);
      }
      const uint32_t kept = __ballot_sync(0xFFFFFFFFu, stays);
      if (kept != 0) return __shfl_sync(0xFFFFFFFFu, token[half], 31 - __clz(static_cast<int>(kept)));
    }
    return __shfl_sync(0xFFFFFFFFu, token[0], 0); /* the highest logit, which every filter keeps */
  }

  static __device__ __forceinline__ uint64_t sum_at(const uint32_t* words, uint32_t i) {
    const uint2 sum = *reinterpret_cast<const uint2*>(words + i);
    return static_cast<uint64_t>(sum.y) << 32 | sum.x;
  }

  /* Chooses from the top_k highest logits of all lists. All threads get the same token. */
  static __device__ __forceinline__ uint32_t from_list(Context& context, const SampleRow& row, Work* work) {
    const mpk_sampling& s = row.sampling;
    const ListedKeys listed(context.input(2), s.top_k, work->held);
    uint64_t* keys = work->keys;
    uint32_t size = 2; /* the number of sorted entries */
    while (size < s.top_k) size *= 2;
    for (uint32_t i = context.thread; i < size; i += kComputeThreads) keys[i] = 0;
    const SampleRecords records(context.input(0), 0);
    uint4 head = {};
    if (context.thread < records.count) head = head_of(records.at(context.thread));
    const uint64_t highest_key = listed.bring(context.thread);
    if (context.thread < records.count) compare_hash(context, head);
#pragma unroll 1
    for (uint32_t r = context.thread + kComputeThreads; r < records.count; r += kComputeThreads) compare_hash(context, head_of(records.at(r)));
    context.sync(); /* `keys` is cleared */
    const Team team(context);
    if (!select_few(context, team, listed.count, s.top_k, highest_key, &work->few, listed, own_keys(team, listed.count, listed), [&](uint32_t i, uint64_t key) { keys[i] = key; }).in_order)
      sort(context, keys, size);

    const uint64_t top = keys[0];
    const float highest = sampling::value_of_key(top);
    const uint32_t each = (size + kComputeThreads - 1) / kComputeThreads, begin = context.thread * each;
    uint64_t own = 0;
#pragma unroll 1
    for (uint32_t i = begin; i < begin + each && i < size; ++i) own += weight_of(keys[i], highest, s);
    uint64_t through = own;
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
      const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, through, d);
      if (context.lane >= d) through += other;
    }
    if (context.lane == 31) work->sums[context.warp] = through;
    context.sync();
    uint64_t before = through - own, all = 0;
    for (uint32_t w = 0; w < kComputeWarps; ++w) {
      if (w < context.warp) before += work->sums[w];
      all += work->sums[w];
    }
    NoisyToken best = {0, 0.0f};
#pragma unroll 1
    for (uint32_t i = begin; i < begin + each && i < size; ++i) {
      const uint64_t key = keys[i];
      if (key == 0 || !sampling::passes_min_p(sampling::value_of_key(key), highest, s)) break;
      if (i > 0 && !sampling::passes_top_p(before, all, s)) break;
      const uint32_t token = sampling::token_of_key(key);
      const NoisyToken candidate = {key, sampling::value_of_key(key) + sampling::noise(s.seed, row.position, token)};
      if (candidate.beats(best)) best = candidate;
      before += weight_of(key, highest, s);
    }
    best = best_of_team(context, team, best, work->warps);
    return best.key == 0 ? MPK_SAMPLE_NO_TOKEN : sampling::token_of_key(best.key);
  }

  static __device__ __forceinline__ uint32_t weight_of(uint64_t key, float highest, const mpk_sampling& s) {
    if (key == 0) return 0;
    const float value = sampling::value_of_key(key);
    return sampling::passes_min_p(value, highest, s) ? sampling::weight(value, highest) : 0;
  }

  /* Bitonic sort, the highest first. `size` is a power of two. */
  static __device__ __forceinline__ void sort(Context& context, uint64_t* keys, uint32_t size) {
#pragma unroll 1
    for (uint32_t run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (uint32_t step = run / 2; step > 0; step /= 2) {
#pragma unroll 1
        for (uint32_t i = context.thread; i < size / 2; i += kComputeThreads) {
          const uint32_t low = 2 * i - (i & (step - 1)), high = low + step; /* step is a power of two */
          const uint64_t a = keys[low], b = keys[high];
          if (((low & run) == 0) == (a < b)) {
            keys[low] = b;
            keys[high] = a;
          }
        }
        context.sync();
      }
    }
  }
};

}  // namespace gpu
}  // namespace mpk
