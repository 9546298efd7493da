/* How a row of the cache, the key or value of a position, lies in memory.
 *
 * In shared memory, rows of a multiple of 128 bytes all begin in the same bank. Chunks of 16 bytes are therefore permuted: chunk c of
 * position p is in place c ^ (p % 8). The products' fragments are then read without bank conflicts, by ldmatrix and by wgmma with a
 * swizzle of 128 bytes, and copies from global to shared memory need not know about it. The tasks that write or read the cache do.
 * On an H200, 8B takes 1.1 % less at batch 8 and 1.6 % less at batch 128 than with ordinary loads, and their 4-way conflicts. */
#pragma once

#include <stdint.h>

namespace mpk {
namespace gpu {
namespace attention {

template <uint32_t ElementBytes, uint32_t Dim, uint32_t PageSize>
struct CacheLayout {
  /* A row's index in the cache and its position agree in their last three bits. */
  static constexpr bool kPermuted = ElementBytes == 2 && Dim % 64 == 0 && PageSize % 8 == 0;
  /* By what element numbers of a row of this position, or index, differ from their places. */
  static __device__ __forceinline__ uint32_t flipped(uint32_t position) { return kPermuted ? position % 8 * 8 : 0; }
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
