/* The kernel: one block per worker. Each warp runs its role until the run has stopped. Included after the jump tables
 * run_code, load_code, bring_code and ready_code. */
#pragma once

#include "gpu/compute.cuh"
#include "gpu/fetch.cuh"
#include "gpu/spare.cuh"
#include "gpu/weights.cuh"

namespace mpk {
namespace gpu {

/* Takes registers from the four serving warps and gives them to the compute warps, in groups of four warps. A kernel
 * variant that spills less reads less from a busy memory. 384 x 168 = 128 x kServingRegisters + 256 x
 * kComputeRegisters. */
constexpr uint32_t kServingRegisters = 88, kComputeRegisters = (kBlockThreads * 168 - (kBlockThreads - kComputeThreads) * kServingRegisters) / kComputeThreads;
__device__ __forceinline__ void divide_registers(uint32_t warp) {
#if __CUDA_ARCH__ >= 900
  if (warp < kComputeWarps) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kServingRegisters));
#endif
}

}  // namespace gpu
}  // namespace mpk

extern "C" __global__ void __launch_bounds__(mpk::gpu::kBlockThreads, 1) mpk_persistent(const mpk_rank* description) {
  using namespace mpk::gpu;
  Shared& shared = shared_state();
  const uint32_t thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  static_assert(sizeof(mpk_rank) % 4 == 0, "copied as words");
  for (uint32_t i = thread; i < sizeof(mpk_rank) / 4; i += kBlockThreads)
    reinterpret_cast<uint32_t*>(&shared.rank)[i] = reinterpret_cast<const uint32_t*>(description)[i];
  /* The addresses in mpk_batch are constant. What comes before them belongs to an iteration. */
  static_assert(offsetof(mpk_batch, row_token) % 4 == 0 && sizeof(mpk_batch) % 4 == 0, "copied as words");
  for (uint32_t i = offsetof(mpk_batch, row_token) / 4 + thread; i < sizeof(mpk_batch) / 4; i += kBlockThreads)
    reinterpret_cast<uint32_t*>(&shared.batch)[i] = reinterpret_cast<const uint32_t*>(description->batch)[i];
  for (uint32_t i = thread; i < kMostRanks; i += kBlockThreads) shared.ring_heads[i] = 0;
  if (thread == 0) {
    shared.code = MPK_OK;
    shared.left = 0;
    shared.next_slot = shared.next_stage = shared.next_place = {0, 0};
    shared.wide_begun = 0;
    shared.lent_count = shared.returned_count = shared.bring_begun = shared.brought = 0;
    shared.peer_ns = shared.page_ns = 0;
    if constexpr (mpk::platform::kTraces) {
      shared.traced = description->trace != nullptr ? description->trace_count[blockIdx.x] : 0;
      for (uint32_t i = 0; i < kSlots; ++i) shared.times[i].unrecorded = 0;
    }
    shared.streamed = 0;
    shared.ring_is_full = 0;
    shared.needs_noise = 0;
    shared.published = 0;
    shared.fetched.graph = nullptr;
    shared.fetched.number = 0;
    if constexpr (kTellsState) shared.compute_state = kIsWaiting;
    shared.pages_per_slot = description->batch_config->pages_per_slot;
    shared.kept_active = description->batch_config->max_batch < kKeptActive ? description->batch_config->max_batch : kKeptActive;
    for (uint32_t i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.stage_full[i], kStageArrivals);
      mbarrier_init(&shared.stage_empty[i], kEmptyArrivals);
    }
    for (uint32_t i = 0; i < kPlaces; ++i) {
      mbarrier_init(&shared.place_full[i], kStageArrivals);
      mbarrier_init(&shared.place_empty[i], kEmptyArrivals);
    }
    for (uint32_t i = 0; i < kSlots; ++i) {
      mbarrier_init(&shared.slot_full[i], kSlotFullArrivals);
      mbarrier_init(&shared.slot_empty[i], kSlotEmptyArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const mpk_rank* rank = &shared.rank;
  const uint32_t block = blockIdx.x;
  divide_registers(warp);
  if (warp < kComputeWarps) {
    compute_loop(rank, block);
  } else if (warp == kFetchWarp) {
    fetch_loop(rank, block, lane);
  } else if (warp == kLoadWarp || warp == kPrefetchWarp) {
    load_loop(lane, warp == kPrefetchWarp);
  } else {
    spare_loop(rank, block, lane, shared.ring_heads);
  }
}
