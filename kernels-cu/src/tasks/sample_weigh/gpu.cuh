/* Computes, for each entry of the frontiers of some samples, the number and the weight of the part's tokens before it. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"
#include "tasks/sample_weigh/gpu_join.cuh"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace gpu {

struct SampleWeigh : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_weigh_params>().kept;
    const uint32_t first = static_cast<uint32_t>(context.slot->task.args[3]);
    const uint32_t samples = samples_of(context, first, static_cast<uint32_t>(context.slot->task.args[4]));
    const SampleColumns columns(context);
    const Team team = columns.team(context, samples);
    SampleRow row(context, first + team.index, kept);
    if (columns.count > SampleColumns::kMost) context.fail(MPK_ABORT_KERNEL);
    const int code = context.wait_inputs();
    if (code != MPK_OK || samples == 0) return code;

    Work* work = reinterpret_cast<Work*>(context.work());
    float* value = SampleColumns::share(work->value, team);
#pragma unroll 1
    for (uint32_t sample = team.index; sample < samples; sample += team.count()) {
      const bool weighs = row.mode == sampling::kFrontier, more = sample + team.count() < samples;
      SampleRow next;
      if (more) next.load(context, first + sample + team.count());
      Joined& joined = work->joined[team.index];
      /* The records are needed first. */
      if (weighs)
        join_frontiers(context, team, SampleRecords(context.input(0), sample), work->join, joined, [&] { columns.bring(value, team, context.input(1), sample); });
      SampleColumns::arrive();
      uint64_t all = 0;
      /* A frontier of one entry is the highest logit, which all filters keep. */
      if (weighs && joined.count > 1) all = one_sample(context, team, {columns, row, columns.counts_of(context.input(2), row), value, joined}, work);
      if (weighs) {
        if (context.lane == 0) work->all[context.warp] = all;
        team.sync();
        uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr) + static_cast<uint64_t>(sample) * context.output(0).strides[2];
        store(team, joined, work, record);
      }
      if (!more) break;
      next.resolve(kept);
      row = next;
    }
    return MPK_OK;
  }

 private:
  /* What a warp adds up is next to what the team's other warps do. */
  struct Work {
    float value[SampleColumns::kRoom]; /* each team has its share */
    JoinRoom join;
    Joined joined[Team::kMost];
    uint64_t all[kComputeWarps], before[MPK_SAMPLE_FRONTIER][kComputeWarps];
    uint32_t tokens[MPK_SAMPLE_FRONTIER][kComputeWarps];
  };
  static_assert(sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  /* The columns of a sample, whose logits are in `value`, and the sample's frontier. */
  struct Pass {
    const SampleColumns& columns;
    const SampleRow& row;
    const uint32_t* counts;
    float* value;
    const Joined& joined;
  };

  /* A number of tokens and their weight, added up as one number: a thread has fewer than 2^16 tokens, and their weight is below 2^48. */
  static constexpr uint32_t kTokensFrom = 48;
  static_assert(SampleColumns::kMost < 1u << 13, "the weight of a part's tokens is below 2^44");

  /* Adds up what is before each of `Entries` entries from `first` on. An entry's index counts from the highest logit. Returns the
   * weight of the thread's tokens that min-p keeps. What fills up the last four columns weighs nothing, unless all logits are -infinity:
   * then the first token is drawn whatever the sum is. */
  template <uint32_t Entries>
  static __device__ __forceinline__ uint64_t add(const Context& context, const Team& team, const Pass& pass, uint32_t first, Work* work) {
    /* The tokens before an entry are before all that follow it, too, and hardly any are before the first few of many. */
    constexpr uint32_t kRare = Entries > 6 ? Entries / 2 : 0;
    const Joined& joined = pass.joined;
    /* If there are fewer entries, they are the last ones. */
    const uint32_t fill = first + Entries > joined.count ? first + Entries - joined.count : 0;
    uint64_t key[Entries], before[Entries] = {}, all = 0;
#pragma unroll
    for (uint32_t e = 0; e < Entries; ++e) key[e] = e >= fill ? joined.frontier[joined.count - 1 - (first + e - fill)].key : ~uint64_t{0};
    const float highest = joined.highest;
#pragma unroll 1
    for (uint32_t i = 4 * team.thread; i < pass.columns.count; i += 4 * team.threads()) {
      const float4 four = *reinterpret_cast<const float4*>(pass.value + i);
      const float own[4] = {four.x, four.y, four.z, four.w};
      uint64_t own_key[4], token[4];
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        const uint64_t weight = sampling::weight(own[u], highest);
        all += sampling::passes_min_p(own[u], highest, pass.row.sampling) ? weight : 0;
        own_key[u] = sampling::key_of(own[u], pass.columns.first_token + i + u);
        token[u] = weight | uint64_t{1} << kTokensFrom;
      }
#pragma unroll
      for (uint32_t e = kRare; e < Entries; ++e)
#pragma unroll
        for (uint32_t u = 0; u < 4; ++u)
          if (own_key[u] > key[e]) before[e] += token[u];
      if constexpr (kRare != 0) {
#pragma unroll
        for (uint32_t u = 0; u < 4; ++u) {
          if (own_key[u] <= key[kRare - 1]) continue;
#pragma unroll
          for (uint32_t e = 0; e < kRare; ++e)
            if (own_key[u] > key[e]) before[e] += token[u];
        }
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < Entries; ++e) {
      if (e < fill) continue;
      const uint64_t weight = sum_of_warp(before[e] & ((uint64_t{1} << kTokensFrom) - 1));
      const uint32_t tokens = warp_sum(static_cast<uint32_t>(before[e] >> kTokensFrom));
      if (context.lane == 0) {
        work->before[first + e - fill][context.warp] = weight;
        work->tokens[first + e - fill][context.warp] = tokens;
      }
    }
    return all;
  }

  /* Returns the weight of the warp's tokens that min-p keeps. */
  static __device__ __forceinline__ uint64_t one_sample(const Context& context, const Team& team, const Pass& pass, Work* work) {
    /* With trained weights a few entries are usual; with flat logits about ten. */
    pass.columns.process(pass.value, team, pass.counts, pass.row.sampling, [](uint32_t, float) {});
    uint64_t all = 0;
    if (pass.joined.count <= 2) all = add<2>(context, team, pass, 0, work);
    else if (pass.joined.count <= 6) all = add<6>(context, team, pass, 0, work);
    else all = add<kTogether>(context, team, pass, 0, work);
#pragma unroll 1
    for (uint32_t first = kTogether; first < pass.joined.count; first += kTogether) add<kTogether>(context, team, pass, first, work);
    return sum_of_warp(all);
  }
  static constexpr uint32_t kTogether = 12;

  /* Adds up what the team's warps have found. */
  static __device__ __forceinline__ void store(const Team& team, const Joined& joined, const Work* work, uint32_t* record) {
    const uint32_t count = joined.count, begin = team.first_warp(), end = begin + team.warps();
    if (team.thread < count) {
      uint64_t before = 0;
      uint32_t tokens = 0;
#pragma unroll 2
      for (uint32_t w = begin; w < end && count > 1; ++w) {
        before += work->before[team.thread][w];
        tokens += work->tokens[team.thread][w];
      }
      const NoisyToken own = joined.frontier[count - 1 - team.thread];
      uint32_t* entry = record + MPK_WEIGH_ENTRIES + team.thread * MPK_WEIGH_ENTRY_WORDS;
      entry[0] = sampling::bits_of(sampling::value_of_key(own.key));
      entry[1] = sampling::bits_of(own.noisy);
      entry[2] = sampling::token_of_key(own.key);
      entry[3] = tokens;
      entry[4] = static_cast<uint32_t>(before);
      entry[5] = static_cast<uint32_t>(before >> 32);
    }
    if (team.thread == team.threads() - 1) {
      uint64_t sum = 0;
#pragma unroll 2
      for (uint32_t w = begin; w < end; ++w) sum += work->all[w];
      record[MPK_WEIGH_COUNT] = count;
      record[MPK_WEIGH_HIGHEST] = sampling::bits_of(joined.highest);
      record[MPK_WEIGH_SUM] = static_cast<uint32_t>(sum);
      record[MPK_WEIGH_SUM + 1] = static_cast<uint32_t>(sum >> 32);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
