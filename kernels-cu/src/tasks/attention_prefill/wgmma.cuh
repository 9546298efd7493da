/* The two products of attention on Hopper's tensor cores, for a warpgroup: 64 rows from registers times a tile of keys or
 * values in shared memory. A tile is 64 positions by 128 bytes, swizzled by 128; of a head of 128 elements two tiles follow
 * each other. */
#pragma once

#include <stdint.h>

#include "mpk/abi.h"

namespace mpk {
namespace gpu {
namespace attention_prefill {

/* Bytes of 64 positions and 64 elements. */
constexpr uint32_t kHalfTile = 64 * 128;

/* The right side of a product, as the low word of its descriptor: the same for all lanes as the compiler sees, so that it
 * computes in uniform registers. The high word: rows of eight lie 1,024 bytes apart, swizzled by 128 bytes.
 * Keys: a column of the product is a position; 32 bytes are 16 elements further. */
__device__ __forceinline__ uint32_t keys_side(uint32_t address) { return __shfl_sync(0xFFFFFFFFu, (address & 0x3FFFFu) >> 4 | 1u << 16, 0); }
/* Values, transposed: a column is an element, in groups of 64; 2,048 bytes are 16 positions further. */
__device__ __forceinline__ uint32_t values_side(uint32_t address) {
  return __shfl_sync(0xFFFFFFFFu, (address & 0x3FFFFu) >> 4 | kHalfTile / 16 << 16, 0);
}
/* The descriptor `bytes` after a side. */
__device__ __forceinline__ uint64_t descriptor(uint32_t side, uint32_t bytes) { return 0x4000004000000000ull | (side + bytes / 16); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MPK_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MPK_F32(d, i) MPK_F8(d, i), MPK_F8(d, i + 8), MPK_F8(d, i + 16), MPK_F8(d, i + 24)
#define MPK_WGMMA_N64(type, trans)                                                                                            \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,%37,0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                         \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31},{%32,%33,%34,%35},%36,p,1,1," trans ";}"                                                                          \
      : MPK_F32(d, 0)                                                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define MPK_WGMMA_N128(type, trans)                                                                                           \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,%69,0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
      "%60,%61,%62,%63},{%64,%65,%66,%67},%68,p,1,1," trans ";}"                                                              \
      : MPK_F32(d, 0), MPK_F32(d, 32)                                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* d = a * keys (+ d), begun. `a` is 16 elements of 64 queries as a fragment. */
template <uint32_t Dtype>
__device__ __forceinline__ void times_keys(float (&d)[32], const uint32_t* a, uint64_t b, uint32_t add) {
  if constexpr (Dtype == MPK_BF16) MPK_WGMMA_N64("bf16", "0");
  else MPK_WGMMA_N64("f16", "0");
}
/* d = a * values (+ d), begun. `a` is 16 weights of 64 queries as a fragment. */
template <uint32_t Dtype>
__device__ __forceinline__ void times_values(float (&d)[32], const uint32_t* a, uint64_t b, uint32_t add) {
  if constexpr (Dtype == MPK_BF16) MPK_WGMMA_N64("bf16", "1");
  else MPK_WGMMA_N64("f16", "1");
}
template <uint32_t Dtype>
__device__ __forceinline__ void times_values(float (&d)[64], const uint32_t* a, uint64_t b, uint32_t add) {
  if constexpr (Dtype == MPK_BF16) MPK_WGMMA_N128("bf16", "1");
  else MPK_WGMMA_N128("f16", "1");
}
#undef MPK_WGMMA_N128
#undef MPK_WGMMA_N64
#undef MPK_F32
#undef MPK_F8

/* Registers written before this may be operands of the products after it. */
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products. */
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Until at most `Groups` of the groups, the latest, are under way. */
template <uint32_t Groups>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}
#endif

/* The compiler may not read or write these registers earlier than here. */
template <uint32_t Count>
__device__ __forceinline__ void hold(float (&registers)[Count]) {
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

}  // namespace attention_prefill
}  // namespace gpu
}  // namespace mpk
