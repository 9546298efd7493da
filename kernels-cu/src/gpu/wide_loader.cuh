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

class WideLoader {
 public:
  __device__ __forceinline__ explicit WideLoader(Loader& loader) : loader_(loader) {}

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
    Shared& shared = shared_state();
    if (Once) {
      const uint32_t most = ready ? kStages : kStagesAhead;
      while (loader_.in_flight_ >= most) {
        if (!mbarrier_look(&shared.stage_full[loader_.oldest_.index], loader_.oldest_.parity)) return false;
        loader_.oldest_.next<kStages>();
        --loader_.in_flight_;
      }
    }
    return mbarrier_look(&shared.stage_empty[loader_.place_.index], loader_.place_.parity ^ 1);
  }
  /* Two groups of at most `Group` tiles of 16 rows of a weight, `pitch` bytes apart, of each tile the next `bytes`, into the
   * next stage, which is free. */
  template <uint32_t Group, bool Once>
  __device__ __forceinline__ void stream_rows(const uint8_t* const (&from)[2], const uint32_t (&rows)[2], uint32_t offset, uint32_t pitch, uint32_t bytes) {
    Shared& shared = shared_state();
    RingPlace& at = loader_.place_;
    ++loader_.count_;
    if (Once) {
      ++loader_.in_flight_;
      poke(shared.streamed, loader_.count_);
    }
    uint64_t* const full = &shared.stage_full[at.index];
    uint8_t* const to = stage_at(at.index);
    mbarrier_arrive_expect(full, (rows[0] + rows[1]) * bytes);
#pragma unroll
    for (uint32_t g = 0; g < 2; ++g) {
#pragma unroll
      for (uint32_t row = 0; row < Group; ++row) {
        if (row >= rows[g]) continue;
        const uint8_t* const source = from[g] + (static_cast<uint64_t>(row) * pitch + offset);
        if (Once) bulk_copy(to + (g * Group + row) * bytes, source, bytes, full, loader_.policy_);
        else bulk_copy(to + (g * Group + row) * bytes, source, bytes, full);
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
  __device__ __forceinline__ void stream_stage(const uint8_t* source, uint32_t bytes) {
    Shared& shared = shared_state();
    RingPlace& at = loader_.place_;
    ++loader_.count_;
    uint64_t* const full = &shared.stage_full[at.index];
    mbarrier_arrive_expect(full, bytes);
    bulk_copy(stage_at(at.index), source, bytes, full);
    at.next<kStages>();
    loader_.used_ = loader_.used_ < kStages ? loader_.used_ + 1 : kStages;
  }

  /* Whether the next place is free. */
  __device__ __forceinline__ bool may_place() const {
    return mbarrier_look(&shared_state().place_empty[loader_.wide_place_.index], loader_.wide_place_.parity ^ 1);
  }
  /* `count` stretches of `bytes` of activations, `apart` bytes from each other, into the next place, which is free. */
  __device__ __forceinline__ void stream_place(const uint8_t* source, uint32_t bytes, uint32_t count = 1, uint64_t apart = 0) {
    Shared& shared = shared_state();
    RingPlace& at = loader_.wide_place_;
    uint64_t* const full = &shared.place_full[at.index];
    mbarrier_arrive_expect(full, bytes * count);
    for (uint32_t i = 0; i < count; ++i) bulk_copy(work_area() + at.index * kPlaceBytes + i * bytes, source + i * apart, bytes, full);
    at.next<kPlaces>();
    loader_.places_used_ = loader_.places_used_ < kPlaces ? loader_.places_used_ + 1 : kPlaces;
  }

  /* A task's loads. A step is one place, which `place(step)` fills, and `Stages` stages, which `stage(number)` does: the first of
   * them with weights, which run ahead of the events, the others with activations. Both run ahead of each other as far as the
   * rings reach. False when the compute warps have left. */
  template <bool Once, uint32_t Stages, class Stage, class Place>
  __device__ __forceinline__ bool run(uint32_t steps, Stage stage, Place place) {
    begin<Once>(steps != 0);
    bool ready = false;
    uint32_t staged = 0, placed = 0;
    while (staged < steps * Stages || placed < steps) {
      if (!ready) {
        ready = inputs_ready();
        if (ready && !acquire_inputs()) return false;
      }
      bool idle = true;
      if (ready && placed < steps && may_place()) {
        place(placed++);
        idle = false;
      }
      if (staged < steps * Stages && (ready || staged % Stages == 0) && may_stream<Once>(ready)) {
        stage(staged++);
        idle = false;
      }
      if (idle && peek(shared_state().left) != 0) return false;
    }
    if (steps != 0) end<Once>();
    return true;
  }

  /* The same where all stages have weights, and stages and places are counted apart. */
  template <class Stage, class Place>
  __device__ __forceinline__ bool run_apart(uint32_t stages, uint32_t places, Stage stage, Place place) {
    begin<true>(stages != 0);
    bool ready = false;
    uint32_t staged = 0, placed = 0;
    while (staged < stages || placed < places) {
      if (!ready) {
        ready = inputs_ready();
        if (ready && !acquire_inputs()) return false;
      }
      bool idle = true;
      if (ready && placed < places && may_place()) {
        place(placed++);
        idle = false;
      }
      if (staged < stages && may_stream<true>(ready)) {
        stage(staged++);
        idle = false;
      }
      if (idle && peek(shared_state().left) != 0) return false;
    }
    if (stages != 0) end<true>();
    return true;
  }

 private:
  static __device__ __forceinline__ uint32_t load_acquire(const uint32_t& word) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared.u32 %0,[%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
    return value;
  }

  Loader& loader_;
};

/* The compute warps' end: one thread, at the start of every wide task. All are through with the task before; release: pairs
 * with acquire_inputs. */
__device__ __forceinline__ void begin_wide() {
  uint32_t& word = shared_state().wide_begun;
  asm volatile("st.release.cta.shared.u32 [%0],%1;" ::"r"(shared_address(&word)), "r"(peek(word) + 1) : "memory");
}

#endif

}  // namespace gpu
}  // namespace mpk
