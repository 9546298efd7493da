/* Element types by their MPK_ number, and conversions, rounded to nearest even. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mpk/abi.h"

namespace mpk {
namespace gpu {

template <uint32_t Dtype>
struct Number;

template <>
struct Number<MPK_F32> {
  using Type = float;
  static __device__ __forceinline__ float to_f32(float v) { return v; }
  static __device__ __forceinline__ float from_f32(float v) { return v; }
};
template <>
struct Number<MPK_F16> {
  using Type = __half;
  static __device__ __forceinline__ float to_f32(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half from_f32(float v) { return __float2half_rn(v); }
};
template <>
struct Number<MPK_BF16> {
  using Type = __nv_bfloat16;
  static __device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 from_f32(float v) { return __float2bfloat16_rn(v); }
};

template <uint32_t Dtype>
constexpr uint32_t kNumberBytes = Dtype == MPK_F32 ? 4 : 2;

/* The numbers of a pair of 2 bytes each, of which the first is in the low half. */
template <uint32_t Dtype>
__device__ __forceinline__ float low_of(uint32_t pair) {
  if constexpr (Dtype == MPK_BF16) return __uint_as_float(pair << 16);
  else return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}
template <uint32_t Dtype>
__device__ __forceinline__ float high_of(uint32_t pair) {
  if constexpr (Dtype == MPK_BF16) return __uint_as_float(pair & 0xFFFF0000u);
  else return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}
/* Two numbers rounded to such a pair. */
template <uint32_t Dtype>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  if constexpr (Dtype == MPK_BF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

/* Element `i` of an array whose type is known only at run time. */
__device__ __forceinline__ float load_as_f32(const void* p, uint32_t dtype, uint64_t i) {
  if (dtype == MPK_F32) return static_cast<const float*>(p)[i];
  if (dtype == MPK_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}
__device__ __forceinline__ void store_rounded(void* p, uint32_t dtype, uint64_t i, float v) {
  if (dtype == MPK_F32) static_cast<float*>(p)[i] = v;
  else if (dtype == MPK_BF16) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  else static_cast<__half*>(p)[i] = __float2half_rn(v);
}
/* The value that remains after store_rounded. */
__device__ __forceinline__ float rounded_to(uint32_t dtype, float v) {
  if (dtype == MPK_F32) return v;
  return dtype == MPK_BF16 ? __bfloat162float(__float2bfloat16_rn(v)) : __half2float(__float2half_rn(v));
}

/* Neither of these calls a subroutine, unlike divisions of floats and of 16 or 64 bits. In a program that is linked with
 * NVSHMEM's device library, a call follows the platform's convention: what a kernel variant holds in registers around it
 * is spilled, even if the call is not made. */

/* Within 1 unit in the last place; 0 for values above 2^126. */
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v));
  return r;
}
/* a / b, for a below 2^20 and b above 0. */
__device__ __forceinline__ uint32_t quotient(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<float>(a) + 0.5f) * reciprocal(static_cast<float>(b)));
}

/* Relative error about 2^-22; 0 for -infinity. */
__device__ __forceinline__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

__device__ __forceinline__ float silu(float gate) { return gate * reciprocal(1.0f + expf(-gate)); }

/* Index of element (row, k) in a tiled constant matrix (MPK_LAYOUT_FRAGMENT) with `stride` padded columns. */
template <uint32_t Dtype>
__device__ __forceinline__ uint64_t fragment_index(uint32_t row, uint32_t k, uint32_t stride) {
  const uint64_t block = static_cast<uint64_t>(row / 16 * 16) * stride + static_cast<uint64_t>(k / 16) * 256;
  const uint32_t r = row % 16, c = k % 16;
  if constexpr (Dtype == MPK_F32) return block + (c % 8 * 2 + c / 8) * 16 + r;
  return block + ((r % 8 * 4 + c / 4) * 4 + c % 4 / 2 * 2 + r / 8) * 2 + c % 2;
}

}  // namespace gpu
}  // namespace mpk
