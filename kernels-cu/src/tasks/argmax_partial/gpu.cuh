/* One column tile of the logits: for each sample the highest values with their tokens, and the sum of exponentials. If
 * there are few samples, all warps process one sample after the other; if there are many, each warp processes one (gpu_many.cuh). */
#pragma once

#include "tasks/argmax_partial/gpu_many.cuh"
#include "tasks/argmax_partial/gpu_top.cuh"
#include "tasks/argmax_partial/gpu_wanted.cuh"

namespace mpk {
namespace gpu {

/* Sampled: a sample may want no candidate at all. Then only the head of its record is written. */
template <uint32_t Kept, bool Sampled = false>
struct ArgmaxPartial : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const mpk_operand& out = context.output(0); /* [1, 1, samples, words] */
    if (out.dims[3] != MPK_ARGMAX_PAIRS + 2 * Kept) context.fail(MPK_ABORT_KERNEL);
    const uint32_t samples = context.rows_in_use(1, out.dims[2]);
    const bool many = samples >= kComputeWarps;
    const WantedCandidates<Kept, Sampled> wanted(context, many ? context.warp : 0, many ? kComputeWarps : 1);
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    if (many) {
      by_warps(context, wanted, samples);
      return MPK_OK;
    }
    uint32_t skipped = 0;
    for (uint32_t s = 0; s < samples; ++s) {
      const uint32_t kept = wanted.of(s);
      if (Sampled && kept == 0) {
        if (context.thread == 0) head(context, record_of(context, s), {-INFINITY, 0.0});
        ++skipped;
        continue;
      }
      /* Two buffers: a barrier lies between the merge of one and the next writes to it. */
      const uint32_t buffer = (s - skipped) % 2;
      MaximumSum* sums = reinterpret_cast<MaximumSum*>(context.work()) + buffer * kComputeWarps;
      TokenPair* all = lists(context, buffer);
      const MaximumSum of_warp = joined<32>(Columns(context, s, context.thread, kComputeThreads).scan(context, all + context.warp * Kept, gathered(context, kListsEnd), kept));
      if (context.lane == 0) sums[context.warp] = of_warp;
      code = context.sync();
      if (code != MPK_OK) return code;
      if (context.warp != 0) continue;
      uint32_t* record = record_of(context, s);
      const MaximumSum sum = joined<kComputeWarps>(sums[context.lane % kComputeWarps]);
      if (context.lane == 0) head(context, record, sum);
      merge_lists<Kept>(all, kept, context.lane, [&](uint32_t i, const TokenPair& pair) {
        if (context.lane == 0) store(record, i, pair);
      });
      for (uint32_t i = kept + context.lane; i < Kept; i += 32) store(record, i, no_pair());
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kGatheredBytes = Kept == 1 ? 0 : kComputeWarps * kGathered * sizeof(TokenPair);
  /* A warp's room for the pairs among which are its best, `at` bytes from the beginning of the work area. */
  static __device__ __forceinline__ TokenPair* gathered(const Context& context, uint32_t at) {
    return reinterpret_cast<TokenPair*>(context.work() + at) + context.warp * kGathered;
  }

  /* In the work area. Without another sample's list, the ring may have more places. */
  static constexpr uint32_t kOwnListsEnd = kComputeWarps * Kept * sizeof(TokenPair), kRingAt = kOwnListsEnd + kGatheredBytes;
  static constexpr uint32_t kRoom = (kWorkBytes - kRingAt) / (kComputeWarps * ColumnBlock::kBytes);
  using Copied = CopiedSamples<Kept, Sampled, kRoom < 8 ? kRoom : 8>;

  static __device__ __forceinline__ void by_warps(Context& context, const WantedCandidates<Kept, Sampled>& wanted, uint32_t samples) {
    TokenPair* list = reinterpret_cast<TokenPair*>(context.work()) + context.warp * Kept;
    Copied copied(context, wanted, context.work() + kRingAt + context.warp * Copied::kRingBytes, samples);
    uint32_t turn = 0;
    for (uint32_t s = context.warp; s < samples; s += kComputeWarps, ++turn) {
      uint32_t* record = record_of(context, s);
      const uint32_t kept = wanted.of(turn);
      if (Sampled && kept == 0) {
        if (context.lane == 0) head(context, record, {-INFINITY, 0.0});
        continue;
      }
      const auto found = copied.scan();
      const double sum = sum_of_lanes<32>(found.part.sum);
      if (context.lane == 0) head(context, record, {found.part.maximum, sum});
      if (Kept == 1 || kept == 1) {
        for (uint32_t i = context.lane; i < Kept; i += 32) store(record, i, i == 0 ? TokenPair{found.part.maximum, found.token} : no_pair());
        continue;
      }
      const Columns columns(context, s, context.lane, 32);
      columns.top(list, gathered(context, kOwnListsEnd), kept, context.lane, columns.best_after(first_pair()));
      /* In the record, the list may be aligned to 4 bytes only, so it goes through shared memory. */
      __syncwarp();
      for (uint32_t i = context.lane; i < Kept; i += 32) store(record, i, i < kept ? list[i] : no_pair());
      __syncwarp();
    }
  }

  static constexpr uint32_t kSumBytes = 2 * kComputeWarps * sizeof(MaximumSum);
  static constexpr uint32_t kListsEnd = kSumBytes + 2 * kComputeWarps * Kept * sizeof(TokenPair);
  static_assert(kListsEnd + kGatheredBytes <= kWorkBytes, "too many candidates for the work area");

  static __device__ __forceinline__ TokenPair* lists(Context& context, uint32_t buffer) {
    return reinterpret_cast<TokenPair*>(context.work() + kSumBytes) + buffer * kComputeWarps * Kept;
  }
  static __device__ __forceinline__ uint32_t* record_of(const Context& context, uint32_t sample) {
    return reinterpret_cast<uint32_t*>(context.output(0).addr) + static_cast<uint64_t>(sample) * context.output(0).strides[2];
  }
  static __device__ __forceinline__ void head(const Context& context, uint32_t* record, const MaximumSum& sum) {
    record[MPK_ARGMAX_HASH_LOW] = static_cast<uint32_t>(context.slot->batch_hash);
    record[MPK_ARGMAX_HASH_HIGH] = static_cast<uint32_t>(context.slot->batch_hash >> 32);
    record[MPK_ARGMAX_MAXIMUM] = __float_as_uint(sum.maximum);
    record[MPK_ARGMAX_SUM] = __float_as_uint(static_cast<float>(sum.sum));
  }
  static __device__ __forceinline__ void store(uint32_t* record, uint32_t i, const TokenPair& pair) {
    record[MPK_ARGMAX_PAIRS + 2 * i] = __float_as_uint(pair.value);
    record[MPK_ARGMAX_PAIRS + 2 * i + 1] = pair.token;
  }

  /* The columns first, first + step, ... of a sample: a thread's share. */
  struct Columns {
    const float* logits;
    uint32_t first_token, count, first, step;

    __device__ __forceinline__ Columns(const Context& context, uint32_t sample, uint32_t first_, uint32_t step_) : first(first_), step(step_) {
      first_token = static_cast<uint32_t>(context.slot->task.args[1]);
      count = static_cast<uint32_t>(context.slot->task.args[2]);
      /* A tile without columns has no input. */
      logits = count == 0 ? nullptr : reinterpret_cast<const float*>(row_address(context.input(0), sample));
    }

    static constexpr uint32_t kChunk = 8;
    __device__ __forceinline__ void load(float (&x)[kChunk], uint32_t at) const {
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i) {
        const uint32_t column = at + i * step;
        x[i] = column < count ? logits[column] : -INFINITY;
      }
#pragma unroll
      for (uint32_t i = 0; i < kChunk; ++i)
        if (x[i] != x[i]) x[i] = -INFINITY; /* what is not a number counts as the lowest */
    }

    __device__ __forceinline__ TokenPair best_after(const TokenPair& last) const {
      TokenPair best = no_pair();
#pragma unroll 1
      for (uint32_t at = first; at < count; at += kChunk * step) {
        float x[kChunk];
        load(x, at);
#pragma unroll
        for (uint32_t i = 0; i < kChunk; ++i) {
          const uint32_t column = at + i * step;
          const TokenPair pair = {x[i], first_token + column};
          if (column < count && pair.before(best) && comes_after(pair, last)) best = pair;
        }
      }
      return best;
    }

    /* Called by a warp: writes its pairs that are as good as `limit` to `pairs`, as many as there is room for. Returns their number. */
    __device__ __forceinline__ uint32_t gather(TokenPair* pairs, const TokenPair& limit, uint32_t lane) const {
      uint32_t found = 0;
#pragma unroll 1
      for (uint32_t at = first - lane; at < count; at += kChunk * step) {
        float x[kChunk];
        load(x, at + lane);
#pragma unroll
        for (uint32_t i = 0; i < kChunk; ++i) {
          const uint32_t column = at + lane + i * step;
          const TokenPair pair = {x[i], first_token + column};
          const bool takes = column < count && !limit.before(pair);
          const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, takes), place = found + __popc(lanes & ((1u << lane) - 1));
          if (takes && place < kGathered) pairs[place] = pair;
          found += __popc(lanes);
        }
      }
      return found;
    }

