/* The ring through which the loader warp streams constant operands to the compute warps, in the order in which the
 * tasks read them. It runs ahead of the tasks' events: what it brings never changes. */
#pragma once

#include "gpu/shared.cuh"

namespace mpk {
namespace gpu {

/* A position in the ring: the stage, and the parity of its phase. */
struct RingPlace {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/* The loader's end: with bulk copies one thread, without them all lanes of the loader warp, which then call the same
 * functions. The prefetch warp goes through the same tasks with a loader that only warms the L2 cache. */
class Loader {
 public:
  __device__ explicit Loader(uint32_t lane, bool prefetches = false) : lane_(lane), prefetches_(prefetches) {}

  /* The task whose constant operands are to be brought. */
  const TaskSlot* slot = nullptr;

  /* This is the prefetch warp: what a task streams need not be, and other things that it will read may be brought near. */
  __device__ __forceinline__ bool prefetches() const { return prefetches_; }

  /* Brings `bytes` (a multiple of 16, at most kStageBytes) from `source` (aligned to 16) into the next stage. False
   * when the compute warps have left: the loader stops. */
  __device__ __forceinline__ bool stream(const void* source, uint32_t bytes) {
    Shared& shared = shared_state();
    if (prefetches_) return prefetch(shared, source, bytes);
    /* Two tests at once: that few enough copies are in flight, and that the stage is free. The stage's use before this one
     * has the other parity; before its first use the test is true. */
    const bool capped = kStagesInFlight < kStages && in_flight_ == kStagesInFlight;
    bool arrived = !capped || mbarrier_test(&shared.stage_full[oldest_.stage], oldest_.parity);
    bool free = mbarrier_test(&shared.stage_empty[place_.stage], place_.parity ^ 1);
    if (!free) {
      poke(shared.ring_is_full, 1u);
      while (!free) {
        free = mbarrier_test(&shared.stage_empty[place_.stage], place_.parity ^ 1);
        if (!free && peek(shared.left) != 0) return false;
      }
      poke(shared.ring_is_full, 0u);
    }
    while (!arrived) arrived = mbarrier_test(&shared.stage_full[oldest_.stage], oldest_.parity);
    if (capped) oldest_.next();
    else ++in_flight_;
    poke(shared.streamed, ++count_);
    uint64_t* full = &shared.stage_full[place_.stage];
    uint8_t* to = stage_at(place_.stage);
#if __CUDA_ARCH__ >= 900
    mbarrier_arrive_expect(full, bytes);
    bulk_copy(to, source, bytes, full);
#else
    for (uint32_t at = lane_ * 16; at < bytes; at += 512) copy16(to + at, static_cast<const uint8_t*>(source) + at);
    arrive_when_copied(full);
#endif
    place_.next();
    used_ = used_ < kStages ? used_ + 1 : kStages;
    return true;
  }

  /* Waits until no copy is on its way: before the block ends. */
  __device__ void drain() {
    Shared& shared = shared_state();
    RingPlace at = place_;
    for (uint32_t back = 0; back < used_; ++back) {
      if (at.stage == 0) {
        at.stage = kStages;
        at.parity ^= 1;
      }
      --at.stage;
      /* Copies end by themselves: this wait needs no way out. */
      while (!mbarrier_test(&shared.stage_full[at.stage], at.parity)) {}
    }
  }

 private:
  /* Skips what the loader has started itself; otherwise waits for a pause in its loads, and for not being too far ahead. */
  __device__ __forceinline__ bool prefetch(Shared& shared, const void* source, uint32_t bytes) {
    ++count_;
#if __CUDA_ARCH__ >= 900
    for (;;) {
      const int32_t ahead = static_cast<int32_t>(count_ - peek(shared.streamed));
      if (ahead <= 0) return true;
      if (ahead <= static_cast<int32_t>(kPrefetchStages) && peek(shared.ring_is_full) != 0) {
        const uint32_t now = static_cast<uint32_t>(clock64());
        if (now - issued_at_ >= MPK_PREFETCH_CYCLES) {
          issued_at_ = now;
          prefetch_l2(source, bytes);
          return true;
        }
      }
      if (peek(shared.left) != 0) return false;
      __nanosleep(40);
    }
#else
    return true;
#endif
  }

  uint32_t lane_;
  bool prefetches_;
  uint32_t count_ = 0;     /* stages so far, wraps */
  uint32_t issued_at_ = 0; /* clock */
  RingPlace place_;  /* where the next stage goes */
  RingPlace oldest_; /* of the copies counted as in flight */
  uint32_t in_flight_ = 0;
  uint32_t used_ = 0; /* stages that have been filled once */
};

/* The compute warps' end, while a task runs: every warp takes every stage. Barriers and stages as 32-bit shared addresses,
 * which a loop over stages keeps in registers. */
class StageReader {
 public:
  /* `ring`: where the task's stages begin. */
  __device__ __forceinline__ StageReader(uint32_t lane, RingPlace& ring)
      : ring_(ring), place_(ring), first_lane_(lane == 0), stages_(shared_address(stage_at(0))),
        full_(shared_address(shared_state().stage_full)) {}
  __device__ __forceinline__ void leave() { ring_ = place_; }

  /* Until the next stage is there. False: there is nothing to come; the next Context::sync says why. */
  __device__ __forceinline__ bool wait() const {
    const uint32_t barrier = full_ + place_.stage * 8;
    while (!mbarrier_test(barrier, place_.parity)) {
      if (peek(shared_state().code) != 0) return false;
    }
    return true;
  }
  __device__ __forceinline__ uint32_t address() const { return stages_ + place_.stage * kStageBytes; }
  /* The warp has read the stage. */
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    if (kEveryLaneArrives || first_lane_) mbarrier_arrive(full_ + kEmpty + place_.stage * 8);
    place_.next();
  }

 private:
  static constexpr uint32_t kEmpty = offsetof(Shared, stage_empty) - offsetof(Shared, stage_full);

  RingPlace& ring_;
  RingPlace place_;
  bool first_lane_;
  uint32_t stages_, full_;
};

}  // namespace gpu
}  // namespace mpk
