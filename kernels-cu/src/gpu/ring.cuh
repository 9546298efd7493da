/* The ring through which the loader warp streams constant operands to the compute warps, in the order in which the
 * tasks read them. The loader warp runs ahead of the tasks' events, because the data that it brings never changes. */
#pragma once

#include "gpu/shared.cuh"
#include "platform/gpu.h"

namespace mpk {
namespace gpu {

/* Timeline: the waiting time of a task's first thread stands for the whole block. Returns the current time, or 0 on other
 * threads. */
__device__ __forceinline__ uint64_t wait_clock() { return threadIdx.x == 0 ? platform::clock_ns() : 0; }
__device__ __forceinline__ void add_wait(uint32_t& sum, uint64_t began_ns) {
  if (threadIdx.x == 0) poke(sum, peek(sum) + static_cast<uint32_t>(platform::clock_ns() - began_ns));
}

/* The loader's end: with bulk copies one thread, without them all lanes of the loader warp, which then call the same
 * functions. The prefetch warp goes through the same tasks with a loader that only warms the L2 cache. */
class Loader {
 public:
  __device__ explicit Loader(uint32_t lane, bool prefetches = false) : lane_(lane), prefetches_(prefetches) {}

  /* The task whose constant operands are to be brought, and its place among the slots. */
  const TaskSlot* slot = nullptr;
  uint32_t slot_index = 0;

  /* Brings `bytes` (a multiple of 16, at most kStageBytes) from `source` (aligned to 16) into the next stage. Returns false if
   * the compute warps have left; the loader then stops. `Cache`: the task has called begin_cache. */
  template <bool Cache = false>
  __device__ __forceinline__ bool stream(const void* source, uint32_t bytes) {
    Shared& shared = shared_state();
    if (prefetches_) return prefetch(shared, source, bytes);
    /* Two tests in one: few enough copies are in flight, and the stage is free. The stage's use before this one has the other
     * parity; before its first use the test is true. */
    const bool at_once = Cache && after_cache_;
    uint32_t most = at_once || peek(shared.next_slot.index) == slot_index ? kStagesInFlight : kStagesAhead;
    if constexpr (kStagesWaiting < kStagesInFlight) {
      if (peek(shared.compute_state) == kIsWaiting) most = min(most, kStagesWaiting);
    }
    while (in_flight_ > most) wait_for_oldest(shared);
    const bool capped = in_flight_ == most;
    bool arrived = !capped || mbarrier_test(&shared.stage_full[oldest_.index], oldest_.parity);
    bool free = mbarrier_test(&shared.stage_empty[place_.index], place_.parity ^ 1);
    if (!free) {
      poke(shared.ring_is_full, 1u);
      while (!free) {
        free = mbarrier_test(&shared.stage_empty[place_.index], place_.parity ^ 1);
        if (!free && peek(shared.left) != 0) return false;
      }
      poke(shared.ring_is_full, 0u);
    }
    while (!arrived) arrived = mbarrier_test(&shared.stage_full[oldest_.index], oldest_.parity);
    if (capped) oldest_.next<kStages>();
    else ++in_flight_;
    poke(shared.streamed, ++count_);
    if constexpr (kCountsStreamed) bytes_ += full_batch_ && !cache_now_ ? bytes : 0;
    uint64_t* full = &shared.stage_full[place_.index];
    uint8_t* to = stage_at(place_.index);
#if __CUDA_ARCH__ >= 900
    mbarrier_arrive_expect(full, bytes);
    if constexpr (kFirstToLeave == kNone) bulk_copy(to, source, bytes, full);
    else bulk_copy(to, source, bytes, full, policy_);
#else
    for (uint32_t at = lane_ * 16; at < bytes; at += 512) copy16(to + at, static_cast<const uint8_t*>(source) + at);
    arrive_when_copied(full);
#endif
    place_.next<kStages>();
    used_ = used_ < kStages ? used_ + 1 : kStages;
    return true;
  }

  /* Whether this loader belongs to the prefetch warp. */
  __device__ __forceinline__ bool prefetches() const { return prefetches_; }
  /* The prefetch warp leaves out `stages`. */
  __device__ __forceinline__ void skip(uint32_t stages) { count_ += stages; }
  /* Called by a task before it streams cache data of earlier iterations. Tasks wrote this data with ordinary stores
   * before this iteration was published; the fence orders the bulk copies after these stores. If several such tasks
   * follow each other, the events of most of them have already happened, so limiting the copies in flight would help no
   * other task. */
  __device__ __forceinline__ void begin_cache() {
    cache_now_ = true;
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
  }
  /* Before each task. */
  __device__ __forceinline__ void next_task() {
    after_wide_ = wide_now_;
    wide_now_ = false;
    if constexpr (kCountsStreamed) {
      const uint32_t most = shared_state().rank.batch_config->max_batch;
      full_batch_ = slot->num_active == most && slot->num_rows == most;
    }
    after_cache_ = cache_now_;
    cache_now_ = false;
  }

  /* Bytes of constant operands that have been streamed in steps of a full batch; only where kCountsStreamed. */
  __device__ __forceinline__ uint64_t streamed() const { return bytes_; }

  /* The loader lends the ring to the fetch warp, which brings what this task needs, and waits until the ring is returned. Returns
   * false if the compute warps have left. */
  __device__ __forceinline__ bool lend() {
    Shared& shared = shared_state();
    if (prefetches_) return true;
    drain_stages();
    used_ = in_flight_ = 0;
    poke(shared.lent, place_);
    const uint32_t count = peek(shared.lent_count) + 1;
    store_release(shared.lent_count, count);
    while (load_acquire(shared.returned_count) != count) {
      if (peek(shared.left) != 0) return false;
      __nanosleep(100);
    }
    place_ = oldest_ = peek(shared.lent);
    return true;
  }

