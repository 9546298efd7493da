/* Merges the records of all tiles of all ranks for one sample. */
#pragma once

#include "tasks/argmax_partial/gpu_top.cuh"
#include "tasks/argmax_partial/gpu_wanted.cuh"
#include "tasks/argmax_reduce/logprob.h"
#include "tasks/argmax_reduce/params.h"

namespace mpk {
namespace gpu {

/* LogSum: the last output is log_sum. Sampled: a sample may want no candidate; then only the hashes are compared. */
template <uint32_t Kept, uint32_t TopK, bool LogSum = false, bool Sampled = false>
struct ArgmaxReduce : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = wanted_candidates<Kept, Sampled>(context, static_cast<uint32_t>(context.slot->task.args[0]));
    int code = context.wait_inputs(/*loads_under_way=*/false, /*always=*/true);
    const uint32_t sample = static_cast<uint32_t>(context.slot->task.args[0]);
    if (code != MPK_OK || sample >= context.slot->num_samples) return code;

    const Records records(context);
    MaximumSum part = {-INFINITY, 0.0};
    for (uint32_t r = context.thread; r < records.count; r += kComputeThreads) {
      const uint32_t* record = records.at(r);
      const uint64_t hash = static_cast<uint64_t>(record[MPK_ARGMAX_HASH_HIGH]) << 32 | record[MPK_ARGMAX_HASH_LOW];
      if (hash != context.slot->batch_hash) context.fail(MPK_ABORT_DIVERGED);
      if (TopK == 0) continue;
      const MaximumSum other = {__uint_as_float(record[MPK_ARGMAX_MAXIMUM]), static_cast<double>(__uint_as_float(record[MPK_ARGMAX_SUM]))};
      const float highest = fmaxf(part.maximum, other.maximum);
      if (other.maximum != -INFINITY) part = {highest, sum_at(part, highest) + sum_at(other, highest)};
    }
    MaximumSum* sums = reinterpret_cast<MaximumSum*>(context.work());
    TokenPair* lists = reinterpret_cast<TokenPair*>(context.work() + kSumBytes);
    TokenPair* best = lists + kComputeWarps * Kept;
    const auto best_after = [&](const TokenPair& last) { return records.best_after(context.thread, last, kept); };
    TokenPair* const list = lists + context.warp * Kept;
    if constexpr (Kept == 1) {
      top_of_warp(list, kept, context.lane, best_after(first_pair()), best_after);
    } else {
      TokenPair* const room = best + Kept + context.warp * kGathered;
      const auto gather = [&](const TokenPair& limit) { return records.gather(room, limit, context.thread, context.lane, kept); };
      top_gathered(list, room, kept, 5, context.lane, best_after(first_pair()), gather, best_after);
    }
    if (TopK > 0) {
      part = joined<32>(part);
      if (context.lane == 0) sums[context.warp] = part;
    }
    code = context.sync();
    if (code != MPK_OK) return code;
    if (context.warp != 0 || (Sampled && kept == 0)) return MPK_OK; /* of such a sample nothing reads the outputs */

    merge_lists<Kept>(lists, kept, context.lane, [&](uint32_t i, const TokenPair& pair) {
      if (context.lane == 0) best[i] = pair;
    });
    __syncwarp();
    if (best[0].token == MPK_ARGMAX_NO_TOKEN) {
      context.fail(MPK_ABORT_KERNEL);
      return MPK_OK;
    }
    if (context.lane == 0) *reinterpret_cast<int32_t*>(context.output(0).addr) = static_cast<int32_t>(best[0].token);
    if constexpr (TopK > 0) {
      const MaximumSum sum = joined<kComputeWarps>(sums[context.lane % kComputeWarps]);
      const double log_sum = log(sum.sum);
      int32_t* token = reinterpret_cast<int32_t*>(context.output(1).addr);
      float* logprob = reinterpret_cast<float*>(context.output(2).addr);
      for (uint32_t i = context.lane; i < TopK; i += 32) {
        const bool none = i >= kept || best[i].token == MPK_ARGMAX_NO_TOKEN;
        token[i] = none ? -1 : static_cast<int32_t>(best[i].token);
        logprob[i] = none ? -INFINITY : logprob_of(best[i].value, sum.maximum, log_sum);
      }
      if (LogSum && context.lane == 0) {
        uint32_t* words = reinterpret_cast<uint32_t*>(context.output(3).addr);
        words[MPK_LOG_SUM_MAXIMUM] = __float_as_uint(sum.maximum);
        words[MPK_LOG_SUM_LOW] = static_cast<uint32_t>(__double2loint(log_sum));
        words[MPK_LOG_SUM_HIGH] = static_cast<uint32_t>(__double2hiint(log_sum));
      }
    }
    return MPK_OK;
  }

