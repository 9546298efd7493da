/* Finds the highest logit of one part of a sample's logits, and the part's tokens that may be drawn. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"

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
    const bool noise = row.mode == sampling::kDraw || row.mode == sampling::kFrontier;
    NoisyToken top = {0, 0.0f}, best = {0, 0.0f};
    columns.bring(work->value, context.thread);
#pragma unroll 4
    for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
      const float value = columns.value(work->value[i], i, s);
      const uint64_t key = sampling::key_of(value, columns.first_token + i);
      if (key > top.key) top = {key, value};
      work->value[i] = value;
    }
    top = best_of_block(context, top, work->warps[0]); /* the barrier also makes the values visible */
    if (row.mode == sampling::kList) {
      uint32_t* list = reinterpret_cast<uint32_t*>(context.output(1).addr);
      const auto key_at = [&](uint32_t i) { return sampling::key_of(work->value[i], columns.first_token + i); };
      const uint32_t listed =
          select_keys(context, columns.count, s.top_k, &work->select, key_at, [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
      fill_list(context, list, listed, s.top_k);
    }
    uint32_t count = 0;
    if (noise && top.key != 0) {
      /* Most logits of a trained model are so low that the token with the highest logit beats them with any noise. */
      const float bound = top.noisy + sampling::noise(s.seed, row.position, sampling::token_of_key(top.key));
#pragma unroll 2
      for (uint32_t i = context.thread; i < columns.count; i += kComputeThreads) {
        const float value = work->value[i];
        const uint32_t token = columns.first_token + i;
        NoisyToken noisy = {sampling::key_of(value, token), -INFINITY};
        if (!(value + sampling::kMostNoise < bound)) noisy.noisy = value + sampling::noise(s.seed, row.position, token);
        work->noisy[i] = noisy.noisy;
        if (noisy.beats(best)) best = noisy;
      }
      const uint32_t most = row.mode == sampling::kDraw ? 1 : MPK_SAMPLE_FRONTIER;
      best = best_of_block(context, best, work->warps[1]);
      /* Each entry has the highest noisy value of the tokens that precede the previous entry; the first token in order ends the
       * loop. `alive` says which of a thread's columns still precede it. They become fewer in each round. */
      uint32_t alive = 0xFFFFFFFFu;
      static_assert(kColumns <= 32 * kComputeThreads, "a bit for each of a thread's columns");
#pragma unroll 1
      while (best.key != 0) {
        if (context.thread == 0) {
          uint32_t* entry = record + MPK_SAMPLE_ENTRIES + count * MPK_SAMPLE_ENTRY_WORDS;
          entry[0] = sampling::bits_of(sampling::value_of_key(best.key));
          entry[1] = sampling::bits_of(best.noisy);
          entry[2] = sampling::token_of_key(best.key);
        }
        ++count;
        if (count == most || best.key == top.key) break;
        NoisyToken next = {0, 0.0f};
#pragma unroll 1
        for (uint32_t left = alive; left != 0; left &= left - 1) {
          const uint32_t place = __ffs(static_cast<int>(left)) - 1, i = context.thread + place * kComputeThreads;
          if (i >= columns.count) {
            alive &= (1u << place) - 1;
            break;
          }
          const NoisyToken token = {sampling::key_of(work->value[i], columns.first_token + i), work->noisy[i]};
          if (token.key <= best.key) alive &= ~(1u << place);
          else if (token.beats(next)) next = token;
        }
        best = best_of_block(context, next, work->warps[(count + 1) % 2]);
      }
    }
    if (context.thread == 0) {
      record[MPK_SAMPLE_HIGHEST] = sampling::bits_of(top.key == 0 ? -INFINITY : sampling::value_of_key(top.key));
      record[MPK_SAMPLE_HIGHEST_TOKEN] = top.key == 0 ? MPK_SAMPLE_NO_TOKEN : sampling::token_of_key(top.key);
      record[MPK_SAMPLE_COUNT] = count;
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kColumns = 7168; /* MOST_COLUMNS in sample_family.rs */
  struct Work {
    float value[kColumns], noisy[kColumns];
    NoisyToken warps[2][kComputeWarps];
    SelectRoom select;
  };
  static_assert(sizeof(Work) <= kWorkBytes, "too many columns for the work area");
};

}  // namespace gpu
}  // namespace mpk
