/* The linear family's work on a stage: 16 rows of the weight (a tile) times a range of k, into sums that a warp keeps in
 * registers. The blocks of 16 k of a stage are distributed to the warps in turn, so each warp has a share of every sum.
 * The shares are added in shared memory at the end of a tile.
 *
 * The activations are in shared memory as rows of the weight's type. From a block, a lane reads the four elements of
 * its quarter, or the eight of its half (f32), in the order of MPK_LAYOUT_FRAGMENT. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/loads.cuh"
#include "gpu/numbers.cuh"

namespace mpk {
namespace gpu {

/* For the weight: 16 rows by 16 k. */
template <uint32_t Weight>
constexpr uint32_t kBlockBytes = 256 * kNumberBytes<Weight>;
template <uint32_t Weight>
constexpr uint32_t kStageBlocks = kStageBytes / kBlockBytes<Weight>;
/* For a row of activations: 16 k. */
template <uint32_t Weight>
constexpr uint32_t kRowBlockBytes = 16 * kNumberBytes<Weight>;

/* Place of the share of output row `n` and column `m` of the tile among a warp's shares. Writers and readers
 * each use all banks. */
__device__ __forceinline__ uint32_t share_index(uint32_t n, uint32_t m) { return (n * 16 + m) ^ (n / 2 % 4 * 8); }

/* Takes a stage without reading it. */
__device__ __forceinline__ bool pass(StageReader& reader) {
  if (!reader.wait()) return false;
  reader.give_back();
  return true;
}

template <uint32_t Weight>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint4& a, const uint2& b) {
  if constexpr (Weight == MPK_BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
}

/* 2-byte weights, on the tensor cores. The weight is their left operand, 8 rows of activations the right one. If
 * there are fewer rows, the last one stands in for the missing ones. */
template <uint32_t Weight, uint32_t N8>
class Product {
  static constexpr uint32_t kShare = kStageBlocks<Weight> / kComputeWarps; /* blocks of a warp in a stage */
  static_assert(kShare * kComputeWarps == kStageBlocks<Weight> && kShare > 0, "a stage is a whole number of blocks for each warp");
  /* Independent sets of sums. */
  static constexpr uint32_t kSets = N8 <= 2 && kShare > 1 ? 2 : 1;

 public:
  __device__ __forceinline__ Product(const Context& context, const uint8_t* rows, uint32_t num_rows, uint32_t row_bytes)
      : warp_(context.warp), lane_(context.lane) {
#pragma unroll
    for (uint32_t j = 0; j < N8; ++j) {
      const uint32_t row = min(j * 8 + lane_ / 4, num_rows - 1);
      rows_[j] = shared_address(rows) + row * row_bytes + warp_ * kRowBlockBytes<Weight> + lane_ % 4 * 8;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t s = 0; s < kSets; ++s)
#pragma unroll
      for (uint32_t j = 0; j < N8; ++j)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sums_[s][j][i] = 0.0f;
  }

  /* The next stage: `count` blocks (all of them if Full), starting at block `first` of the rows. False: no stage
   * will come. */
  template <bool Full>
  __device__ __forceinline__ bool stage(StageReader& reader, uint32_t first, uint32_t count) {
    if constexpr (kWithoutProducts) return pass(reader);
    else return multiply<Full>(reader, first, count);
  }

  template <bool Full>
  __device__ __forceinline__ bool multiply(StageReader& reader, uint32_t first, uint32_t count) {
    uint2 b[kShare][N8];
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i)
#pragma unroll
      for (uint32_t j = 0; j < N8; ++j) {
        if (!Full) b[i][j] = make_uint2(0, 0);
        if (Full || warp_ + i * kComputeWarps < count)
          b[i][j] = load_shared8(rows_[j] + first * kRowBlockBytes<Weight> + i * kComputeWarps * kRowBlockBytes<Weight>);
      }
    if (!reader.wait()) return false;
    const uint32_t stage = reader.address() + (warp_ * kBlockBytes<Weight> + lane_ * 16);
    uint4 a[kShare];
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i) {
      if (!Full) a[i] = make_uint4(0, 0, 0, 0);
      if (Full || warp_ + i * kComputeWarps < count) a[i] = load_shared16(stage + i * kComputeWarps * kBlockBytes<Weight>);
    }
    reader.give_back();
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i)
      if (Full || warp_ + i * kComputeWarps < count) {
#pragma unroll
        for (uint32_t j = 0; j < N8; ++j) multiply_add<Weight>(sums_[i % kSets][j], a[i], b[i][j]);
      }
    return true;
  }

  /* Stores the warp's shares of the tile. */
  __device__ __forceinline__ void store(float* shares) const {
#pragma unroll
    for (uint32_t j = 0; j < N8; ++j)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float sum = sums_[0][j][i];
        if constexpr (kSets == 2) sum += sums_[1][j][i];
        shares[share_index(j * 8 + lane_ % 4 * 2 + i % 2, lane_ / 4 + i / 2 * 8)] = sum;
      }
  }

 private:
  uint32_t warp_, lane_;
  uint32_t rows_[N8]; /* shared addresses */
  float sums_[kSets][N8][4];
};

