/* Sizes of a block of the persistent kernel. A block is a worker, and there is one per SM. The generated source (kernels_cu::gpu)
 * defines the MPK_ names from the hardware table. */
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
constexpr uint32_t kPrefetchWarp = 11; /* prefetches constant operands beyond the ring into the L2 cache while nothing else is loaded */
constexpr uint32_t kBlockThreads = 12 * 32;
#ifdef MPK_BLOCK_THREADS
static_assert(kBlockThreads == MPK_BLOCK_THREADS, "the launch starts MPK_BLOCK_THREADS threads a block");
#endif

/* The ring of stages, and the maximum number of copies in flight: more copies delay every flag that others poll. The
 * maximum is lower for a task that the compute warps have not reached, because at that time they, or other workers,
 * trigger or poll. */
constexpr uint32_t kStages = MPK_STAGES;
constexpr uint32_t kStageBytes = MPK_STAGE_BYTES;
constexpr uint32_t kStagesInFlight = MPK_STAGES_IN_FLIGHT;
constexpr uint32_t kStagesAhead = MPK_STAGES_AHEAD;
static_assert(kStagesAhead > 0 && kStagesAhead <= kStagesInFlight && kStagesInFlight <= kStages, "stages in flight");
/* Lower while the compute warps wait for events, whichever task the stages belong to. */
constexpr uint32_t kStagesWaiting = MPK_STAGES_WAITING;
static_assert(kStagesWaiting > 0, "the loader must go on");
/* Shared memory that a task's code may use freely while it runs. */
constexpr uint32_t kWorkBytes = MPK_WORK_BYTES;

/* The ring of places for activations of wide products, at the start of the work area. */
constexpr uint32_t kPlaces = 5;
constexpr uint32_t kPlaceBytes = 16 * 1024;

/* Arrivals that complete a stage: one thread of the loader, or all its lanes without bulk copies. */
#if __CUDA_ARCH__ >= 900
constexpr uint32_t kStageArrivals = 1;
#else
constexpr uint32_t kStageArrivals = 32;
#endif

/* Arrivals that free a stage: one lane of each compute warp, after a warp barrier. Arrivals that fill a slot: one lane of
 * the fetch warp, likewise. Arrivals that free a slot: one compute thread, after their barrier, plus the loader and the
 * prefetch warp. Debug: every lane and thread arrives. Otherwise racecheck misses a warp barrier that the compiler has
 * proven superfluous and removed, and does not recognise a barrier of only some of the block's threads. */
#ifndef MPK_EVERY_LANE_ARRIVES
#define MPK_EVERY_LANE_ARRIVES 0
#endif
constexpr bool kEveryLaneArrives = MPK_EVERY_LANE_ARRIVES != 0;
constexpr uint32_t kEmptyArrivals = kEveryLaneArrives ? kComputeThreads : kComputeWarps;
constexpr uint32_t kSlotFullArrivals = kEveryLaneArrives ? 32 : 1;
constexpr uint32_t kSlotEmptyArrivals = 2 + (kEveryLaneArrives ? kComputeThreads : 1);

/* How far the prefetch warp runs ahead of the ring, in stages. The prefetched data of all SMs together must fit in
 * the L2 cache. */
constexpr uint32_t kPrefetchStages = MPK_PREFETCH_STAGES;
/* The same with several ranks: on two H200, the longer distance costs 0.7 % at batch 8 and nothing at batch 1. */
constexpr uint32_t kSharedPrefetchStages = kPrefetchStages * 5 / 7;
/* MPK_PREFETCH_CYCLES: cycles between two of its stages, about the share of an SM in the device memory's bandwidth. */

/* When it prefetches: while the ring is full; or also while the compute warps take no stages, because they wait or prepare rows; or
 * always. After a pause, the compute warps take stages faster than memory delivers them: then the ring is never full although memory
 * has time. */
enum PrefetchWhen : uint32_t { kRingIsFull = 0, kNothingIsTaken = 1, kAlways = 2 };
constexpr uint32_t kPrefetchWhen = MPK_PREFETCH_WHEN;
static_assert(kPrefetchWhen <= kAlways, "enum PrefetchWhen");
/* What leaves the L2 cache first: loaded stages, or nothing. Prefetched stages cannot: an H200 ignores the policy of bulk prefetches. */
enum FirstToLeave : uint32_t { kLoaded = 0, kNone = 1 };
constexpr uint32_t kFirstToLeave = MPK_FIRST_TO_LEAVE;
static_assert(kFirstToLeave <= kNone, "enum FirstToLeave");

/* What the loader and the prefetch warp need to know about the activity of the compute warps. */
enum ComputeState : uint32_t { kIsWaiting = 0, kIsReady = 1, kTakesStages = 2 };
constexpr bool kTellsState = kPrefetchWhen == kNothingIsTaken || kStagesWaiting < kStagesInFlight;

/* Kernels of `mpk-bench stream`: the parts that they leave out of a decode step, to measure the cost of each. Their tokens are
 * meaningless. An ordinary kernel is compiled without MPK_WITHOUT and contains none of this. */
enum LeftOut : uint32_t {
  kProducts = 1,   /* the weights are streamed, but not multiplied */
  kWaits = 2,      /* tasks start at once, except those that choose tokens and those that copy */
  kAllreduces = 4, /* flagged words are neither sent nor awaited */
};
#ifdef MPK_WITHOUT
constexpr bool kCountsStreamed = true;
constexpr uint32_t kLeftOut = MPK_WITHOUT;
#else
constexpr bool kCountsStreamed = false;
constexpr uint32_t kLeftOut = 0;
#endif
constexpr bool kWithoutProducts = (kLeftOut & kProducts) != 0, kWithoutWaits = (kLeftOut & kWaits) != 0, kWithoutAllreduces = (kLeftOut & kAllreduces) != 0;
/* Maximum number of rows in an iteration that leaves out waits: prompts are computed as usual. */
constexpr uint32_t kMostRowsWithoutWaits = 16;

/* Number of active slots whose data is kept in shared memory. */
constexpr uint32_t kKeptActive = 64;
constexpr uint32_t kMostRanks = MPK_GPU_MAX_DYNAMIC_RANKS;
constexpr uint32_t kSlots = 6;
constexpr uint32_t kSlotOperands = MPK_GPU_MAX_OPERANDS;
constexpr uint32_t kSlotWaits = 8;

}  // namespace gpu
}  // namespace mpk