  /* Waits until no copy is on its way: before the block ends. */
  __device__ void drain() {
    Shared& shared = shared_state();
#if __CUDA_ARCH__ >= 900
    for (uint32_t back = 0; back < places_used_; ++back) {
      if (wide_place_.index == 0) {
        wide_place_.index = kPlaces;
        wide_place_.parity ^= 1;
      }
      --wide_place_.index;
      while (!mbarrier_test(&shared.place_full[wide_place_.index], wide_place_.parity)) {}
    }
#endif
    drain_stages();
  }

 private:
  friend class WideLoader;

  __device__ __forceinline__ void drain_stages() const {
    Shared& shared = shared_state();
    RingPlace at = place_;
    for (uint32_t back = 0; back < used_; ++back) {
      if (at.index == 0) {
        at.index = kStages;
        at.parity ^= 1;
      }
      --at.index;
      /* Copies end by themselves: this wait needs no way out. */
      while (!mbarrier_test(&shared.stage_full[at.index], at.parity)) {}
    }
  }

  /* Copies end by themselves: this wait needs no way out. */
  __device__ __forceinline__ void wait_for_oldest(Shared& shared) {
    while (!mbarrier_test(&shared.stage_full[oldest_.index], oldest_.parity)) {}
    oldest_.next<kStages>();
    --in_flight_;
  }

  static __device__ __forceinline__ bool may_prefetch(const Shared& shared) {
    if constexpr (kPrefetchWhen == kAlways) return true;
    if (peek(shared.ring_is_full) != 0) return true;
    return kPrefetchWhen == kNothingIsTaken && peek(shared.compute_state) != kTakesStages;
  }

  /* Skips stages that the loader has started itself. Otherwise waits for a pause in the loader's loads, and until it is not too
   * far ahead. */
  __device__ __forceinline__ bool prefetch(Shared& shared, const void* source, uint32_t bytes) {
    ++count_;
#if __CUDA_ARCH__ >= 900
    for (;;) {
      const int32_t ahead = static_cast<int32_t>(count_ - peek(shared.streamed));
      if (ahead <= 0) return true;
      const uint32_t most = shared.rank.world == 1 ? kPrefetchStages : kSharedPrefetchStages;
      if (ahead <= static_cast<int32_t>(most) && may_prefetch(shared)) {
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
#if __CUDA_ARCH__ >= 900
  uint64_t policy_ = read_once_policy();
#endif
  uint32_t count_ = 0;     /* stages so far, wraps */
  uint32_t issued_at_ = 0; /* clock */
  RingPlace place_ = {0, 0};  /* where the next stage goes */
  RingPlace oldest_ = {0, 0}; /* of the copies counted as in flight */
  uint32_t in_flight_ = 0;
  uint32_t used_ = 0; /* stages that have been filled once */
  uint64_t bytes_ = 0; /* kCountsStreamed */
  bool full_batch_ = false;
  bool cache_now_ = false, after_cache_ = false; /* the task, and the one before, have called begin_cache */
  /* For wide products (wide_loader.cuh): */
  RingPlace wide_place_ = {0, 0}; /* where the next activations go */
  uint32_t places_used_ = 0;      /* places that have been filled once */
  uint32_t wide_tasks_ = 0;       /* so far, wraps */
  bool wide_now_ = false, after_wide_ = false; /* the task, and the one before, are wide: the work area is theirs */
};

/* The compute warps' end, while a task runs. Every warp takes every stage. Barriers and stages are 32-bit shared addresses, which
 * a loop over stages keeps in registers. */
class StageReader {
 public:
  /* Called after a barrier of the task. */
  __device__ __forceinline__ explicit StageReader(uint32_t lane)
      : place_(peek(shared_state().next_stage)), first_lane_(lane == 0), stages_(shared_address(stage_at(0))),
        full_(shared_address(shared_state().stage_full)) {}
  /* Called by one thread after the readers' last barrier, for the next task. */
  __device__ __forceinline__ void leave() const { poke(shared_state().next_stage, place_); }

  /* Waits until the next stage has arrived. Returns false if no stage will come; the next Context::sync gives the reason. */
  __device__ __forceinline__ bool wait() const {
    const uint32_t barrier = full_ + place_.index * 8;
    if constexpr (platform::kTraces) {
      /* The test itself may wait; then there would be nothing left to time. */
      if (mbarrier_look(barrier, place_.parity)) return true;
      const uint64_t began_ns = wait_clock();
      while (!mbarrier_test(barrier, place_.parity)) {
        if (failed()) return false;
      }
      add_wait(shared_state().page_ns, began_ns);
      return true;
    }
    while (!mbarrier_test(barrier, place_.parity)) {
      if (failed()) return false;
    }
    return true;
  }
  __device__ __forceinline__ uint32_t address() const { return stages_ + place_.index * kStageBytes; }
  /* The warp has read the stage. */
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    if (kEveryLaneArrives || first_lane_) mbarrier_arrive(full_ + kEmpty + place_.index * 8);
    place_.next<kStages>();
  }

 private:
  static constexpr uint32_t kEmpty = offsetof(Shared, stage_empty) - offsetof(Shared, stage_full);
  static constexpr uint32_t kCode = offsetof(Shared, code) - offsetof(Shared, stage_full);

  /* Uses an address that is already in a register. Computing the address of the shared state costs time in every wait. */
  __device__ __forceinline__ bool failed() const {
    uint32_t code;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(code) : "r"(full_ + kCode) : "memory");
    return code != 0;
  }

  RingPlace place_;
  bool first_lane_;
  uint32_t stages_, full_;
};

}  // namespace gpu
}  // namespace mpk
