/* Sizes of a block of the persistent kernel. A block is a worker; there is one on each multiprocessor. The generated
 * source (kernels_cu::gpu) defines the MPK_ names from the hardware table. */
#pragma once

#include <stdint.h>

#include "mpk/abi.h"

namespace mpk {
namespace gpu {

/* Roles of the warps. */
constexpr uint32_t kComputeWarps = 8;
constexpr uint32_t kComputeThreads = kComputeWarps * 32;
constexpr uint32_t kFetchWarp = 8;  /* brings task descriptors into slots */
constexpr uint32_t kLoadWarp = 9;   /* streams constant operands into the ring */
constexpr uint32_t kSpareWarp = 10; /* batch step or scheduler in the first blocks */
constexpr uint32_t kPrefetchWarp = 11; /* constant operands beyond the ring into the L2 cache while nothing else is loaded */
constexpr uint32_t kBlockThreads = 12 * 32;
#ifdef MPK_BLOCK_THREADS
static_assert(kBlockThreads == MPK_BLOCK_THREADS, "the launch starts MPK_BLOCK_THREADS threads a block");
#endif

/* The ring of stages, and how many copies may be in flight: more of them delay every flag that others poll. Fewer still for
 * a task that the compute warps have not come to: then they, or others, trigger or poll at this time. */
constexpr uint32_t kStages = MPK_STAGES;
constexpr uint32_t kStageBytes = MPK_STAGE_BYTES;
constexpr uint32_t kStagesInFlight = MPK_STAGES_IN_FLIGHT;
constexpr uint32_t kStagesAhead = MPK_STAGES_AHEAD;
static_assert(kStagesAhead > 0 && kStagesAhead <= kStagesInFlight && kStagesInFlight <= kStages, "stages in flight");
/* Shared memory that a task's code may use as it likes while it runs. */
constexpr uint32_t kWorkBytes = MPK_WORK_BYTES;

/* The ring of places at the work area's start: activations of wide products. */
constexpr uint32_t kPlaces = 5;
constexpr uint32_t kPlaceBytes = 16 * 1024;

/* Arrivals that complete a stage: the loader's one thread, or without bulk copies all its lanes. */
#if __CUDA_ARCH__ >= 900
constexpr uint32_t kStageArrivals = 1;
#else
constexpr uint32_t kStageArrivals = 32;
#endif

/* Arrivals that free a stage: one lane of each compute warp, after a warp barrier. That fill a slot: one lane of the fetch
 * warp, likewise. That free a slot: one compute thread, after their barrier, the loader and the prefetch warp. Debug: every
 * lane and thread, since racecheck does not see a warp barrier that the compiler has proven and left out, nor that a barrier
 * of some of the block's threads is one. */
#ifndef MPK_EVERY_LANE_ARRIVES
#define MPK_EVERY_LANE_ARRIVES 0
#endif
constexpr bool kEveryLaneArrives = MPK_EVERY_LANE_ARRIVES != 0;
constexpr uint32_t kEmptyArrivals = kEveryLaneArrives ? kComputeThreads : kComputeWarps;
constexpr uint32_t kSlotFullArrivals = kEveryLaneArrives ? 32 : 1;
constexpr uint32_t kSlotEmptyArrivals = 2 + (kEveryLaneArrives ? kComputeThreads : 1);

/* How far the prefetch warp runs ahead of the ring, in stages: of all multiprocessors together under the L2 cache. */
#ifndef MPK_PREFETCH_STAGES
#define MPK_PREFETCH_STAGES (224 * 1024 / MPK_STAGE_BYTES)
#endif
constexpr uint32_t kPrefetchStages = MPK_PREFETCH_STAGES;
/* The same where there are several ranks: on two H200 the longer distance costs 0.7 % at batch 8 and nothing at batch 1. */
constexpr uint32_t kSharedPrefetchStages = kPrefetchStages * 5 / 7;
/* Cycles between two of its stages: about what the device memory's bandwidth gives one multiprocessor. */
#ifndef MPK_PREFETCH_CYCLES
#define MPK_PREFETCH_CYCLES (MPK_STAGE_BYTES / 20)
#endif

/* Slots of an iteration whose numbers are kept in shared memory. */
constexpr uint32_t kKeptActive = 64;
constexpr uint32_t kMostRanks = MPK_GPU_MAX_DYNAMIC_RANKS;
constexpr uint32_t kSlots = 6;
constexpr uint32_t kSlotOperands = MPK_GPU_MAX_OPERANDS;
constexpr uint32_t kSlotWaits = 8;

}  // namespace gpu
}  // namespace mpk
