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
  __device__ __forceinline__ void load_generic(const uint8_t* p) {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 16; ++i)
      asm volatile("ld.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w) : "l"(p + i * 16));
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

__device__ __forceinline__ float silu(float gate) { return gate / (1.0f + expf(-gate)); }

__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v));
  return r;
}

/* gate = silu(gate) * up. For 2-byte weights four gates share a reciprocal: the special functions are what limits the
 * rate. That is exact enough for gates above -20, and less than 1e-8 of the gate off below. */
template <uint32_t Weight>
__device__ __forceinline__ void silu_mul(float (&gate)[16], const float (&up)[16]) {
#pragma unroll
  for (uint32_t i = 0; i < 16; i += 4) {
    if constexpr (Weight == MPK_F32) {
#pragma unroll
      for (uint32_t j = i; j < i + 4; ++j) gate[j] = silu(gate[j]) * up[j];
    } else {
      float d[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) d[j] = 1.0f + __expf(fminf(-gate[i + j], 20.0f));
      const float low = d[0] * d[1], high = d[2] * d[3], all = reciprocal(low * high), low_inverse = all * high, high_inverse = all * low;
      gate[i] *= low_inverse * d[1] * up[i];
      gate[i + 1] *= low_inverse * d[0] * up[i + 1];
      gate[i + 2] *= high_inverse * d[3] * up[i + 2];
      gate[i + 3] *= high_inverse * d[2] * up[i + 3];
    }
  }
}

/* Where the rows come from, and how they are spread over the threads. MostK: columns of the left side at most, for what
 * is held in registers; their number is known at run time only, so that products of many shapes share the code. */
template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t X, uint32_t Norm>
class LeftSide {
  static constexpr uint32_t kMostBlocks = (MostK + 15) / 16;

 public:
  /* Blocks of a row that each thread of `Warps` warps holds in registers between sum of squares and norm. */
  template <uint32_t Warps>
  static constexpr uint32_t kHeld = (kMostBlocks + Warps * 32 - 1) / (Warps * 32);
  /* In at most 64 registers. */
  template <uint32_t Warps>
  static constexpr bool kCanHold = kHeld<Warps> * sizeof(Sixteen<X>) <= 256;
  /* Warps to a row where there are many. */
  static constexpr uint32_t kFewWarps = kHeld<4> * sizeof(Sixteen<X>) <= 128 ? 4 : 8;
  /* Shared memory for the norm weight of `k` columns, which is fetched before the task's events. */
  static __device__ __forceinline__ uint32_t norm_bytes(uint32_t k) { return Source == kRmsNorm && k % 16 == 0 ? k * kNumberBytes<Norm> : 0; }
  /* Shared floats for the norms of up to 32 rows: parts of the sums of squares, then the scales. */
  static constexpr uint32_t kNormFloats = 64;

  /* `weight`: the weight's number among the inputs. `shared`: kNormFloats floats. `norm`: norm_bytes(k) bytes, or NULL. */
  __device__ __forceinline__ LeftSide(Context& context, uint32_t weight, float* shared, uint8_t* norm)
      : context_(context), weight_(weight), sums_(shared), scales_(shared + 32) {
    wide_ = k() % 16 == 0 && ((context.input(0).addr | static_cast<uint64_t>(context.input(0).strides[0]) * kNumberBytes<X>) & 15) == 0;
    if constexpr (Source == kRmsNorm) {
      const uint64_t address = context.input(1).addr;
      wide_ = wide_ && (address & 15) == 0;
      norm_ = norm != nullptr && wide_ ? norm : reinterpret_cast<const uint8_t*>(address);
    }
  }

