/* Everything that a task type's gpu.cuh needs; see context.cuh for the rules. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/push.cuh"

namespace mpk {
namespace gpu {

/* A variant that is not in the table. The host never launches one, so the MPK_GAP instructions only move the code after them. Which
 * parts of the code share the sets of the instruction cache depends on that (knob code.gap). */
__device__ __forceinline__ int no_code() {
#pragma unroll
  for (int i = 0; i < MPK_GAP; ++i) __nanosleep(1);
  return MPK_ABORT_KERNEL;
}

}  // namespace gpu
}  // namespace mpk

/* The generated jump tables, inlined into the warps that use them. */
#define MPK_DISPATCH static __device__ __forceinline__
