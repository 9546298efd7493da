/* Left sides of the linear family: rows of x as they are, normed, or gated, rounded once to the weight's type, laid down
 * in shared memory as linear_product.cuh reads them. */
#pragma once

#include "gpu/linear_product.cuh"
#include "tasks/linear/params.h"

namespace mpk {
namespace gpu {

/* How a row is made of x. */
enum RowSource : uint32_t {
  kPlain = 0,
  kRmsNorm = 1, /* times the norm weight */
  kSiluMul = 2, /* silu(first half) * second half */
};

__device__ __forceinline__ uint4 load_global16(uint64_t address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (uint32_t distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
  return v;
}

/* 16 elements, as they lie in memory. */
template <uint32_t Dtype>
struct Sixteen {
  uint4 words[Dtype == MPK_F32 ? 4 : 2];

  __device__ __forceinline__ void load(uint64_t address) {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 16; ++i) words[i] = load_global16(address + i * 16);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 16; ++i) words[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void values(float (&v)[16]) const {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 16; ++i) {
      const uint32_t w[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if constexpr (Dtype == MPK_F32) {
          v[i * 4 + j] = __uint_as_float(w[j]);
        } else if constexpr (Dtype == MPK_BF16) {
          v[i * 8 + j * 2] = __uint_as_float(w[j] << 16);
          v[i * 8 + j * 2 + 1] = __uint_as_float(w[j] & 0xFFFF0000u);
        } else {
          const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&w[j]));
          v[i * 8 + j * 2] = pair.x;
          v[i * 8 + j * 2 + 1] = pair.y;
        }
      }
    }
  }
};

template <uint32_t Dtype>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  uint32_t bits;
  if constexpr (Dtype == MPK_BF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    bits = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return bits;
}

/* A block of 16 k of a row. */
template <uint32_t Weight>
__device__ __forceinline__ void put_block(uint8_t* at, const float (&v)[16]) {
  if constexpr (Weight == MPK_F32) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t k = i % 2 * 8 + i / 2;
      reinterpret_cast<float4*>(at)[i] = make_float4(v[k], v[k + 2], v[k + 4], v[k + 6]);
    }
  } else {
    uint32_t w[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t k = i % 2 * 8 + i / 2 * 2;
      w[i] = rounded_pair<Weight>(v[k], v[k + 1]);
    }
    reinterpret_cast<uint4*>(at)[0] = make_uint4(w[0], w[1], w[2], w[3]);
    reinterpret_cast<uint4*>(at)[1] = make_uint4(w[4], w[5], w[6], w[7]);
  }
}
template <uint32_t Weight>
__device__ __forceinline__ void put_element(uint8_t* block, uint32_t k, float v) {
  if constexpr (Weight == MPK_F32)
    reinterpret_cast<float*>(block)[k % 2 * 8 + k / 2] = v;
  else
    reinterpret_cast<typename Number<Weight>::Type*>(block)[(k % 8 / 2 * 2 + k / 8) * 2 + k % 2] = Number<Weight>::from_f32(v);
}

template <uint32_t Weight>
__device__ __forceinline__ float silu(float gate) {
  if constexpr (Weight == MPK_F32) return gate / (1.0f + expf(-gate));
  return __fdividef(gate, 1.0f + __expf(-gate));
}

/* Where the rows come from, and how they are spread over the threads. K: columns of the left side. */
template <uint32_t Weight, uint32_t Source, uint32_t K, uint32_t X, uint32_t Norm, bool Gather>
class LeftSide {
 public:
  static constexpr uint32_t kBlocks = (K + 15) / 16;
  /* Blocks of a row that `Warps` warps keep in registers between sum of squares and norm: at most 128 registers. */
  template <uint32_t Warps>
  static constexpr uint32_t kHeld = (kBlocks + Warps * 32 - 1) / (Warps * 32);
  template <uint32_t Warps>
  static constexpr bool kCanHold = K > 0 && K % 16 == 0 && kHeld<Warps> * sizeof(Sixteen<X>) <= 512;
  /* The norm weight's part of a thread, if there is one row: fetched before the task's events. */
  static constexpr bool kAhead = Source == kRmsNorm && kCanHold<kComputeWarps> && kHeld<kComputeWarps> * sizeof(Sixteen<Norm>) <= 128;
  struct Ahead {
    Sixteen<Norm> norm[kAhead ? kHeld<kComputeWarps> : 1];
  };
  /* Shared memory for one row block's norm. */
  static constexpr uint32_t kNormFloats = 64;

  __device__ __forceinline__ LeftSide(const Context& context)
      : x_(context.input(0)), context_(context), row_stride_(static_cast<uint64_t>(x_.strides[0]) * kNumberBytes<X>) {
    if constexpr (Source == kRmsNorm) norm_ = context.input(1).addr;
    wide_ = K % 16 == 0 && ((x_.addr | row_stride_ | norm_) & 15) == 0;
  }

  __device__ __forceinline__ void fetch_ahead(Ahead& ahead, uint32_t rows) const {
    if constexpr (kAhead) {
      if (rows == 1 && wide_) {
#pragma unroll
        for (uint32_t j = 0; j < kHeld<kComputeWarps>; ++j) {
          const uint32_t block = context_.thread + j * kComputeThreads;
          if (block < kBlocks) ahead.norm[j].load(norm_ + block * (16 * kNumberBytes<Norm>));
        }
      }
    }
  }

