/* The two products of attention on Hopper's tensor cores, for a warpgroup: 64 queries times a tile of 128 keys, both in shared
 * memory; and their weights in registers times the tile's values in shared memory. Shared memory has rows of 128 bytes, swizzled
 * by 128. */
#pragma once

#include <stdint.h>

#include "mpk/abi.h"

namespace mpk {
namespace gpu {
namespace attention_prefill {

/* Bytes of 64 rows of 64 elements. */
constexpr uint32_t kHalfTile = 64 * 128;

/* The low word of the descriptor of a factor in shared memory. The shuffle tells the compiler that all lanes have the same value, so
 * it uses uniform registers. The factor has groups of 8 rows of 128 bytes, swizzled by 128 bytes. For queries and keys, a row or column
 * of the product is a row in shared memory; the next 16 elements are 32 bytes further. */
__device__ __forceinline__ uint32_t rows_side(uint32_t address) { return __shfl_sync(0xFFFFFFFFu, (address & 0x3FFFFu) >> 4 | 1u << 16, 0); }
/* For values, which are transposed: a column of the product is an element, and a row of the 128 bytes has 64 of them. The next 64 are in
 * the next group; the next 16 positions are in the next two blocks. */
__device__ __forceinline__ uint32_t values_side(uint32_t address) { return __shfl_sync(0xFFFFFFFFu, (address & 0x3FFFFu) >> 4 | 1024u / 16 << 16, 0); }
/* The full descriptor, `bytes` further. `Block`: bytes from a group of 8 rows to that of the next 8 rows or positions. */
template <uint32_t Block>
__device__ __forceinline__ uint64_t descriptor(uint32_t side, uint32_t bytes) {
  return 0x4000000000000000ull | static_cast<uint64_t>(Block / 16) << 32 | (side + bytes / 16);
}

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
#define MPK_WGMMA_SHARED_N128(type)                                                                                           \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,%66,0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
      "%60,%61,%62,%63},%64,%65,p,1,1,0,0;}"                                                                                  \
      : MPK_F32(d, 0), MPK_F32(d, 32)                                                                                         \
      : "l"(a), "l"(b), "r"(add))
#define MPK_WGMMA_N128(type, trans)                                                                                           \
  asm volatile(                                                                                                               \
      "{.reg .pred p; setp.ne.b32 p,%69,0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
      "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
      "%60,%61,%62,%63},{%64,%65,%66,%67},%68,p,1,1," trans ";}"                                                              \
      : MPK_F32(d, 0), MPK_F32(d, 32)                                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

/* Starts d = queries * keys (+ d): 16 elements of 64 queries and 128 keys. */
template <uint32_t Dtype>
__device__ __forceinline__ void times_keys(float (&d)[64], uint64_t a, uint64_t b, uint32_t add) {
  if constexpr (Dtype == MPK_BF16) MPK_WGMMA_SHARED_N128("bf16");
  else MPK_WGMMA_SHARED_N128("f16");
}
/* Starts d = a * values (+ d). `a` is a fragment: 16 weights of 64 queries. */
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
#undef MPK_WGMMA_SHARED_N128
#undef MPK_WGMMA_N128
#undef MPK_WGMMA_N64
#undef MPK_F32
#undef MPK_F8

/* Orders earlier writes of registers before the products that follow. */
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products. */
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most the latest `Groups` groups are in flight. */
template <uint32_t Groups>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}
#endif

/* Keeps the compiler from reading or writing these registers earlier than here. */
template <uint32_t Count>
__device__ __forceinline__ void hold(float (&registers)[Count]) {
#pragma unroll
  for (uint32_t i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

}  // namespace attention_prefill
}  // namespace gpu
}  // namespace mpk