    /* Called by a warp: writes its `kept` best pairs to `list`. `mine` is this lane's best. */
    __device__ __forceinline__ void top(TokenPair* list, TokenPair* room, uint32_t kept, uint32_t lane, const TokenPair& mine) const {
      const auto next = [&](const TokenPair& last) { return best_after(last); };
      if constexpr (Kept == 1) {
        top_of_warp(list, kept, lane, mine, next);
      } else {
        /* A few columns are read again quickly. */
        const uint32_t least = count > kChunk * step ? 2 : 9;
        top_gathered(list, room, kept, least, lane, mine, [&](const TokenPair& limit) { return gather(room, limit, lane); }, next);
      }
    }

    /* Writes the warp's `kept` candidates to `list`. Returns this thread's maximum and sum. */
    __device__ __forceinline__ MaximumSum scan(const Context& context, TokenPair* list, TokenPair* room, uint32_t kept) const {
      TokenPair best = no_pair();
      MaximumSum part = {-INFINITY, 0.0};
#pragma unroll 1
      for (uint32_t at = first; at < count; at += kChunk * step) {
        float x[kChunk];
        load(x, at);
        float highest = part.maximum;
#pragma unroll
        for (uint32_t i = 0; i < kChunk; ++i) {
          const uint32_t column = at + i * step;
          /* Columns ascend, so an equal value loses. But a value of -infinity still beats an empty entry. */
          if (column < count && (x[i] > best.value || best.token == MPK_ARGMAX_NO_TOKEN)) best = {x[i], first_token + column};
          highest = fmaxf(highest, x[i]);
        }
        if (highest == -INFINITY) continue;
        float sum = 0.0f;
        /* Infinity minus infinity is NaN, so the maximum itself counts as 1. */
#pragma unroll
        for (uint32_t i = 0; i < kChunk; ++i) sum += x[i] == highest ? 1.0f : expf(x[i] - highest);
        if (highest != part.maximum) part = {highest, part.sum * static_cast<double>(expf(part.maximum - highest))};
        part.sum += static_cast<double>(sum);
      }
      top(list, room, kept, context.lane, best);
      return part;
    }
  };
};

}  // namespace gpu
}  // namespace mpk
