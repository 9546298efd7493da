/* Just enough of CUDA's language and half-precision types to run kernels-cu/src/gpu/weights.cuh on the host, in
 * one thread. The compiler does the conversions, which round to nearest even. */
#pragma once

#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __launch_bounds__(x)

struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  uint32_t x;
};
static const Index blockIdx = {0}, threadIdx = {0}, gridDim = {1}, blockDim = {1};

struct __half {
  _Float16 value;
};
static inline float __half2float(__half v) { return static_cast<float>(v.value); }
static inline __half __float2half_rn(float v) { return __half{static_cast<_Float16>(v)}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
static inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return __nv_bfloat16{static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
