/* One part of a sample's logits: the highest logit, what of its tokens may be drawn, and about what they weigh. */
#pragma once

#include "tasks/sample_partial/gpu_bins.cuh"

namespace mpk {
namespace gpu {

struct SamplePartial : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_partial_params>().kept;
    const SampleRow row(context, static_cast<uint32_t>(context.slot->task.args[3]), kept);
    const SampleColumns columns(context, row, 0);
    if (row.mode == sampling::kImpossible || columns.count > kColumns) context.fail(MPK_ABORT_KERNEL);
    int code = context.wait_inputs();
    if (code != MPK_OK || row.mode == sampling::kOff) return code;

    Work* work = reinterpret_cast<Work*>(context.work());
    uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr);
    const mpk_sampling& s = row.sampling;
    NoisyToken top = {0, 0.0f};
    columns.bring(work->value, context.thread);
    work->bins[context.thread] = work->bins[context.thread + kComputeThreads] = 0;
    if (context.thread == 0) work->found = work->joined = work->missing = 0;
#pragma unroll 4
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float value = columns.value(work->value[i], i, s);
      const uint64_t key = sampling::key_of(value, columns.first_token + i);
      if (key > top.key) top = {key, value};
      work->value[i] = value;
    }
    top = best_of_block(context, top, work->warps[0]); /* also: the values are there */
    if (context.thread == 0) {
      const bool none = top.key == 0;
      record[MPK_SAMPLE_HIGHEST] = sampling::bits_of(none ? -INFINITY : sampling::value_of_key(top.key));
      record[MPK_SAMPLE_HIGHEST_TOKEN] = none ? MPK_SAMPLE_NO_TOKEN : sampling::token_of_key(top.key);
      record[MPK_SAMPLE_TOP_BIN] = static_cast<uint32_t>(bin_of(top.noisy));
      record[MPK_SAMPLE_HASH_LOW] = static_cast<uint32_t>(context.slot->batch_hash);
      record[MPK_SAMPLE_HASH_HIGH] = static_cast<uint32_t>(context.slot->batch_hash >> 32);
    }
    if (row.mode == sampling::kList) {
      uint32_t* list = reinterpret_cast<uint32_t*>(context.output(1).addr);
      const auto key_at = [&](uint32_t i) { return sampling::key_of(work->value[i], columns.first_token + i); };
      const uint32_t listed =
          select_keys(context, columns.count, s.top_k, &work->select, key_at, [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
      fill_list(context, list, listed, s.top_k);
    }
    uint32_t count = 0;
    if ((row.mode == sampling::kDraw || row.mode == sampling::kFrontier) && top.key != 0) {
      count = likely_frontier(context, row, columns, top, work, record);
      if (count == 0) count = whole_frontier(context, row, columns, top, work, record);
      if (row.mode == sampling::kFrontier) {
        uint32_t* masses = reinterpret_cast<uint32_t*>(context.output(2).addr);
        for (uint32_t b = context.thread; b < kBins; b += kComputeThreads) masses[b] = work->bins[b];
      }
    }
    if (context.thread == 0) record[MPK_SAMPLE_COUNT] = count;
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kColumns = 10240; /* MOST_COLUMNS in sample_family.rs */
  static constexpr uint32_t kEntries = 1024;
  /* So many tokens before a bin may be expected to have more noise than what is looked at in the bin. That none has happens
   * once in e^12 bins. */
  static constexpr float kSurely = 12.0f;
  struct Work {
    float value[kColumns];
    union {
      NoisyToken entries[kEntries];
      SelectRoom select;
    };
    uint32_t bins[kBins];      /* mass, or with top-k the number of tokens; by the bin's number modulo kBins */
    uint32_t threshold[kBins]; /* the highest bin first */
    NoisyToken frontier[MPK_SAMPLE_FRONTIER], warps[2][kComputeWarps];
    float warp_mass[kComputeWarps];
    uint32_t found, joined, missing;
  };
  static_assert(sizeof(NoisyToken) == 16 && sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  static __device__ __forceinline__ void store_entry(uint32_t* record, uint32_t i, const NoisyToken& own) {
    uint32_t* entry = record + MPK_SAMPLE_ENTRIES + i * MPK_SAMPLE_ENTRY_WORDS;
    entry[0] = sampling::bits_of(sampling::value_of_key(own.key));
    entry[1] = sampling::bits_of(own.noisy);
    entry[2] = sampling::token_of_key(own.key);
  }

  /* Weights by bins to work->bins, and the frontier to the record; 0 if what it looks at does not suffice. An entry has a higher
   * noisy value than all tokens before it. Those of higher bins with the mass m have one above ln(m / kSurely) almost surely, so
   * only tokens whose noise may reach that are looked at: of most, the random bits alone say that theirs does not. */
  static __device__ __forceinline__ uint32_t likely_frontier(Context& context, const SampleRow& row, const SampleColumns& columns, const NoisyToken& top, Work* work,
                                                             uint32_t* record) {
    const mpk_sampling& s = row.sampling;
    const int32_t top_bin = bin_of(top.noisy);
    const bool counts = s.top_k != 0;
#pragma unroll 2
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float value = work->value[i];
      const int32_t bin = bin_of(value);
      if (static_cast<uint32_t>(top_bin - bin) < kBins) atomicAdd(&work->bins[static_cast<uint32_t>(bin) % kBins], counts ? 1u : mass_of(value));
    }
    context.sync();
    const uint32_t mine = 2 * context.thread; /* and the next one */
    const auto sum_of = [&](uint32_t below) { return work->bins[(static_cast<uint32_t>(top_bin) - below) % kBins]; };
    const float unit = counts ? 1.0f : 1.0f / kMassUnit;
    const float first = static_cast<float>(sum_of(mine)) * unit * bin_scale(mine);
    const float second = static_cast<float>(sum_of(mine + 1)) * unit * bin_scale(mine + 1);
    const MassScan scan = scan_masses(context, first + second, work->warp_mass);
    work->threshold[mine] = threshold_of(mine, scan.before);
    work->threshold[mine + 1] = threshold_of(mine + 1, scan.before + first);
    context.sync();

    /* The highest logit's token beats what is below this whatever its noise: most of a trained model's. */
    const float bound = top.noisy + sampling::noise(s.seed, row.position, sampling::token_of_key(top.key));
#pragma unroll 2
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float value = work->value[i];
      if (value + sampling::kMostNoise < bound) continue;
      const uint32_t token = columns.first_token + i, below = min(static_cast<uint32_t>(top_bin - bin_of(value)), kBins - 1);
      const uint32_t random = sampling::random_word(s.seed, row.position, token);
      if (random > work->threshold[below]) continue;
      const uint32_t place = atomicAdd(&work->found, 1u);
      if (place < kEntries) work->entries[place] = {sampling::key_of(value, token), value + sampling::gumbel(random)};
    }
    context.sync();
    const uint32_t found = work->found;
    if (found > kEntries) return 0;
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
    context.sync();
    const uint32_t joined = work->joined;
    if (joined > MPK_SAMPLE_FRONTIER || joined == 0) return 0;
    /* Whether an entry of a higher bin beats all tokens that were not looked at. */
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
    for (uint32_t e = 0; e < joined; ++e) {
      const uint32_t below = static_cast<uint32_t>(top_bin - bin_of(sampling::value_of_key(work->frontier[e].key)));
#pragma unroll
      for (uint32_t b = 0; b < 2; ++b)
        if (below < mine + b) best[b] = fmaxf(best[b], work->frontier[e].noisy);
    }
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) {
      const uint32_t below = mine + b, threshold = work->threshold[below];
      /* The last bin's holds for all tokens below it. */
      if (threshold == 0xFFFFFFFFu || (sum_of(below) == 0 && below != kBins - 1)) continue;
      const float value = static_cast<float>(top_bin - static_cast<int32_t>(below) + 1) * kBinWidth;
      const float limit = value - sampling::logarithm(static_cast<float>(threshold) * 0x1p-32f);
      /* What is rounded: the bin's edge, value and noise. */
      if (!(best[b] > limit + 0.001f + fabsf(value) * 0x1p-19f) && bound <= value + sampling::kMostNoise + 0.001f + fabsf(value) * 0x1p-19f) work->missing = 1;
    }
    if (context.thread < joined) {
      const NoisyToken own = work->frontier[context.thread];
      uint32_t place = 0;
      for (uint32_t j = 0; j < joined; ++j) place += work->frontier[j].key < own.key;
      store_entry(record, place, own);
    }
    context.sync();
    return work->missing != 0 ? 0 : joined;
  }

  /* Random words up to this are looked at in a bin: noise above ln(before / kSurely) less the bin's upper edge. */
  static __device__ __forceinline__ uint32_t threshold_of(uint32_t below, float before) {
    if (!(before > 0.0f)) return 0xFFFFFFFFu;
    const float words = 0x1p32f * 1.1f * kSurely * bin_scale(below) / before;
    return words >= 0x1.fffffep31f ? 0xFFFFFFFFu : words < 1.0f ? 1u : static_cast<uint32_t>(words);
  }

  /* One entry after the other: the highest noisy value of what comes before the last one in order; the first in order ends it. */
  static __device__ __forceinline__ uint32_t whole_frontier(Context& context, const SampleRow& row, const SampleColumns& columns, const NoisyToken& top, Work* work,
                                                         uint32_t* record) {
    uint64_t beaten = 0;
    uint32_t count = 0;
#pragma unroll 1
    while (count < MPK_SAMPLE_FRONTIER) {
      NoisyToken next = {0, 0.0f};
#pragma unroll 1
      for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
        const float value = work->value[i];
        const uint32_t token = columns.first_token + i;
        NoisyToken own = {sampling::key_of(value, token), 0.0f};
        if (own.key <= beaten) continue;
        own.noisy = value + sampling::noise(row.sampling.seed, row.position, token);
        if (own.beats(next)) next = own;
      }
      next = best_of_block(context, next, work->warps[(count + 1) % 2]);
      if (next.key == 0) break;
      if (context.thread == 0) store_entry(record, count, next);
      ++count;
      if (next.key == top.key || row.mode == sampling::kDraw) break;
      beaten = next.key;
    }
    return count;
  }
};

}  // namespace gpu
}  // namespace mpk
