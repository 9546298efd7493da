/* Many samples: each warp scans one after the other, and copies the columns ahead into its ring in the work area. Registers hold too few
 * loads for the latency of memory, and loads of registers take up room in the first-level cache, of which shared memory leaves little. */
#pragma once

#include "gpu/loads.cuh"
#include "tasks/argmax_partial/gpu_top.cuh"
#include "tasks/argmax_partial/gpu_wanted.cuh"

namespace mpk {
namespace gpu {

/* The sign turns the order of negative numbers around. Not for NaN; -0 comes before 0. */
__device__ __forceinline__ int32_t ordered_bits(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }
__device__ __forceinline__ float warp_maximum_of(float v) {
  return __int_as_float(ordered_bits(__reduce_max_sync(0xFFFFFFFFu, ordered_bits(__float_as_int(v)))));
}

/* Columns that a warp copies at once. */
struct ColumnBlock {
  static constexpr uint32_t kVectors = 2, kOfLane = kVectors * 4, kColumns = kOfLane * 32, kBytes = kColumns * sizeof(float);
};

/* A column tile of the samples warp, warp + kComputeWarps, ... in a ring of `Places` blocks. */
template <uint32_t Kept, bool Sampled, uint32_t Places>
class CopiedSamples : ColumnBlock {
 public:
  static constexpr uint32_t kRingBytes = Places * ColumnBlock::kBytes;
  static_assert(Places >= 2, "no block would be copied ahead");

  /* Begins the first copies. */
  __device__ __forceinline__ CopiedSamples(const Context& context, const WantedCandidates<Kept, Sampled>& wanted, uint8_t* ring, uint32_t samples)
      : wanted_(wanted), lane_(context.lane), samples_(samples), sample_(context.warp), ring_(shared_address(ring)), read_(ring_), write_(ring_) {
    const mpk_task& task = context.slot->task;
    first_token_ = static_cast<uint32_t>(task.args[1]);
    count_ = static_cast<uint32_t>(task.args[2]);
    if (count_ == 0) samples_ = 0;
    if (samples_ != 0) {
      const mpk_operand& logits = context.input(0); /* a tile without columns has none */
      row_bytes_ = logits.strides[0] * sizeof(float);
      row_ = logits.addr + static_cast<uint64_t>(sample_) * row_bytes_;
      if ((logits.addr | row_bytes_) % 16 == 0) full_ = kColumns;
      begin_row();
    }
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < Places; ++i) copy();
  }

  struct Found {
    MaximumSum part; /* the sum is this lane's */
    uint32_t token;  /* the lowest of the maximum, if there is a column */
  };
  /* The next sample that wants candidates. */
  __device__ __forceinline__ Found scan() {
    /* If all values are -infinity or NaN, the first is the best. */
    Found found = {{-INFINITY, 0.0}, count_ == 0 ? MPK_ARGMAX_NO_TOKEN : first_token_};
#pragma unroll 1
    for (uint32_t at = 0; at < count_; at += kColumns) {
      asm volatile("cp.async.wait_group %0;" ::"n"(Places - 2) : "memory");
      /* The other lanes' copies have arrived, too, and they have read the block before, whose place is copied to next. */
      __syncwarp();
      copy();
      scan_block(found, at);
      advance(read_);
    }
    return found;
  }

 private:
  const WantedCandidates<Kept, Sampled>& wanted_;
  uint32_t lane_, samples_, first_token_, count_;
  /* Of the next copy: the sample, and its place among this warp's; its row; the first byte and the number of columns left. */
  uint32_t sample_, turn_ = 0;
  uint64_t row_ = 0, from_ = 0;
  uint32_t row_bytes_ = 0, left_ = 0;
  uint32_t full_ = ~0u; /* columns of a block without an end or an odd address */
  uint32_t ring_, read_, write_;

  static __device__ __forceinline__ uint32_t column_of(uint32_t lane, uint32_t i) { return (i / 4 * 32 + lane) * 4 + i % 4; }