 private:
  static_assert(TopK <= Kept, "a record has as many candidates as are wanted");
  static constexpr uint32_t kSumBytes = kComputeWarps * sizeof(MaximumSum);
  static constexpr uint32_t kPairs = (kComputeWarps + 1) * Kept + (Kept == 1 ? 0 : kComputeWarps * kGathered);
  static_assert(kSumBytes + kPairs * sizeof(TokenPair) <= kWorkBytes, "too many candidates for the work area");

  struct Records {
    const uint32_t* first;
    uint64_t rank_stride, tile_stride;
    uint32_t tiles, count;

    __device__ __forceinline__ explicit Records(const Context& context) {
      const mpk_operand& partials = context.input(0); /* [ranks, tiles, 1, words] */
      first = reinterpret_cast<const uint32_t*>(partials.addr);
      rank_stride = partials.strides[0];
      tile_stride = partials.strides[1];
      tiles = partials.dims[1];
      count = partials.dims[0] * tiles;
    }
    __device__ __forceinline__ const uint32_t* at(uint32_t r) const { return first + r / tiles * rank_stride + r % tiles * tile_stride; }

    /* Called by a warp: writes the pairs of its threads' records that are as good as `limit` to `pairs`, as many as there is room for.
     * Returns their number. */
    __device__ __forceinline__ uint32_t gather(TokenPair* pairs, const TokenPair& limit, uint32_t thread, uint32_t lane, uint32_t kept) const {
      uint32_t found = 0;
#pragma unroll 1
      for (uint32_t r = thread; r - lane < count; r += kComputeThreads) {
        const uint32_t* const list = at(min(r, count - 1)) + MPK_ARGMAX_PAIRS;
        bool more = r < count;
#pragma unroll 1
        for (uint32_t i = 0; i < kept; ++i) {
          const TokenPair pair = {__uint_as_float(list[2 * i]), list[2 * i + 1]};
          more = more && pair.token != MPK_ARGMAX_NO_TOKEN && !limit.before(pair); /* the record's others are worse still */
          const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, more), place = found + __popc(lanes & ((1u << lane) - 1));
          if (lanes == 0) break;
          if (more && place < kGathered) pairs[place] = pair;
          found += __popc(lanes);
        }
      }
      return found;
    }

    /* The best pair after `last` in a thread's records, of which the first `kept` count. */
    __device__ __forceinline__ TokenPair best_after(uint32_t thread, const TokenPair& last, uint32_t kept) const {
      TokenPair best = no_pair();
      for (uint32_t r = thread; r < count; r += kComputeThreads) {
        const uint32_t* pairs = at(r) + MPK_ARGMAX_PAIRS;
        for (uint32_t i = 0; i < kept; ++i) {
          const TokenPair pair = {__uint_as_float(pairs[2 * i]), pairs[2 * i + 1]};
          if (!comes_after(pair, last)) continue;
          if (pair.before(best)) best = pair;
          break; /* the record's others are worse still */
        }
      }
      return best;
    }
  };
};

}  // namespace gpu
}  // namespace mpk