  /* Rows [first, first + rows) whole, at `to`, if that can be done in one go: up to 8 rows, the x of each held in
   * registers by its warps. Sets `done`. */
  __device__ __forceinline__ int norm_at_once(Context& context, uint32_t first, uint32_t rows, uint8_t* to, uint32_t row_bytes, float* sums,
                                              const Ahead& ahead, bool& done) const {
    done = false;
    if constexpr (Source == kRmsNorm) {
      if (!wide_ || rows > 8) return MPK_OK;
      if constexpr (kCanHold<8>)
        if (rows == 1) return done = true, norm_held<8>(context, first, rows, to, row_bytes, sums, ahead);
      if constexpr (kCanHold<4>)
        if (rows == 2) return done = true, norm_held<4>(context, first, rows, to, row_bytes, sums, ahead);
      if constexpr (kCanHold<2>)
        if (rows == 3 || rows == 4) return done = true, norm_held<2>(context, first, rows, to, row_bytes, sums, ahead);
      if constexpr (kCanHold<1>)
        if (rows > 4) return done = true, norm_held<1>(context, first, rows, to, row_bytes, sums, ahead);
    }
    return MPK_OK;
  }

  /* For `put`: the norm's factor of each row, at sums + 32. Two barriers. */
  __device__ __forceinline__ int find_scales(Context& context, uint32_t first, uint32_t rows, float* sums) const {
    if constexpr (Source == kRmsNorm) {
      const uint32_t warps = rows > 4 ? 1 : rows > 2 ? 2 : rows == 2 ? 4 : 8; /* to a row */
      for (uint32_t row = context.warp / warps; row < rows; row += kComputeWarps / warps) {
        const uint64_t from = row_at(first + row);
        const uint32_t at = context.warp % warps * 32 + context.lane, step = warps * 32;
        float squares = 0.0f;
        if (wide_) {
          constexpr uint32_t kBatch = 4;
          for (uint32_t block = at; block < kBlocks; block += step * kBatch) {
            Sixteen<X> x[kBatch];
#pragma unroll
            for (uint32_t j = 0; j < kBatch; ++j) {
              x[j].clear();
              if (block + j * step < kBlocks) x[j].load(from + (block + j * step) * (16 * kNumberBytes<X>));
            }
#pragma unroll
            for (uint32_t j = 0; j < kBatch; ++j) squares = add_squares(x[j], squares);
          }
        } else {
          for (uint32_t k = at; k < K; k += step) {
            const float v = load_as_f32(reinterpret_cast<const void*>(from), X, k);
            squares = fmaf(v, v, squares);
          }
        }
        squares = sum_of_warp(squares);
        if (context.lane == 0) sums[row * warps + context.warp % warps] = squares;
      }
      if (const int code = context.sync(); code != MPK_OK) return code;
      if (context.thread < rows) {
        float squares = 0.0f;
        for (uint32_t w = 0; w < warps; ++w) squares += sums[context.thread * warps + w];
        sums[32 + context.thread] = scale_of(squares);
      }
      return context.sync();
    }
    return MPK_OK;
  }

  /* Blocks [first_block, first_block + blocks) of rows [first, first + rows). */
  __device__ __forceinline__ void put(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to, uint32_t row_bytes,
                                      const float* sums) const {
    const float* scales = sums + 32;
    if (wide_) {
      put_wide(first, rows, first_block, blocks, to, row_bytes, scales);
      return;
    }
    for (uint32_t i = context_.thread; i < rows * blocks * 16; i += kComputeThreads) {
      const uint32_t row = i / (blocks * 16), k = first_block * 16 + i % (blocks * 16);
      float v = 0.0f;
      if (k < K) {
        const void* from = reinterpret_cast<const void*>(row_at(first + row));
        v = load_as_f32(from, X, k);
        if constexpr (Source == kRmsNorm) v = v * scales[row] * load_as_f32(reinterpret_cast<const void*>(norm_), Norm, k);
        if constexpr (Source == kSiluMul) v = silu<Weight>(v) * load_as_f32(from, X, K + k);
      }
      put_element<Weight>(to + row * row_bytes + (k / 16 - first_block) * kRowBlockBytes<Weight>, k % 16, v);
    }
  }

 private:
  static __device__ __forceinline__ float scale_of(float squares) { return 1.0f / sqrtf(squares / static_cast<float>(K) + context_eps()); }
  static __device__ __forceinline__ float add_squares(const Sixteen<X>& x, float squares) {
    float v[16];
    x.values(v);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) squares = fmaf(v[i], v[i], squares);
    return squares;
  }

  __device__ __forceinline__ uint64_t row_at(uint32_t row) const {
    if constexpr (Gather) row = static_cast<uint32_t>(context_.batch()->sample_row[row]);
    return x_.addr + row * row_stride_;
  }
  const mpk_operand& x_;
  const Context& context_;
  uint64_t row_stride_;
  uint64_t norm_ = 0;
  bool wide_;
};

}  // namespace gpu
}  // namespace mpk
