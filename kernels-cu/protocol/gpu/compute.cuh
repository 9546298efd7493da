/* The compute warps, the loader and the prefetch warp. All take the slots in order; loader and prefetch warp run ahead of the compute warps. */
#pragma once

#include "slots.cuh"
#include "timeline.cuh"

namespace mpk {
namespace gpu {

__device__ inline void load_loop(uint32_t lane, bool prefetches) {
#if __CUDA_ARCH__ >= 900
  if (!elect_one()) return; /* one thread starts bulk copies */
  constexpr bool first = true;
#else
  const bool first = lane == 0;
#endif
  Shared& shared = shared_state();
  Loader loader(lane, prefetches);
  bool go_on = true;
  for (RingPlace place = {0, 0}; go_on; place.next<kSlots>()) {
    while (go_on && !mbarrier_test(&shared.slot_full[place.index], place.parity)) go_on = peek(shared.left) == 0;
    if (!go_on) break;
    const TaskSlot& slot = shared.slots[place.index];
    if (slot.kind == kSlotStop) break;
    loader.slot = &slot;
    loader.slot_index = place.index;
    loader.next_task();
    go_on = slot.task.code == MPK_NO_CODE || load_code(slot.task.code, loader);
#if __CUDA_ARCH__ < 900
    __syncwarp();
#endif
    if (first) mbarrier_arrive(&shared.slot_empty[place.index]);
  }
  if (prefetches) return;
  loader.drain();
  if constexpr (kCountsStreamed) {
    if (first) platform::store<platform::Scope::kSystem>(&shared.rank.status[blockIdx.x].streamed, loader.streamed(), platform::kRelaxed);
  }
}

/* Debug, by one thread: the stall that a test asked for. It ends early if the run is aborted. */
__device__ __noinline__ int stall(const mpk_rank* rank) {
  const uint64_t start = platform::clock_ns();
  for (;;) {
    if (platform::clock_ns() - start >= rank->stall_ns) return MPK_OK;
    const int code = abort_code(rank);
    if (code != MPK_OK) return code;
    platform::sleep_ns(1000);
  }
}

/* One thread, after the barrier that ends the task: the task's trigger, then its count, as in run_task of the CPU target. */
__device__ __forceinline__ int finish_task(const mpk_rank* rank, const TaskSlot& slot, mpk_status* status) {
  uint64_t* const progress = &rank->control->progress;
  if (slot.trigger != nullptr && slot.finished != 0 && !slot.trigger_system) {
    /* Static placement, the last task of a list. One fence for both additions, because each wait for the task's stores takes a round trip
     * to the L2 cache. Release, by the fence: pairs with the waits for the event, and with await_end and claim_batch_step. The count may
     * be seen before the trigger. This is harmless: no batch step reads the event's counter, and a task that waits for the event
     * still waits for this trigger. */
    platform::fence_device();
    platform::fetch_add<platform::Scope::kDevice>(slot.trigger, uint64_t{1}, platform::kRelaxed);
    platform::fetch_add<platform::Scope::kDevice>(progress, static_cast<uint64_t>(slot.finished), platform::kRelaxed);
    return MPK_OK;
  }
  if (slot.trigger != nullptr) {
    /* Release, of the event's own scope (event.h): pairs with the waits for the event. */
    if (slot.trigger_system) platform::fetch_add<platform::Scope::kSystem>(slot.trigger, uint64_t{1}, platform::kRelease);
    else platform::fetch_add<platform::Scope::kDevice>(slot.trigger, uint64_t{1}, platform::kRelease);
  } else if (slot.trigger_steps) {
    const Iteration iteration = {slot.graph, slot.graph_index, slot.iteration, slot.epoch};
    const int code = trigger_event(rank, iteration, slot.task.trigger_event, slot.triggered, status);
    if (code != MPK_OK) return code;
  }
  /* Release: pairs with claim_batch_step. A static worker counts its whole list at the end of it. */
  if (slot.finished != 0) platform::fetch_add<platform::Scope::kDevice>(progress, static_cast<uint64_t>(slot.finished), platform::kRelease);
  return MPK_OK;
}

/* Number of looks for the next task before the worker counts as idle. Between two consecutive tasks there are fewer. */
constexpr uint32_t kPollsUntilIdle = 16;

__device__ __forceinline__ void compute_loop(const mpk_rank* rank, uint32_t worker) {
  Shared& shared = shared_state();
  int code = MPK_OK;
  for (;;) {
    const RingPlace place = peek(shared.next_slot);
    /* The fetch warp always fills the slot: with a task, or with a stop. */
    for (uint32_t polls = 1; !mbarrier_test(&shared.slot_full[place.index], place.parity); ++polls) {
      if (polls == kPollsUntilIdle && Context::thread_index() == 0) report_state(&rank->status[worker], MPK_WORKER_IDLE);
    }
    Context context(&shared.slots[place.index]);
    if (context.slot->kind == kSlotStop) break;
    if (context.thread == 0) {
      report_task(context.status(), context.slot->graph_index, context.slot->task_index, context.slot->iteration);
      /* Checked on every worker: the graph decides which ones have tasks of the operator. */
      if (rank->stall_ns != 0 && context.slot->task.op == rank->stall_op) {
        const int stalled = stall(rank);
        if (stalled != MPK_OK) context.fail(stalled);
      }
    }
    code = context.slot->task.code == MPK_NO_CODE ? context.wait_inputs() : run_code(context.slot->task.code, context);
    if (code != MPK_OK) context.fail(code);
    /* No variable stays alive across the task's code. The other threads have read the slot's place before the task's first barrier. */
    const bool first = Context::thread_index() == 0;
    uint32_t index = 0;
    if (first) {
      RingPlace next = peek(shared.next_slot);
      index = next.index;
      next.next<kSlots>();
      poke(shared.next_slot, next);
    }
    code = Context::sync();
    if (code != MPK_OK) break;
    if (first) {
      if (is_traced(rank)) leave_times(index);
      const int finished = finish_task(rank, shared.slots[index], &rank->status[worker]);
      if (finished != MPK_OK) {
        Context::fail(finished);
        /* The other threads see this at the next barrier. After a worker's last task there is no barrier, so set the abort word too. */
        set_abort(rank->control, static_cast<uint32_t>(finished), rank->rank);
      }
    }
    if (kEveryLaneArrives || first) mbarrier_arrive(&shared.slot_empty[kEveryLaneArrives ? place.index : index]);
  }
  if (threadIdx.x == 0) {
    store_release(shared.left, 1u); /* pairs with fetch_loop, for the times of the last tasks */
    if (code == MPK_OK) code = peek(shared.code);
    mpk_status* const status = &rank->status[worker];
    if (code != MPK_OK) {
      abort_broadcast(rank, static_cast<uint32_t>(code)); /* the first cause stays; the status says what this worker was doing */
    } else if (abort_code(rank) == MPK_OK) {
      report_state(status, MPK_WORKER_LEFT);
    } else if (platform::load<platform::Scope::kSystem>(&status->state, platform::kRelaxed) == MPK_WORKER_RUNS) {
      report_state(status, MPK_WORKER_IDLE); /* told to stop between two tasks; other states stay, such as the fetch warp's report on held tasks */
    }
  }
}

}  // namespace gpu
}  // namespace mpk
