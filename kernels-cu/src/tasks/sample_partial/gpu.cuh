/* Finds, for one part of the columns and some samples, the highest logit and the part's tokens that may be drawn. All threads process
 * one sample after the other, while the next one's logits arrive. What is left of each then is a few tokens, for one warp. */
#pragma once

#include "tasks/sample_partial/gpu_few.cuh"
#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

struct SamplePartial : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_partial_params>().kept;
    const uint32_t first = static_cast<uint32_t>(context.slot->task.args[3]);
    const uint32_t samples = samples_of(context, first, static_cast<uint32_t>(context.slot->task.args[4]));
    const SampleColumns columns(context);
    SampleRow row(context, first, kept);
    if (columns.count > SampleColumns::kMost) context.fail(MPK_ABORT_KERNEL);
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    /* Nothing would wait for the first sample's copy, and it could arrive while the next task uses the memory. */
    if (samples == 0) return MPK_OK;

    Work* work = reinterpret_cast<Work*>(context.work());
    columns.bring(work->value[0], context, context.input(0), 0);
    if (context.thread < kComputeWarps) work->found[0][context.thread] = work->found[1][context.thread] = 0;
    Candidates candidates = {};
#pragma unroll 1
    for (uint32_t sample = 0; sample < samples; ++sample) {
      const SampleRow next(context, first + sample + 1, kept); /* not needed yet: its loads are under way */
      SampleColumns::arrive();
      if (sample + 1 < samples) columns.bring(work->value[(sample + 1) % 2], context, context.input(0), sample + 1);
      if (row.mode == sampling::kImpossible) context.fail(MPK_ABORT_KERNEL);
      else if (row.mode != sampling::kOff) one_sample(context, columns, row, sample, work, candidates);
      row = next;
    }
    if (candidates.samples != 0) list_frontiers(context, work, candidates);
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kPool = 1024;
  struct Work {
    float value[2][SampleColumns::kMost];
    NoisyToken pool[kPool]; /* candidates of some samples, with the random word instead of the noisy value */
    NoisyToken tops[2][kComputeWarps], bests[2][kComputeWarps];
    uint32_t found[2][kComputeWarps]; /* candidates of each of these samples; the others were those before */
    FewRoom few;
  };
  static_assert(sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  /* The samples whose candidates wait in the pool, one for each warp. */
  struct Candidates {
    uint32_t samples, used, turn;
    uint32_t reduced; /* which of `tops` and `bests` the next sample uses */
    /* The warp's own sample. */
    uint32_t begin, count, most;
    uint64_t top;
    uint32_t* record;
  };

  static __device__ __forceinline__ void one_sample(Context& context, const SampleColumns& columns, const SampleRow& row, uint32_t sample, Work* work,
                                                    Candidates& candidates) {
    const mpk_sampling& s = row.sampling;
    float* value = work->value[sample % 2];
    const uint32_t* counts = columns.counts_of(context.input(1), row);
    float highest = -INFINITY;
    uint32_t at = context.thread;
#pragma unroll 4
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float own = sampling::processed(value[i], counts == nullptr ? 0 : counts[i], s);
      if (own > highest) { /* columns ascend, so an equal value loses */
        highest = own;
        at = i;
      }
      value[i] = own;
    }
    NoisyToken mine = {context.thread < columns.count ? sampling::key_of(highest, columns.first_token + at) : 0, highest};
    if (row.mode == sampling::kList) {
      const mpk_operand& lists = context.output(1); /* [1, 1, samples, words] */
      uint32_t* list = reinterpret_cast<uint32_t*>(lists.addr) + static_cast<uint64_t>(sample) * lists.strides[2];
      const auto key_at = [&](uint32_t i) { return sampling::key_of(value[i], columns.first_token + i); };
      const FewKeys listed = select_few(context, columns.count, s.top_k, mine.key, &work->few, key_at, [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
      fill_list(context, list, listed.count, s.top_k);
      return;
    }
    const bool noise = row.mode == sampling::kDraw || row.mode == sampling::kFrontier;
    if (noise && mine.key != 0) mine.noisy = highest + sampling::noise(s.seed, row.position, sampling::token_of_key(mine.key));
    NoisyToken top = with_highest_key(mine), best = best_of_warp(mine);
    NoisyToken *tops = work->tops[candidates.reduced], *bests = work->bests[candidates.reduced];
    candidates.reduced ^= 1;
    if (context.lane == 0) {
      tops[context.warp] = top;
      bests[context.warp] = best;
    }
    context.sync();
    top = with_highest_key(context.lane < kComputeWarps ? tops[context.lane] : NoisyToken{0, 0.0f});
    uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr) + static_cast<uint64_t>(sample) * context.output(0).strides[2];
    if (!noise || top.key == 0) {
      if (context.thread == 0) store_head(record, top.key, 0);
      return;
    }
    best = best_of_warp(context.lane < kComputeWarps ? bests[context.lane] : NoisyToken{0, 0.0f});
    /* Nobody reads the counts of the samples before the last list_frontiers any more, since there was a barrier. */
    if (candidates.samples == 0 && context.thread < kComputeWarps) work->found[1 - candidates.turn][context.thread] = 0;

    /* The token with the highest logit comes first in order, so it beats all tokens below its noisy value. `best`, the highest noisy
     * value of the threads' highest logits, beats those that come after it. Most logits of a trained model are so low that no noise
     * lifts them above that. For most of the others the random word tells it, without the logarithms. */
    const uint32_t most = row.mode == sampling::kDraw ? 1 : MPK_SAMPLE_FRONTIER;
    const float before_best = most == 1 ? best.noisy : top.noisy;
    uint32_t* found = &work->found[candidates.turn][candidates.samples];
    constexpr uint32_t kTogether = 4;
#pragma unroll 1
    for (uint32_t from = context.thread; from < columns.count; from += kTogether * kComputeThreads) {
      float own[kTogether], bound[kTogether];
      bool needed[kTogether], any = false;
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        const uint32_t i = from + u * kComputeThreads;
        own[u] = i < columns.count ? value[i] : 0.0f;
        bound[u] = sampling::key_of(own[u], columns.first_token + i) >= best.key ? before_best : best.noisy;
        needed[u] = i < columns.count && !(own[u] + sampling::kMostNoise < bound[u]);
        any |= needed[u];
      }
      if (!any) continue;
      uint32_t word[kTogether];
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) word[u] = sampling::random_word(s.seed, row.position, columns.first_token + from + u * kComputeThreads);
#pragma unroll
      for (uint32_t u = 0; u < kTogether; ++u) {
        if (!needed[u] || own[u] + sampling::most_gumbel(word[u]) < bound[u]) continue;
        const uint32_t place = candidates.used + atomicAdd(found, 1u);
        const uint32_t token = columns.first_token + from + u * kComputeThreads;
        if (place < kPool) work->pool[place] = {sampling::key_of(own[u], token), sampling::float_of(word[u])};
      }
    }
    context.sync();
    const uint32_t count = *found;
    const bool fit = candidates.used + count <= kPool;
    if (context.warp == candidates.samples) {
      candidates.begin = candidates.used;
      candidates.count = fit ? count : 0;
      candidates.most = most;
      candidates.top = top.key;
      candidates.record = record;
    }
    candidates.samples += 1;
    if (fit) candidates.used += count;
    else list_slowly(context, columns, row, value, top.key, most, work, record);
    if (candidates.samples == kComputeWarps || candidates.used > kPool / 2) list_frontiers(context, work, candidates);
  }

  /* The one of a warp that has the highest key. */
  static __device__ __forceinline__ NoisyToken with_highest_key(const NoisyToken& mine) {
    const uint64_t key = highest_of_warp(mine.key);
    const uint32_t owners = __ballot_sync(0xFFFFFFFFu, mine.key == key);
    return {key, __shfl_sync(0xFFFFFFFFu, mine.noisy, __ffs(static_cast<int>(owners)) - 1)};
  }

  /* Each warp writes the frontier of its sample's candidates. Afterwards there are none. The next barrier comes before others. */
  static __device__ __forceinline__ void list_frontiers(const Context& context, Work* work, Candidates& candidates) {
    if (context.warp < candidates.samples && candidates.count != 0) {
      NoisyToken* own = work->pool + candidates.begin;
#pragma unroll 1
      for (uint32_t i = context.lane; i < candidates.count; i += 32)
        own[i].noisy = sampling::value_of_key(own[i].key) + sampling::gumbel(sampling::bits_of(own[i].noisy));
      __syncwarp();
      const uint32_t count = frontier_of(candidates.count, candidates.most, candidates.top, context.lane, [&](uint32_t i) { return own[i]; },
                                         [&](uint32_t i, const NoisyToken& entry) {
                                           if (context.lane == 0) store_entry(candidates.record, i, entry);
                                         });
      if (context.lane == 0) store_head(candidates.record, candidates.top, count);
    }
    candidates.samples = candidates.used = 0;
    candidates.turn ^= 1;
  }

  /* The same for a sample whose candidates are too many for the pool: all threads compute the noise again for each entry. */
  static __device__ __forceinline__ void list_slowly(Context& context, const SampleColumns& columns, const SampleRow& row, const float* value, uint64_t top,
                                                  uint32_t most, Work* work, uint32_t* record) {
    uint64_t floor = 0;
    uint32_t count = 0;
#pragma unroll 1
    while (count < most && floor != top) {
      NoisyToken next = {0, 0.0f};
#pragma unroll 1
      for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
        const uint32_t token = columns.first_token + i;
        const uint64_t key = sampling::key_of(value[i], token);
        if (key <= floor) continue;
        const NoisyToken own = {key, value[i] + sampling::noise(row.sampling.seed, row.position, token)};
        if (own.beats(next)) next = own;
      }
      const NoisyToken best = best_of_block(context, next, work->bests[count % 2]);
      if (context.thread == 0) store_entry(record, count, best);
      floor = best.key;
      ++count;
    }
    if (context.thread == 0) store_head(record, top, count);
    context.sync(); /* the next sample writes to `bests` */
  }
};

}  // namespace gpu
}  // namespace mpk