  /* Begins to bring the norm weight to where the constructor was told. */
  __device__ __forceinline__ void fetch_norm() const {
    if constexpr (Source == kRmsNorm) {
      const uint64_t from = context_.input(1).addr;
      if (norm_ == reinterpret_cast<const uint8_t*>(from)) return;
      for (uint32_t at = context_.thread * 16; at < norm_bytes(k()); at += kComputeThreads * 16)
        asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(norm_ + at)), "l"(from + at) : "memory");
    }
  }
  /* The thread's part of it is there; before a barrier. */
  static __device__ __forceinline__ void norm_fetched() {
    if constexpr (Source == kRmsNorm) asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /* Puts rows [first, first + rows) whole at `to`, if a row's x fits the registers of the warps that share it: `done`
   * tells. Each x is read once. */
  __device__ __forceinline__ int put_held(uint32_t first, uint32_t rows, uint8_t* to, uint32_t row_bytes, bool& done) {
    done = false;
    if constexpr (Source == kRmsNorm && kCanHold<kComputeWarps>) {
      if (!wide_ || k() == 0) return MPK_OK;
      done = true;
      if (rows == 1) return norm_held<8, 1>(first, rows, to, row_bytes);
      return norm_held<kFewWarps, kFewWarps>(first, rows, to, row_bytes);
    }
    return MPK_OK;
  }

  /* What `put` needs of rows [first, first + rows), at most 32: the norm's factor of each. */
  __device__ __forceinline__ int prepare(uint32_t first, uint32_t rows) {
    if constexpr (Source == kRmsNorm) {
      const uint32_t warps = rows > 4 ? 1 : rows > 2 ? 2 : rows == 2 ? 4 : 8; /* to a row */
      for (uint32_t row = context_.warp / warps; row < rows; row += kComputeWarps / warps) {
        const float squares = sum_of_warp(squares_of(row_at(first + row), context_.warp % warps * 32 + context_.lane, warps * 32));
        if (context_.lane == 0) sums_[row * warps + context_.warp % warps] = squares;
      }
      norm_fetched();
      if (const int code = context_.sync(); code != MPK_OK) return code;
      if (context_.thread < rows) {
        float squares = 0.0f;
        for (uint32_t w = 0; w < warps; ++w) squares += sums_[context_.thread * warps + w];
        scales_[context_.thread] = scale_of(squares);
      }
      return context_.sync();
    }
    return MPK_OK;
  }

  /* Puts blocks [first_block, first_block + blocks) of rows [first, first + rows) at `to`. */
  __device__ __forceinline__ void put(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to, uint32_t row_bytes) const {
    if (wide_ && Source != kRmsNorm && rows == 1)
      put_wide<4, true>(first, rows, first_block, blocks, to, row_bytes);
    else if (wide_)
      put_wide<kItemBytes <= 48 ? 8 : 384 / kItemBytes, false>(first, rows, first_block, blocks, to, row_bytes); /* in at most 96 registers */
    else
      put_narrow(first, rows, first_block, blocks, to, row_bytes);
  }

 private:
  /* Read where they are needed, from shared memory: the registers are for the rows. */
  __device__ __forceinline__ uint32_t k() const { return reread(context_.input(weight_).dims[1]); }
  __device__ __forceinline__ uint32_t num_blocks() const { return (k() + 15) / 16; }

  __device__ __forceinline__ uint64_t row_at(uint32_t row) const {
    if (reread(context_.template params<mpk_linear_params>().gather_samples) != 0) row = static_cast<uint32_t>(context_.batch()->sample_row[row]);
    const mpk_operand& x = context_.input(0);
    return reread(x.addr) + static_cast<uint64_t>(row) * reread(x.strides[0]) * kNumberBytes<X>;
  }

  __device__ __forceinline__ float scale_of(float squares) const {
    return rsqrtf(fmaf(squares, __frcp_rn(static_cast<float>(k())), context_.template params<mpk_linear_params>().eps));
  }

  static __device__ __forceinline__ float add_squares(float squares, const Sixteen<X>& x) {
    float v[16];
    x.values(v);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) squares = fmaf(v[i], v[i], squares);
    return squares;
  }

  static __device__ __forceinline__ void put_normed(uint8_t* at, const Sixteen<X>& x, const Sixteen<Norm>& norm, float scale) {
    float v[16], weights[16];
    x.values(v);
    norm.values(weights);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) v[i] = v[i] * scale * weights[i];
    put_block<Weight>(at, v);
  }

  /* One thread's part of a row's sum of squares: every `step`-th block, or element, from `at` on. */
  __device__ __forceinline__ float squares_of(uint64_t from, uint32_t at, uint32_t step) const {
    float squares = 0.0f;
    if (wide_) {
      constexpr uint32_t kBatch = 4;
      for (uint32_t block = at, blocks = num_blocks(); block < blocks; block += step * kBatch) {
        Sixteen<X> x[kBatch];
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
          x[j].clear();
          if (block + j * step < blocks) x[j].load(from + (block + j * step) * (16 * kNumberBytes<X>));
        }
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) squares = add_squares(squares, x[j]);
      }
    } else {
      for (uint32_t i = at; i < k(); i += step) {
        const float v = load_as_f32(reinterpret_cast<const void*>(from), X, i);
        squares = fmaf(v, v, squares);
      }
    }
    return squares;
  }

  /* `Warps` warps to a row, and so kRound rows in a round; the loads of as many rounds at once as 128 registers hold, up to
   * `Rounds`. At most 8 rows. */
  template <uint32_t Warps, uint32_t Rounds>
  __device__ __forceinline__ int norm_held(uint32_t first, uint32_t rows, uint8_t* to, uint32_t row_bytes) {
    constexpr uint32_t kCount = kHeld<Warps>, kRound = kComputeWarps / Warps;
    constexpr uint32_t kFitting = 512 / (kCount * sizeof(Sixteen<X>));
    constexpr uint32_t kTogether = kFitting < 1 ? 1 : kFitting >= Rounds ? Rounds : kFitting < 4 ? kFitting : 4;
    constexpr bool kOneSet = kTogether * kRound >= 8;
    static_assert((kOneSet ? 1 : 2) * kTogether * kComputeWarps <= kNormFloats, "the sums of two sets of rounds");
    const uint32_t at = context_.warp % Warps * 32 + context_.lane;
    uint32_t set = 0;
    for (uint32_t begin = 0; begin < rows; begin += kTogether * kRound, ++set) {
      Sixteen<X> x[kTogether][kCount];
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        const uint32_t row = begin + r * kRound + context_.warp / Warps;
        const uint64_t from = row < rows ? row_at(first + row) : 0;
#pragma unroll
        for (uint32_t j = 0; j < kCount; ++j) {
          const uint32_t block = at + j * Warps * 32;
          x[r][j].clear();
          if (row < rows && block < num_blocks()) x[r][j].load(from + block * (16 * kNumberBytes<X>));
        }
      }
      /* Sets take turns with two parts of the sums: one barrier a set. */
      float* const sums = sums_ + (kOneSet ? 0 : set % 2 * kTogether * kComputeWarps);
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        if (begin + r * kRound >= rows) continue;
        float squares = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < kCount; ++j) squares = add_squares(squares, x[r][j]);
        squares = sum_of_warp(squares);
        if (context_.lane == 0) sums[r * kComputeWarps + context_.warp] = squares;
      }
      norm_fetched();
      if (const int code = context_.sync(); code != MPK_OK) return code;
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        const uint32_t row = begin + r * kRound + context_.warp / Warps;
        if (row >= rows) continue;
        float squares = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < Warps; ++w) squares += sums[r * kComputeWarps + context_.warp / Warps * Warps + w];
        const float scale = scale_of(squares);