/* f32 weights: a lane has one column of the tile and half of the k of each block. */
template <uint32_t N8>
class Product<MPK_F32, N8> {
  static constexpr uint32_t kShare = kStageBlocks<MPK_F32> / kComputeWarps;
  static_assert(kShare * kComputeWarps == kStageBlocks<MPK_F32> && kShare > 0, "a stage is a whole number of blocks for each warp");

 public:
  __device__ __forceinline__ Product(const Context& context, const uint8_t* rows, uint32_t num_rows, uint32_t row_bytes)
      : warp_(context.warp), lane_(context.lane), num_rows_(num_rows), row_bytes_(row_bytes) {
    rows_ = shared_address(rows) + warp_ * kRowBlockBytes<MPK_F32> + lane_ / 16 * 32;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t n = 0; n < N8 * 8; ++n) sums_[n] = 0.0f;
  }

  template <bool Full>
  __device__ __forceinline__ bool stage(StageReader& reader, uint32_t first, uint32_t count) {
    if constexpr (kWithoutProducts) return pass(reader);
    else return multiply<Full>(reader, first, count);
  }

  template <bool Full>
  __device__ __forceinline__ bool multiply(StageReader& reader, uint32_t first, uint32_t count) {
    if (!reader.wait()) return false;
    const uint32_t stage = reader.address() + warp_ * kBlockBytes<MPK_F32> + lane_ * 4;
    float a[kShare][8];
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i)
#pragma unroll
      for (uint32_t k = 0; k < 8; ++k) {
        if (!Full) a[i][k] = 0.0f;
        if (Full || warp_ + i * kComputeWarps < count)
          a[i][k] = load_shared4(stage + i * kComputeWarps * kBlockBytes<MPK_F32> + k * 128);
      }
    reader.give_back();
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i)
      if (Full || warp_ + i * kComputeWarps < count) {
        const uint32_t row = rows_ + (first + i * kComputeWarps) * kRowBlockBytes<MPK_F32>;
#pragma unroll
        for (uint32_t n = 0; n < N8 * 8; ++n) {
          if (n < num_rows_) {
            const uint4 low = load_shared16(row + n * row_bytes_), high = load_shared16(row + n * row_bytes_ + 16);
            const uint32_t b[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (uint32_t k = 0; k < 8; ++k) sums_[n] = fmaf(a[i][k], __uint_as_float(b[k]), sums_[n]);
          }
        }
      }
    return true;
  }

  __device__ __forceinline__ void store(float* shares) const {
#pragma unroll
    for (uint32_t n = 0; n < N8 * 8; n += 2) {
      /* Each half of the warp has half of the k. */
      const float even = sums_[n] + __shfl_xor_sync(0xFFFFFFFFu, sums_[n], 16);
      const float odd = sums_[n + 1] + __shfl_xor_sync(0xFFFFFFFFu, sums_[n + 1], 16);
      shares[share_index(n + lane_ / 16, lane_ % 16)] = lane_ < 16 ? even : odd;
    }
  }

 private:
  uint32_t warp_, lane_, num_rows_, row_bytes_;
  uint32_t rows_;
  float sums_[N8 * 8];
};

}  // namespace gpu
}  // namespace mpk
