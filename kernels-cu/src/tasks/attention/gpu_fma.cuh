/* Attention of a warp with multiply-adds, for f32: a tile of 4 queries against units of 32 keys. A lane computes
 * the scores of one key, and holds dimensions lane, lane + 32, ... of the outputs. */
#pragma once

#include "tasks/attention/gpu_share.cuh"

namespace mpk {
namespace gpu {
namespace attention {

template <uint32_t Dim, uint32_t PageSize, bool Window>
class FmaTile {
  using Shares = Share<MPK_F32, Dim, PageSize>;
  static constexpr uint32_t kLaneDims = (Dim + 31) / 32;

 public:
  static constexpr uint32_t kQueries = 4;
  static constexpr uint32_t kKeys = 32;
  /* Elements of a tile in shared memory. */
  static constexpr uint32_t kQueryElements = kQueries * Shares::kPadded;

  /* Index of element `d` of a tile's query `q`. */
  static __device__ __forceinline__ uint32_t query_index(uint32_t q, uint32_t d) { return q * Shares::kPadded + d; }

  __device__ FmaTile(const Shares& share, uint32_t lane) : share_(share), lane_(lane) {}

  __device__ __forceinline__ void start(const float* queries, uint32_t first_query, uint32_t last) {
    queries_ = queries;
    last_ = last;
#pragma unroll
    for (uint32_t q = 0; q < kQueries; ++q) {
      limit_[q] = share_.keys_of(first_query + q, last);
      if constexpr (Window) from_[q] = share_.first_key(first_query + q);
      max_[q] = -INFINITY;
      sum_[q] = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i) out_[q][i] = 0.0f;
    }
  }

  /* Nothing is fetched early. */
  __device__ __forceinline__ void fetch(uint32_t, uint32_t) {}
  __device__ __forceinline__ void fetch_rest(uint32_t, uint32_t) {}

  __device__ __forceinline__ void run(uint32_t begin, uint32_t step) {
    for (; begin < last_; begin += step) unit(begin);
  }

  __device__ __forceinline__ void store(float* out, float* state) {
#pragma unroll
    for (uint32_t q = 0; q < kQueries; ++q) {
      float sum = sum_[q];
#pragma unroll
      for (uint32_t x = 1; x < 32; x *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, x);
      if (lane_ == 0) {
        state[2 * q] = max_[q];
        state[2 * q + 1] = sum;
      }
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i) out[q * Shares::kOutPitch + lane_ + 32 * i] = out_[q][i];
    }
  }

 private:
  __device__ __forceinline__ void unit(uint32_t begin) {
    const uint32_t row = share_.row_at(begin + lane_, last_);
    float s[kQueries];
#pragma unroll
    for (uint32_t q = 0; q < kQueries; ++q) s[q] = 0.0f;
    if (row != kNoRow) {
      const float* key = share_.key(row);
      if constexpr (Dim % 4 == 0) {
#pragma unroll 4
        for (uint32_t d = 0; d < Dim; d += 4) {
          const float4 k = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
          for (uint32_t q = 0; q < kQueries; ++q) {
            const float4 x = *reinterpret_cast<const float4*>(queries_ + q * Shares::kPadded + d);
            s[q] = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, fmaf(x.x, k.x, s[q]))));
          }
        }
      } else {
#pragma unroll 4
        for (uint32_t d = 0; d < Dim; ++d)
#pragma unroll
          for (uint32_t q = 0; q < kQueries; ++q) s[q] = fmaf(queries_[q * Shares::kPadded + d], key[d], s[q]);
      }
    }
#pragma unroll
    for (uint32_t q = 0; q < kQueries; ++q) {
      const float score = begin + lane_ < limit_[q] && (!Window || begin + lane_ >= from_[q]) ? s[q] * share_.scale : -INFINITY;
      float highest = score;
#pragma unroll
      for (uint32_t x = 1; x < 32; x *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, x));
      const float now = fmaxf(max_[q], highest);
      const float base = now == -INFINITY ? 0.0f : now;
      const float factor = expf(max_[q] - base);
      s[q] = expf(score - base);
      max_[q] = now;
      sum_[q] = fmaf(sum_[q], factor, s[q]);
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i) out_[q][i] *= factor;
    }
    const uint32_t count = last_ - begin < kKeys ? last_ - begin : kKeys;
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
      const uint32_t of_key = __shfl_sync(0xFFFFFFFFu, row, j);
      float p[kQueries];
#pragma unroll
      for (uint32_t q = 0; q < kQueries; ++q) p[q] = __shfl_sync(0xFFFFFFFFu, s[q], j);
      if (of_key == kNoRow) continue;
      const float* value = share_.value(of_key);
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i) {
        const uint32_t d = lane_ + 32 * i;
        const float v = Dim % 32 == 0 || d < Dim ? value[d] : 0.0f;
#pragma unroll
        for (uint32_t q = 0; q < kQueries; ++q) out_[q][i] = fmaf(p[q], v, out_[q][i]);
      }
    }
  }

  const Shares& share_;
  const uint32_t lane_;
  const float* queries_ = nullptr;
  uint32_t last_ = 0;
  uint32_t limit_[kQueries];
  uint32_t from_[kQueries]; /* only with a window */
  float max_[kQueries], sum_[kQueries];
  float out_[kQueries][kLaneDims];
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
