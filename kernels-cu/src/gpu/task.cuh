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

/* Runs a variant. With MPK_FUNCTIONS (knob code.functions), those that need not be inlined are functions. The compiler takes longer for
 * the code of one function than for the same code in several. A function makes its own context, so that the context of inlined code
 * stays in registers. */
template <class Code>
__device__ __noinline__ int run_in_function(const TaskSlot* slot) {
  Context context(slot);
  return Code::run(context);
}
template <class Code>
__device__ __forceinline__ int run_variant(Context& context) {
  if constexpr (MPK_FUNCTIONS != 0 && !Code::kInlined) return run_in_function<Code>(context.slot);
  else return Code::run(context);
}

}  // namespace gpu
}  // namespace mpk

/* The generated jump tables, inlined into the warps that use them. */
#define MPK_DISPATCH static __device__ __forceinline__