  __device__ __forceinline__ void advance(uint32_t& place) const {
    place += kBytes;
    if (place == ring_ + kRingBytes) place = ring_;
  }
  __device__ __forceinline__ void next_row() {
    sample_ += kComputeWarps;
    ++turn_;
    row_ += static_cast<uint64_t>(kComputeWarps) * row_bytes_;
  }
  /* Goes to the next sample that wants candidates. */
  __device__ __forceinline__ void begin_row() {
    if constexpr (Sampled) {
      while (sample_ < samples_ && wanted_.of(turn_) == 0) next_row();
    }
    from_ = row_;
    left_ = count_;
  }

  /* Begins to copy the next block, if there is one. In any case, one more group of copies has begun. */
  __device__ __forceinline__ void copy() {
    if (sample_ < samples_) {
      const uint32_t to = write_ + lane_ * 16;
      const uint64_t from = from_ + lane_ * 16;
      if (left_ >= full_) {
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v)
          asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to + v * 512), "l"(from + v * 512) : "memory");
      } else {
        copy_odd();
      }
      advance(write_);
      from_ += kBytes;
      if (left_ > kColumns) {
        left_ -= kColumns;
      } else {
        next_row();
        begin_row();
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  /* Column by column, so nothing behind the last one is read, and no address need be a multiple of 16. */
  __device__ __forceinline__ void copy_odd() const {
    const uint32_t bytes = min(left_, kColumns) * 4;
#pragma unroll 1
    for (uint32_t at = lane_ * 4; at < bytes; at += 32 * 4)
      asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(write_ + at), "l"(from_ + at) : "memory");
  }

  /* Columns `at`, ... of the sample. */
  __device__ __forceinline__ void scan_block(Found& found, uint32_t at) const {
    const uint32_t block = read_ + lane_ * 16;
    float x[kOfLane];
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint4 loaded = load_shared16(block + v * 512);
      x[v * 4] = __uint_as_float(loaded.x);
      x[v * 4 + 1] = __uint_as_float(loaded.y);
      x[v * 4 + 2] = __uint_as_float(loaded.z);
      x[v * 4 + 3] = __uint_as_float(loaded.w);
    }
    const uint32_t count = count_ - at;
    if (count < kColumns) {
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i)
        if (column_of(lane_, i) >= count) x[i] = -INFINITY;
    }
    /* Of a number and NaN, fmaxf gives the number. */
    float highest = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
    static_assert(kOfLane == 8, "a lane's values");
    const float before = found.part.maximum;
    if (__any_sync(0xFFFFFFFFu, highest > before)) {
      found.part.maximum = warp_maximum_of(fmaxf(highest, -INFINITY));
      uint32_t column = ~0u;
#pragma unroll
      for (uint32_t i = kOfLane; i-- > 0;)
        if (x[i] == found.part.maximum) column = column_of(lane_, i);
      found.token = first_token_ + at + __reduce_min_sync(0xFFFFFFFFu, column);
      found.part.sum *= static_cast<double>(fast_exp(before - found.part.maximum));
    }
    const float maximum = found.part.maximum;
    if (maximum == -INFINITY) return;
    float sum[kOfLane / 2];
#pragma unroll
    for (uint32_t i = 0; i < kOfLane / 2; ++i) sum[i] = fast_exp(x[2 * i] - maximum) + fast_exp(x[2 * i + 1] - maximum);
    float total = sum[0] + sum[1] + (sum[2] + sum[3]);
    /* NaN counts as -infinity. Infinity minus infinity is NaN, too, but the maximum itself counts as 1. */
    if (total != total) {
      total = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i) total += x[i] == maximum ? 1.0f : x[i] != x[i] ? 0.0f : fast_exp(x[i] - maximum);
    }
    found.part.sum += static_cast<double>(total);
  }
};

}  // namespace gpu
}  // namespace mpk