#pragma unroll
        for (uint32_t j = 0; j < kCount; ++j) {
          const uint32_t block = at + j * Warps * 32;
          if (block < num_blocks()) {
            Sixteen<Norm> norm;
            norm.load_generic(norm_ + block * (16 * kNumberBytes<Norm>));
            put_normed(to + row * row_bytes + block * kRowBlockBytes<Weight>, x[r][j], norm, scale);
          }
        }
      }
    }
    return MPK_OK;
  }

  static constexpr uint32_t kItemBytes = sizeof(Sixteen<X>) * (Source == kSiluMul ? 2 : 1) + (Source == kRmsNorm ? sizeof(Sixteen<Norm>) : 0);

  /* Whole blocks, 16 bytes at a time; all loads of a thread's batch before the first use. */
  template <uint32_t kBatch, bool OneRow>
  __device__ __forceinline__ void put_wide(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to,
                                           uint32_t row_bytes) const {
    const uint32_t items = OneRow ? blocks : rows * blocks;
#pragma unroll 1
    for (uint32_t item = context_.thread; item < items; item += kComputeThreads * kBatch) {
      Sixteen<X> x[kBatch], up[Source == kSiluMul ? kBatch : 1];
      Sixteen<Norm> norm[Source == kRmsNorm ? kBatch : 1];
      uint32_t row[kBatch], block[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t i = item + j * kComputeThreads;
        row[j] = OneRow || rows == 1 ? 0 : i / blocks;
        block[j] = i - row[j] * blocks;
        /* Registers that are written on one path only would stay alive around all loops. */
        x[j].clear();
        if constexpr (Source == kSiluMul) up[j].clear();
        if constexpr (Source == kRmsNorm) norm[j].clear();
        if (i < items) {
          const uint64_t from = row_at(first + row[j]) + (first_block + block[j]) * (16 * kNumberBytes<X>);
          x[j].load(from);
          if constexpr (Source == kSiluMul) up[j].load(from + k() * kNumberBytes<X>);
          if constexpr (Source == kRmsNorm) norm[j].load_generic(norm_ + (first_block + block[j]) * (16 * kNumberBytes<Norm>));
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        if (item + j * kComputeThreads < items) {
          uint8_t* at = to + row[j] * row_bytes + block[j] * kRowBlockBytes<Weight>;
          if constexpr (Source == kRmsNorm) {
            put_normed(at, x[j], norm[j], scales_[row[j]]);
          } else if constexpr (Source == kPlain && X == Weight && Weight != MPK_F32) {
            const uint4 low = x[j].words[0], high = x[j].words[1];
            reinterpret_cast<uint4*>(at)[0] = make_uint4(low.x, high.x, low.y, high.y);
            reinterpret_cast<uint4*>(at)[1] = make_uint4(low.z, high.z, low.w, high.w);
          } else {
            float v[16];
            x[j].values(v);
            if constexpr (Source == kSiluMul) {
              float other[16];
              up[j].values(other);
              silu_mul<Weight>(v, other);
            }
            put_block<Weight>(at, v);
          }
        }
      }
    }
  }

  /* Any K and any alignment. */
  __device__ __forceinline__ void put_narrow(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to,
                                             uint32_t row_bytes) const {
    const uint32_t columns = blocks * 16;
    for (uint32_t i = context_.thread; i < rows * columns; i += kComputeThreads) {
      const uint32_t row = i / columns, column = i - row * columns, at = first_block * 16 + column;
      float v = 0.0f;
      if (at < k()) {
        const void* from = reinterpret_cast<const void*>(row_at(first + row));
        v = load_as_f32(from, X, at);
        if constexpr (Source == kRmsNorm) v = v * scales_[row] * load_as_f32(norm_, Norm, at);
        if constexpr (Source == kSiluMul) v = silu(v) * load_as_f32(from, X, k() + at);
      }
      put_element<Weight>(to + row * row_bytes + column / 16 * kRowBlockBytes<Weight>, at % 16, v);
    }
  }

  Context& context_;
  uint32_t weight_;
  float *sums_, *scales_;
  const uint8_t* norm_ = nullptr; /* in global or shared memory */
  bool wide_;
};

}  // namespace gpu
}  // namespace mpk
