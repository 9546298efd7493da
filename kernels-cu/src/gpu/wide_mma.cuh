/* Products of a warpgroup on Hopper's tensor cores (wgmma): 64 rows of a weight, from registers in the order of
 * MPK_LAYOUT_FRAGMENT, times N tokens that lie in shared memory as a tile of MPK_LAYOUT_WIDE. */
#pragma once

#include <stdint.h>

#include "mpk/abi.h"

namespace mpk {
namespace gpu {

/* Descriptor of the right side at `address` (aligned to 1024): rows of 128 bytes with the 128-byte swizzle, eight rows every
 * 1,024 bytes. Add 2 for each 16 columns. */
__device__ __forceinline__ uint64_t wide_descriptor(uint32_t address) {
  return (static_cast<uint64_t>(address & 0x3FFFFu) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

/* The same for column tiles of 16 (aligned to 256): rows of 32 bytes with the 32-byte swizzle, eight rows every 256 bytes. */
__device__ __forceinline__ uint64_t narrow_descriptor(uint32_t address) {
  return (static_cast<uint64_t>(address & 0x3FFFFu) >> 4) | (1ull << 16) | (16ull << 32) | (3ull << 62);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MPK_SUMS_8(i) \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
/* Starts sum += a * b. It is complete after wgmma_wait. */
#define MPK_WGMMA_32(type)                                                                                                    \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31},{%32,%33,%34,%35},%36,p,1,1,0;}"                                                                                  \
      : MPK_SUMS_8(0), MPK_SUMS_8(8), MPK_SUMS_8(16), MPK_SUMS_8(24)                                                          \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))
#define MPK_WGMMA_64(type)                                                                                                    \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                          \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
      "%60,%61,%62,%63},{%64,%65,%66,%67},%68,p,1,1,0;}"                                                                      \
      : MPK_SUMS_8(0), MPK_SUMS_8(8), MPK_SUMS_8(16), MPK_SUMS_8(24), MPK_SUMS_8(32), MPK_SUMS_8(40), MPK_SUMS_8(48),         \
        MPK_SUMS_8(56)                                                                                                        \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

#define MPK_WGMMA_16(type)                                                                                                    \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},%20,p,1,1,0;}"                              \
      : MPK_SUMS_8(0), MPK_SUMS_8(8)                                                                                          \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

#define MPK_WGMMA_8(type)                                                                                                     \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,p,1,1,0;}"                                                              \
      : MPK_SUMS_8(0)                                                                                                         \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

template <uint32_t Weight>
__device__ __forceinline__ void wgmma(float (&sum)[8], const uint4& a, uint64_t b) {
  if constexpr (Weight == MPK_BF16) MPK_WGMMA_8("bf16");
  else MPK_WGMMA_8("f16");
}
template <uint32_t Weight>
__device__ __forceinline__ void wgmma(float (&sum)[16], const uint4& a, uint64_t b) {
  if constexpr (Weight == MPK_BF16) MPK_WGMMA_16("bf16");
  else MPK_WGMMA_16("f16");
}
template <uint32_t Weight>
__device__ __forceinline__ void wgmma(float (&sum)[32], const uint4& a, uint64_t b) {
  if constexpr (Weight == MPK_BF16) MPK_WGMMA_32("bf16");
  else MPK_WGMMA_32("f16");
}
template <uint32_t Weight>
__device__ __forceinline__ void wgmma(float (&sum)[64], const uint4& a, uint64_t b) {
  if constexpr (Weight == MPK_BF16) MPK_WGMMA_64("bf16");
  else MPK_WGMMA_64("f16");
}
#undef MPK_WGMMA_8
#undef MPK_WGMMA_16
#undef MPK_WGMMA_32
#undef MPK_WGMMA_64
#undef MPK_SUMS_8

/* Needed between writes to registers and products that read these registers. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products. */
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most the latest `Groups` groups are still running. */
template <uint32_t Groups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}
#endif

}  // namespace gpu
}  // namespace mpk
