/* The loader's end of a wide product: weights into the ring of stages ahead of the task's events, as always; activations into
 * the ring of places once they are there.
 *
 * Places lie in the work area, which tasks of other types use as they like. The loader may fill them for the next task while
 * the last one still runs only if that is a wide product too; otherwise it waits until the compute warps have begun this one.
 *
 * Bulk copies read and write through the async proxy what others wrote with ordinary stores: activations in global memory,
 * and the work area. Both were handed over by a release that this thread has acquired (the events' counters, `wide_begun`), and
 * its fence.proxy.async behind that orders its copies after them; the writers need none. In the other direction the barriers
 * do it: a copy's bytes are visible to who has seen its barrier, and a place is filled anew after all warps' arrivals. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if __CUDA_ARCH__ >= 900

/* Rows of a weight for a stage: of two groups of tiles of 16 rows the address of the first, and how many there are. */
struct StageRows {
  uint64_t from[2];
  uint32_t count[2];
};

class WideLoader {
 public:
  __device__ __forceinline__ explicit WideLoader(Loader& loader)
      : loader_(loader), stages_(shared_address(stage_at(0))), places_(shared_address(work_area())), state_(shared_address(&shared_state())) {}

  /* First of all. `loads`: the task has anything to load. `Once`: its weights are read by this task only. They leave the L2 cache
   * first. */
  template <bool Once>
  __device__ __forceinline__ void begin(bool loads) {
    Shared& shared = shared_state();
    ++loader_.wide_tasks_;
    loader_.wide_now_ = loads || loader_.after_wide_;
    if (!loads || Once) return;
    while (loader_.in_flight_ != 0) loader_.wait_for_oldest(shared);
  }
  /* At last, where something was loaded. */
  template <bool Once>
  __device__ __forceinline__ void end() {
    if (!Once) loader_.oldest_ = loader_.place_;
    poke(shared_state().streamed, loader_.count_);
  }

  /* Whether the next stage's copies may begin now. Before the task's events few of them: then other workers poll and trigger. */
  template <bool Once>
  __device__ __forceinline__ bool may_stream(bool ready) {
    if (Once && !ready) {
      while (loader_.in_flight_ >= kStagesAhead) {
        if (!mbarrier_look(barrier<kStageFull>(loader_.oldest_), loader_.oldest_.parity)) return false;
        loader_.oldest_.next<kStages>();
        --loader_.in_flight_;
      }
    }
    return mbarrier_look(barrier<kStageEmpty>(loader_.place_), loader_.place_.parity ^ 1);
  }
  /* Two groups of at most `Group` tiles of 16 rows of a weight, `pitch` bytes apart, of each tile the next `bytes`, into the next
   * stage, which is free. One thread begins all copies, and what it takes for that bounds the speed of a tile: no test between the
   * copies of a whole group, and the addresses are sums. */
  template <uint32_t Group, bool Once>
  __device__ __forceinline__ void stream_rows(const StageRows& rows, uint32_t pitch, uint32_t bytes) {
    RingPlace& at = loader_.place_;
    ++loader_.count_;
    if (Once) {
      /* A stage that is free has come: it is no longer in flight. */
      if (loader_.in_flight_ == kStages) loader_.oldest_.next<kStages>();
      else ++loader_.in_flight_;
      poke(shared_state().streamed, loader_.count_);
    }
    const uint32_t full = barrier<kStageFull>(at), to = stages_ + at.index * kStageBytes;
    mbarrier_arrive_expect(full, (rows.count[0] + rows.count[1]) * bytes);
    const auto copy = [&](uint32_t place, uint64_t from) {
      if (Once) bulk_copy(place, from, bytes, full, loader_.policy_);
      else bulk_copy(place, from, bytes, full);
    };
#pragma unroll
    for (uint32_t g = 0; g < 2; ++g) {
      uint32_t place = to + g * Group * bytes;
      uint64_t from = rows.from[g];
      if (rows.count[g] == Group) {
#pragma unroll
        for (uint32_t row = 0; row < Group; ++row, from += pitch, place += bytes) copy(place, from);
      } else {
#pragma unroll 1
        for (uint32_t row = 0; row < rows.count[g]; ++row, from += pitch, place += bytes) copy(place, from);
      }
    }
    at.next<kStages>();
    loader_.used_ = loader_.used_ < kStages ? loader_.used_ + 1 : kStages;
  }

