/* The loader's end of a wide product. Weights go into the ring of stages before the task's events, as for every task. Activations go
 * into the ring of places when they are ready.
 *
 * Places lie in the work area, which tasks of other types use for their own data. The loader may fill places for the next task while
 * the previous task still runs only if that is a wide product too. Otherwise it waits until the compute warps have begun this task.
 *
 * Bulk copies use the async proxy to read and write what others wrote with ordinary stores: activations in global memory, and the
 * work area. Both were handed over by a release that this thread has acquired (the events' counters, `wide_begun`). A
 * fence.proxy.async after the acquire orders the copies after those stores; the writers need no fence. In the other direction the
 * barriers give the order: a copy's bytes are visible to a thread that has seen its barrier, and a place is filled again only after
 * all warps have arrived. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if __CUDA_ARCH__ >= 900

class WideLoader {
 public:
  __device__ __forceinline__ explicit WideLoader(Loader& loader)
      : loader_(loader), stages_(shared_address(stage_at(0))), places_(shared_address(work_area())), state_(shared_address(&shared_state())) {}

  /* Call this first. `loads`: the task loads something. `Once`: only this task reads its weights, so they leave the L2 cache first. */
  template <bool Once>
  __device__ __forceinline__ void begin(bool loads) {
    Shared& shared = shared_state();
    ++loader_.wide_tasks_;
    loader_.wide_now_ = loads || loader_.after_wide_;
    if (!loads || Once) return;
    while (loader_.in_flight_ != 0) loader_.wait_for_oldest(shared);
  }
  /* Call this last, with the numbers of stages and places. Copies that still run are no longer counted as in flight, so the next task
   * may start as many. */
  __device__ __forceinline__ void end(uint32_t stages, uint32_t places) {
    loader_.oldest_ = loader_.place_;
    loader_.in_flight_ = 0;
    loader_.count_ += stages;
    loader_.used_ = min(loader_.used_ + stages, kStages);
    loader_.places_used_ = min(loader_.places_used_ + places, kPlaces);
    poke(shared_state().streamed, loader_.count_);
  }

  /* Whether the next stage is free. */
  __device__ __forceinline__ bool may_stream() const { return mbarrier_look(barrier<kStageEmpty>(loader_.place_), loader_.place_.parity ^ 1); }
  /* The same before the task's events, while other workers poll and trigger: then only few copies of weights that are read once may
   * run. */
  template <bool Once>
  __device__ __forceinline__ bool may_run_ahead() {
    if (Once) {
      while (loader_.in_flight_ >= kStagesAhead) {
        if (!mbarrier_look(barrier<kStageFull>(loader_.oldest_), loader_.oldest_.parity)) return false;
        loader_.oldest_.next<kStages>();
        --loader_.in_flight_;
      }
    }
    return may_stream();
  }
  /* Counts a stage that was started before the events. */
  __device__ __forceinline__ void count_in_flight() {
    /* A stage that is free again has arrived, so it is no longer in flight. */
    if (loader_.in_flight_ == kStages) loader_.oldest_.next<kStages>();
    else ++loader_.in_flight_;
  }

  /* Copies `Tiles` tiles of 16 rows of a weight into the next stage, which must be free. The tiles are `pitch` bytes apart; each copy
   * has the next `Bytes` of a tile. One thread starts all copies, and its speed limits the speed of a tile. So there are no tests here,
   * sizes and offsets in the stage are constants, and addresses are sums. */
  template <uint32_t Tiles, uint32_t Bytes, bool Once>
  __device__ __forceinline__ void stream_whole(uint64_t from, uint32_t pitch) {
    RingPlace& at = loader_.place_;
    const uint32_t full = barrier<kStageFull>(at), to = stages_ + at.index * kStageBytes;
    mbarrier_arrive_expect(full, Tiles * Bytes);
#pragma unroll
    for (uint32_t i = 0; i < Tiles; ++i) copy<Once>(to + i * Bytes, from + i * pitch, Bytes, full);
    at.next<kStages>();
  }
  /* The same if tiles are missing or short: `count` tiles, `bytes` of each. */
  template <bool Once>
  __device__ __forceinline__ void stream_rest(uint64_t from, uint32_t count, uint32_t pitch, uint32_t bytes) {
    RingPlace& at = loader_.place_;
    const uint32_t full = barrier<kStageFull>(at), to = stages_ + at.index * kStageBytes;
    mbarrier_arrive_expect(full, count * bytes);
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) copy<Once>(to + i * bytes, from + i * pitch, bytes, full);
    at.next<kStages>();
  }

  /* Whether the events that the task waits for have completed. */
  __device__ __forceinline__ bool inputs_ready() const {
    const TaskSlot& slot = *loader_.slot;
    for (uint32_t d = 0; d < slot.num_waits; ++d) {
      if (platform::load<platform::Scope::kSystem>(slot.waits[d].counter, platform::kRelaxed) < slot.waits[d].wanted) return false;
    }
    for (uint32_t d = kSlotWaits; d < slot.task.num_dependencies; ++d) {
      const mpk_dependency& dependency = slot.graph->dependencies[slot.task.first_dependency + d];
      if (!event_test(slot.graph, dependency.event, slot.epoch, dependency.epochs_back)) return false;
    }
    return true;
  }
  /* Waits for the work area, and acquires the events, which have completed. False if the compute warps have left. */
  __device__ __forceinline__ bool acquire_inputs() const {
    Shared& shared = shared_state();
    if (!loader_.after_wide_) {
      while (static_cast<int32_t>(load_acquire(shared.wide_begun) - loader_.wide_tasks_) < 0) {
        if (peek(shared.left) != 0) return false;
      }
    }
    const TaskSlot& slot = *loader_.slot;
    /* Acquire, with system scope because a peer may have triggered: as in wait_inputs. event_test has acquired those beyond kSlotWaits. */
    for (uint32_t d = 0; d < slot.num_waits; ++d) platform::load<platform::Scope::kSystem>(slot.waits[d].counter, platform::kAcquire);
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  /* Copies `bytes` of activations into the next stage, which must be free. */
  __device__ __forceinline__ void stream_stage(uint64_t source, uint32_t bytes) {
    RingPlace& at = loader_.place_;
    const uint32_t full = barrier<kStageFull>(at);
    mbarrier_arrive_expect(full, bytes);
    bulk_copy(stages_ + at.index * kStageBytes, source, bytes, full);
    at.next<kStages>();
  }

  /* Whether the next place is free. */
  __device__ __forceinline__ bool may_place() const { return mbarrier_look(barrier<kPlaceEmpty>(loader_.wide_place_), loader_.wide_place_.parity ^ 1); }
  /* Copies the first `count` of `Count` pieces of `bytes` of activations, which are `apart` bytes apart, into the next place, which must
   * be free. */
  template <uint32_t Count = 1>
  __device__ __forceinline__ void stream_place(uint64_t source, uint32_t bytes, uint32_t count = Count, uint64_t apart = 0) {
    RingPlace& at = loader_.wide_place_;
    const uint32_t full = barrier<kPlaceFull>(at);
    mbarrier_arrive_expect(full, bytes * count);
    const uint32_t to = places_ + at.index * kPlaceBytes;
    if (Count == 1 || count == Count) {
#pragma unroll
      for (uint32_t i = 0; i < Count; ++i) bulk_copy(to + i * bytes, source + i * apart, bytes, full);
    } else {
#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i) bulk_copy(to + i * bytes, source + i * apart, bytes, full);
    }
    at.next<kPlaces>();
  }

  /* Loads everything of a task. `weights` fills each of `stages` stages, and may start before the events. With `Tokens`, each of them is
   * followed by another stage, which `tokens` fills with activations. `place` fills each of `places` places. Stages and places get
   * ahead of each other as far as the rings allow. False if the compute warps have left. */
  template <bool Once, bool Tokens, class Weights, class Stage, class Place>
  __device__ __forceinline__ bool run(uint32_t stages, uint32_t places, Weights weights, Stage tokens, Place place) {
    begin<Once>(stages != 0);
    if (stages == 0) return true;
    uint32_t staged = 0, placed = 0;
    const auto leave = [&](bool all) {
      end(staged, placed);
      return all;
    };
    while (!inputs_ready()) {
      if (staged < (Tokens ? 1 : stages) && may_run_ahead<Once>()) {
        weights();
        count_in_flight();
        ++staged;
      } else if (peek(shared_state().left) != 0) {
        return leave(false);
      }
    }
    if (!acquire_inputs()) return leave(false);
    const uint32_t all = Tokens ? 2 * stages : stages;
    while (staged < all || placed < places) {
      bool idle = true;
      if (placed < places && may_place()) {
        place();
        ++placed;
        idle = false;
      }
      /* Weights do not wait for the stage after theirs, which is released later. */
      if (staged < all && may_stream()) {
        if (Tokens && staged % 2 != 0) tokens();
        else weights();
        ++staged;
        idle = false;
      }
      if (idle && peek(shared_state().left) != 0) return leave(false);
    }
    return leave(true);
  }

 private:
  template <bool Once>
  __device__ __forceinline__ void copy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t full) const {
    if (Once) bulk_copy(to, from, bytes, full, loader_.policy_);
    else bulk_copy(to, from, bytes, full);
  }

  /* Offsets in the shared state. */
  static constexpr uint32_t kStageFull = offsetof(Shared, stage_full), kStageEmpty = offsetof(Shared, stage_empty);
  static constexpr uint32_t kPlaceFull = offsetof(Shared, place_full), kPlaceEmpty = offsetof(Shared, place_empty);
  template <uint32_t Offset>
  __device__ __forceinline__ uint32_t barrier(const RingPlace& at) const {
    return state_ + Offset + at.index * 8;
  }

  Loader& loader_;
  const uint32_t stages_, places_, state_; /* shared addresses */
};

/* The compute warps' end: one thread calls this at the start of every wide task, when all threads have finished the previous task.
 * Release: pairs with the acquire in acquire_inputs. */
__device__ __forceinline__ void begin_wide() {
  uint32_t& word = shared_state().wide_begun;
  store_release(word, peek(word) + 1);
}

#endif

}  // namespace gpu
}  // namespace mpk
