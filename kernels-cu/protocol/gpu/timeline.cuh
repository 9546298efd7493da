/* The timeline of a block's tasks. A compute thread leaves a task's times in shared memory, beside the task's slot. The fetch warp makes
 * a record of them before it fills the slot again. The next task waits for the compute thread, but not for the fetch warp, so the
 * record's stores hold up no task. */
#pragma once

#include "gpu/shared.cuh"
#include "trace.h"

namespace mpk {
namespace gpu {

/* One compute thread, between the task's last barrier and its trigger. Early, because the other warps may already begin the next task. */
__device__ __forceinline__ void leave_times(uint32_t slot_index) {
  Shared& shared = shared_state();
  TaskTimes& times = shared.times[slot_index];
  poke(times.done_ns, platform::clock_ns());
  poke(times.ready_ns, peek(shared.ready_ns));
  poke(times.peer_ns, peek(shared.peer_ns));
  poke(times.page_ns, peek(shared.page_ns));
  poke(times.unrecorded, 1u);
  poke(shared.peer_ns, 0u);
  poke(shared.page_ns, 0u);
}

/* One thread of the fetch warp: records the task in the slot, if there is one that has ended and is not recorded yet. Called after the
 * slot has become free, or the compute warps have left: either orders leave_times before this. The slot's fields read here are those
 * that this thread has written itself (SlotWriter::fill), so other lanes may already fill the rest. */
__device__ __noinline__ void record_task(const mpk_rank* rank, uint32_t slot_index) {
  Shared& shared = shared_state();
  TaskTimes& times = shared.times[slot_index];
  if (peek(times.unrecorded) == 0) return;
  poke(times.unrecorded, 0u);
  const TaskSlot& slot = shared.slots[slot_index];
  const uint64_t count = shared.traced;
  mpk_trace_record* entry = trace_at(rank, blockIdx.x, count);
  entry->fetched_ns = slot.fetched_ns;
  entry->ready_ns = peek(times.ready_ns);
  entry->done_ns = peek(times.done_ns);
  entry->iteration = slot.iteration;
  entry->task = slot.task_index;
  entry->graph = static_cast<uint16_t>(slot.graph_index);
  entry->worker = static_cast<uint16_t>(blockIdx.x);
  /* A launched task waited in the queues, not for an event. */
  entry->waited_for = rank->placement != MPK_STATIC && slot.graph->placement == MPK_DYNAMIC ? MPK_TRACE_QUEUE : peek(times.waited_for);
  entry->peer_ns = peek(times.peer_ns);
  entry->page_ns = peek(times.page_ns);
  trace_keep_at(rank, blockIdx.x, count);
  shared.traced = count + 1;
}

}  // namespace gpu
}  // namespace mpk
