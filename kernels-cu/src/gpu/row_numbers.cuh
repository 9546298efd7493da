/* Numbers of a row in registers: how they are loaded, computed, and stored to shared memory. */
#pragma once

#include "gpu/loads.cuh"
#include "gpu/numbers.cuh"

namespace mpk {
namespace gpu {

/* The ways to compute a row from x. */
enum RowSource : uint32_t {
  kPlain = 0,
  kRmsNorm = 1, /* times the norm weight */
  kSiluMul = 2, /* silu(first half) * second half */
};

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (uint32_t distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
  return v;
}

/* `Count` numbers as they are in memory: 8 bytes or a multiple of 16. */
template <uint32_t Dtype, uint32_t Count>
struct Numbers {
  uint32_t words[Count * kNumberBytes<Dtype> / 4];

  __device__ __forceinline__ void load(uint64_t address) {
    static_assert(sizeof(words) == 16, "one load");
    const uint4 v = load_global16(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  /* From global or shared memory. */
  __device__ __forceinline__ void load_generic(const uint8_t* p) {
    if constexpr (sizeof(words) == 8) {
      asm volatile("ld.v2.u32 {%0,%1},[%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(p));
    } else {
#pragma unroll
      for (uint32_t i = 0; i < sizeof(words) / 4; i += 4)
        asm volatile("ld.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3]) : "l"(p + i * 4));
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 4; ++i) words[i] = 0;
  }
  __device__ __forceinline__ void values(float (&v)[Count]) const {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 4; ++i) {
      if constexpr (Dtype == MPK_F32) {
        v[i] = __uint_as_float(words[i]);
      } else if constexpr (Dtype == MPK_BF16) {
        v[i * 2] = __uint_as_float(words[i] << 16);
        v[i * 2 + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        v[i * 2] = pair.x;
        v[i * 2 + 1] = pair.y;
      }
    }
  }
};

/* Stores adjacent numbers of a row to shared memory, if `valid`. In assembly, because a branch around each store
 * would be half of the code. */
template <uint32_t Weight, uint32_t Count>
__device__ __forceinline__ void put_numbers(uint32_t address, const float (&v)[Count], bool valid) {
  uint32_t words[Count * kNumberBytes<Weight> / 4];
#pragma unroll
  for (uint32_t i = 0; i < sizeof(words) / 4; ++i) {
    if constexpr (Weight == MPK_F32) words[i] = __float_as_uint(v[i]);
    else words[i] = packed<Weight>(v[i * 2], v[i * 2 + 1]);
  }
  const uint32_t wanted = valid;
  if constexpr (sizeof(words) == 8) {
    asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; @p st.shared.v2.u32 [%0],{%1,%2};}" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(wanted) : "memory");
  } else {
#pragma unroll
    for (uint32_t i = 0; i < sizeof(words) / 4; i += 4)
      asm volatile("{.reg .pred p; setp.ne.u32 p,%5,0; @p st.shared.v4.u32 [%0],{%1,%2,%3,%4};}" ::"r"(address + i * 4), "r"(words[i]),
                   "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]), "r"(wanted) : "memory");
  }
}

/* gate = silu(gate) * up. For 2-byte weights, four gates share a reciprocal, because the special functions limit
 * the rate. The error is negligible for gates above -20, and below 1e-8 of the gate otherwise. */
template <uint32_t Weight, uint32_t Count>
__device__ __forceinline__ void silu_mul(float (&gate)[Count], const float (&up)[Count]) {
#pragma unroll
  for (uint32_t i = 0; i < Count; i += 4) {
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

}  // namespace gpu
}  // namespace mpk