  /* Whether the events that the task waits for have happened. */
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
  /* Waits for the work area, and acquires what the events, which have happened, tell. False when the compute warps have left. */
  __device__ __forceinline__ bool acquire_inputs() const {
    Shared& shared = shared_state();
    if (!loader_.after_wide_) {
      while (static_cast<int32_t>(load_acquire(shared.wide_begun) - loader_.wide_tasks_) < 0) {
        if (peek(shared.left) != 0) return false;
      }
    }
    const TaskSlot& slot = *loader_.slot;
    /* Acquire, system scope where a peer may have triggered: as in wait_inputs. Those beyond kSlotWaits event_test acquired. */
    for (uint32_t d = 0; d < slot.num_waits; ++d) platform::load<platform::Scope::kSystem>(slot.waits[d].counter, platform::kAcquire);
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  /* `bytes` of activations into the next stage, which is free. */
  __device__ __forceinline__ void stream_stage(uint64_t source, uint32_t bytes) {
    RingPlace& at = loader_.place_;
    ++loader_.count_;
    const uint32_t full = barrier<kStageFull>(at);
    mbarrier_arrive_expect(full, bytes);
    bulk_copy(stages_ + at.index * kStageBytes, source, bytes, full);
    at.next<kStages>();
    loader_.used_ = loader_.used_ < kStages ? loader_.used_ + 1 : kStages;
  }

  /* Whether the next place is free. */
  __device__ __forceinline__ bool may_place() const { return mbarrier_look(barrier<kPlaceEmpty>(loader_.wide_place_), loader_.wide_place_.parity ^ 1); }
  /* `Count` stretches of `bytes` of activations, `apart` bytes from each other, into the next place, which is free; the first
   * `count` of them. */
  template <uint32_t Count = 1>
  __device__ __forceinline__ void stream_place(uint64_t source, uint32_t bytes, uint32_t count = Count, uint64_t apart = 0) {
    RingPlace& at = loader_.wide_place_;
    const uint32_t full = barrier<kPlaceFull>(at);
    mbarrier_arrive_expect(full, bytes * count);
    uint32_t to = places_ + at.index * kPlaceBytes;
#pragma unroll
    for (uint32_t i = 0; i < Count; ++i, to += bytes, source += apart)
      if (Count == 1 || i < count) bulk_copy(to, source, bytes, full);
    at.next<kPlaces>();
    loader_.places_used_ = loader_.places_used_ < kPlaces ? loader_.places_used_ + 1 : kPlaces;
  }

  /* A task's loads: so many places, each of which `place` fills, and `stages` stages, which `stage` does. Every `Stages`-th of them
   * has weights, which run ahead of the events, the others activations. Both run ahead of each other as far as the rings reach.
   * False when the compute warps have left. */
  template <bool Once, uint32_t Stages, class Stage, class Place>
  __device__ __forceinline__ bool run(uint32_t stages, uint32_t places, Stage stage, Place place) {
    begin<Once>(stages != 0);
    bool ready = false;
    uint32_t staged = 0, placed = 0;
    while (staged < stages || placed < places) {
      if (!ready) {
        ready = inputs_ready();
        if (ready && !acquire_inputs()) return false;
      }
      bool idle = true;
      if (ready && placed < places && may_place()) {
        place();
        ++placed;
        idle = false;
      }
      if (staged < stages && (ready || staged % Stages == 0) && may_stream<Once>(ready)) {
        stage();
        ++staged;
        idle = false;
      }
      if (idle && peek(shared_state().left) != 0) return false;
    }
    if (stages != 0) end<Once>();
    return true;
  }

 private:
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

/* The compute warps' end: one thread, at the start of every wide task. All are through with the task before; release: pairs
 * with acquire_inputs. */
__device__ __forceinline__ void begin_wide() {
  uint32_t& word = shared_state().wide_begun;
  store_release(word, peek(word) + 1);
}

#endif

}  // namespace gpu
}  // namespace mpk
