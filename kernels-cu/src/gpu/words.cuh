/* Reading flagged words (MPK_F32_FLAGGED) that ranks have pushed (push.cuh). */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

/* Two adjacent words, aligned to 16. Relaxed, system scope: a word carries its own flag, and each of them is read in one access. */
__device__ __forceinline__ void load_words(uint64_t& first, uint64_t& second, const uint64_t* from) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1},[%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

/* Whether all words of a task have arrived: `World` summands of the rows in use, in the view [World, rows, columns], which is the task's
 * first input. All lanes of a warp get the same. `rows_kind`: as in mpk_reduce_params. */
template <uint32_t World>
__device__ __forceinline__ bool words_arrived(const TaskSlot& slot, uint32_t rows_kind, uint32_t lane) {
  const mpk_operand& receive = slot.operands[0];
  /* As rows_in_use_from. */
  const uint32_t first = static_cast<uint32_t>(slot.task.args[0]), end = first + receive.dims[1];
  const uint32_t used = rows_kind == 0 ? slot.num_rows : rows_kind == 1 ? slot.num_samples : end;
  const uint32_t rows = used > first ? min(used, end) - first : 0;
  const uint32_t columns = receive.dims[2], total = World * rows * columns;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(receive.addr);
  constexpr uint32_t kBatch = 4;
  /* From the end: the last rank's words and the last rows usually arrive last. */
  for (uint32_t done = 0; done < total; done += 32 * kBatch) {
    uint64_t seen[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t back = done + b * 32 + lane;
      const uint32_t i = total - 1 - (back < total ? back : 0);
      const uint32_t row = i / columns % rows, rank = i / columns / rows;
      seen[b] = platform::load<platform::Scope::kSystem>(
          words + static_cast<uint64_t>(rank) * receive.strides[0] + static_cast<uint64_t>(row) * receive.strides[1] + i % columns, platform::kRelaxed);
    }
    bool all = true;
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) all = all && mpk_flagged_arrived(seen[b], slot.tag);
    if (!__all_sync(0xFFFFFFFFu, all)) return false;
  }
  return true;
}

}  // namespace gpu
}  // namespace mpk
