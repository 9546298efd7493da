/* The fetch warp's side of the slots. It brings a task's descriptor from the graph into shared memory ahead of its
 * turn, with the addresses of its events and of its trigger. */
#pragma once

#include "gpu/context.cuh"
#include "missing.h"
#include "scheduler_step.h"
#include "timeline.cuh"

namespace mpk {
namespace gpu {

static_assert(sizeof(mpk_task) == 80 && offsetof(mpk_task, first_operand) == 8 && offsetof(mpk_task, num_inputs) == 16 &&
                  offsetof(mpk_task, num_dependencies) == 20 && offsetof(mpk_task, variant) == 24 && offsetof(mpk_task, flag_count) == 72 &&
                  offsetof(mpk_task, flag_number) == 76,
              "Descriptor::fetch reads the task as words");

/* Reads the iteration into shared memory: into `fetched`, and into the block's copies of the batch. Called by all lanes of a worker that
 * still has to run a task of this iteration (publication.h), after SlotWriter::wait_for_readers. So no warp reads the block's copies
 * while they are written. The next slot's barrier hands them over. */
__device__ inline void read_iteration(const mpk_rank* rank, uint32_t graph_index, uint32_t iteration, uint32_t lane) {
  Shared& shared = shared_state();
  FetchedIteration& fetched = shared.fetched;
  const mpk_graph* const graph = rank->graphs + graph_index;
  const bool changes = fetched.graph != graph; /* a graph is constant for a launch, and usually that of the iteration before */
  constexpr uint32_t kNumbers = offsetof(mpk_batch, row_token) / 4, kRounds = (kKeptActive + 31) / 32;
  static_assert(kNumbers <= 32, "a lane copies a word");
  const uint32_t word = lane < kNumbers ? reinterpret_cast<const uint32_t*>(rank->batch)[lane] : 0;
  /* All loads together: the addresses of the arrays are constant, and entries after the last active slot do no harm. If the number of
   * active slots were awaited, the block would begin its first task a round trip to the L2 cache later. */
  int32_t slots[kRounds], first_rows[kRounds], rows[kRounds], contexts[kRounds];
#pragma unroll
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t a = i * 32 + lane;
    slots[i] = first_rows[i] = rows[i] = contexts[i] = 0;
    if (a >= shared.kept_active) continue;
    slots[i] = shared.batch.active_slot[a];
    first_rows[i] = shared.batch.active_first_row[a];
    rows[i] = shared.batch.active_num_rows[a];
    contexts[i] = shared.batch.active_context[a];
  }
  __syncwarp(); /* all lanes have looked at `fetched` */
  if (changes && lane == 0) {
    fetched.graph = graph;
    fetched.tasks = graph->tasks;
    fetched.operands = graph->operands;
    fetched.variants = graph->variants;
    fetched.dependencies = graph->dependencies;
    fetched.events = graph->events;
    fetched.counters = graph->counters;
    fetched.worker_tasks = graph->worker_tasks;
    fetched.index = graph_index;
    fetched.dynamic = graph->placement == MPK_DYNAMIC;
  }
  if (lane == 0) fetched.number = iteration;
  if (lane < kNumbers) reinterpret_cast<uint32_t*>(&shared.batch)[lane] = word;
#pragma unroll
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t a = i * 32 + lane;
    if (a >= kKeptActive) continue;
    shared.active_slot[a] = slots[i];
    shared.active_first_row[a] = first_rows[i];
    shared.active_num_rows[a] = rows[i];
    shared.active_context[a] = contexts[i];
  }
  __syncwarp(); /* the lanes read what others have written */
}

/* This lane's part of the data that a task's slot gets from its graph. The data is constant for a launch, so it can be fetched before
 * the iteration is known. */
struct Descriptor {
  static constexpr uint32_t kTaskWords = sizeof(mpk_task) / 4, kOperandWords = sizeof(mpk_operand) / 4;

  uint32_t index;
  uint32_t word = 0;          /* of the task, by the first kTaskWords lanes */
  uint32_t operands[(kSlotOperands * kOperandWords + 31) / 32];
  uint32_t operand_words;     /* in all lanes */
  uint32_t param = 0;         /* of the variant */
  uint32_t num_waits;         /* lane i has the dependency with number i: */
  const uint64_t* counter = nullptr;
  uint32_t num_triggers = 0, epochs_back = 0;
  struct {
    uint32_t flag_count, flag_number; /* as in mpk_task, for MPK_FLAG_TAG */
  } flagged;
  uint64_t trigger_event;
  mpk_event triggered = {};   /* only in the first lane, and only if this rank owns the event */

  __device__ void fetch(const mpk_rank* rank, uint32_t task, uint32_t lane) {
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    const FetchedIteration& graph = shared_state().fetched;
    index = task;
    word = lane < kTaskWords ? reinterpret_cast<const uint32_t*>(graph.tasks + task)[lane] : 0;
    trigger_event = static_cast<uint64_t>(__shfl_sync(kAll, word, 1)) << 32 | __shfl_sync(kAll, word, 0);
    const uint32_t first_operand = __shfl_sync(kAll, word, 2), first_dependency = __shfl_sync(kAll, word, 3);
    const uint32_t counts = __shfl_sync(kAll, word, 4), num_dependencies = __shfl_sync(kAll, word, 5) & 0xFFFFu;
    const uint32_t variant = __shfl_sync(kAll, word, 6) & 0xFFFFu;
    flagged = {__shfl_sync(kAll, word, 18), __shfl_sync(kAll, word, 19)};
    uint32_t num_operands = (counts & 0xFFFFu) + (counts >> 16);
    if (num_operands > kSlotOperands) num_operands = kSlotOperands; /* the host refuses such a task */
    operand_words = num_operands * kOperandWords;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(graph.operands + first_operand);
#pragma unroll
    for (uint32_t i = 0; i < sizeof(operands) / 4; ++i) {
      const uint32_t at = i * 32 + lane;
      operands[i] = at < operand_words ? words[at] : 0;
    }
    param = lane < MPK_MAX_PARAMS ? graph.variants[variant].params[lane] : 0;
    num_waits = num_dependencies < kSlotWaits ? num_dependencies : kSlotWaits;
    bool happened = false;
    if (lane < num_waits) {
      const mpk_dependency dependency = graph.dependencies[first_dependency + lane];
      counter = graph.counters + static_cast<uint64_t>(dependency.event) * MPK_COUNTER_STRIDE;
      num_triggers = graph.events[dependency.event].num_triggers;
      epochs_back = dependency.epochs_back;
      happened = dependency.event == MPK_EVENT_BEGIN;
    }
    /* Static placement: a task that depends on the begin event alone waits for nothing. The batch step triggers that event before it
     * releases the publication (publish). This warp has acquired the publication, and the slot's barrier hands it over to the compute
     * warps: it orders their loads after the batch step's stores, as an acquire of the event would. */
    if (!graph.dynamic && num_dependencies <= kSlotWaits && __all_sync(kAll, lane >= num_waits || happened)) num_waits = 0;
    if (lane == 0 && is_own_event(rank, trigger_event)) triggered = graph.events[event_id_index(trigger_event)];
  }
};

/* All lanes of the fetch warp call the same functions. */
class SlotWriter {
 public:
  __device__ SlotWriter(const mpk_rank* rank, uint32_t lane) : rank_(rank), lane_(lane) {}

  __device__ TaskSlot& slot() const { return shared_state().slots[place_]; }

  /* Waits until the next slot is free, and records its last task. False if the compute warps have left. */
  __device__ bool acquire() const {
    Shared& shared = shared_state();
    while (!mbarrier_test(&shared.slot_empty[place_], parity_ ^ 1)) {
      if (peek(shared.left) != 0) return false;
    }
    if (is_traced(rank_) && lane_ == 0) record_task(rank_, place_);
    return true;
  }

  /* Timeline: records all tasks that have ended and are not recorded yet, the oldest first. Called when all slots are free, or the compute
   * warps have left. */
  __device__ void record_tasks() const {
    if (!is_traced(rank_) || lane_ != 0) return;
    for (uint32_t i = 0; i < kSlots; ++i) record_task(rank_, (place_ + i) % kSlots);
  }

  /* Whether all slots except the acquired one are free now. */
  __device__ bool readers_are_done() const {
    for (uint32_t i = 0; i < kSlots; ++i) {
      if (i != place_ && !mbarrier_test(&shared_state().slot_empty[i], i < place_ ? parity_ : parity_ ^ 1)) return false;
    }
    return true;
  }

  /* Waits until all slots except an acquired one are free. Then all tasks that were handed out are done. Before an iteration's first
   * task they always are, but only these barriers let this warp see it. Returns false if the compute warps have left. */
  __device__ bool wait_for_readers() const {
    Shared& shared = shared_state();
    for (uint32_t i = 0; i < kSlots; ++i) {
      while (!mbarrier_test(&shared.slot_empty[i], i < place_ ? parity_ : parity_ ^ 1)) {
        if (peek(shared.left) != 0) return false;
      }
    }
    return true;
  }

  /* Writes task `index` of the iteration; TaskSlot explains `finished`. */
  __device__ void fill(uint32_t index, uint32_t finished) const {
    Descriptor descriptor;
    descriptor.fetch(rank_, index, lane_);
    fill(descriptor, finished);
  }
  /* The same, with a descriptor already fetched. */
  __device__ void fill(const Descriptor& from, uint32_t finished) const {
    TaskSlot& to = slot();
    const FetchedIteration& iteration = shared_state().fetched;
    const mpk_batch& batch = shared_state().batch;
    if (lane_ < Descriptor::kTaskWords) reinterpret_cast<uint32_t*>(&to.task)[lane_] = from.word;
#pragma unroll
    for (uint32_t i = 0; i < sizeof(from.operands) / 4; ++i) {
      const uint32_t at = i * 32 + lane_;
      if (at < from.operand_words) reinterpret_cast<uint32_t*>(to.operands)[at] = from.operands[i];
    }
    if (lane_ < MPK_MAX_PARAMS) to.params[lane_] = from.param;
    if (lane_ < from.num_waits) {
      /* As event_wanted. */
      const bool waits = batch.epoch > from.epochs_back;
      to.waits[lane_] = {from.counter, waits ? static_cast<uint64_t>(from.num_triggers) * (batch.epoch - from.epochs_back) : 0};
    }
    if (lane_ == 0) {
      to.kind = kSlotTask;
      to.task_index = from.index;
      to.graph_index = iteration.index;
      to.iteration = iteration.number;
      to.epoch = batch.epoch;
      to.tag = MPK_FLAG_TAG(from.flagged, batch.epoch);
      const bool refresh = MPK_FLAG_REFRESH(from.flagged, batch.epoch);
      to.num_rows = refresh ? iteration.graph->rows : batch.num_rows;
      to.num_samples = refresh ? iteration.graph->samples : batch.num_samples;
      to.num_active = batch.num_active;
      to.batch_hash = batch.hash;
      to.graph = iteration.graph;
      to.num_waits = from.num_waits;
      to.finished = finished;
      to.fetched_ns = trace_clock(rank_);
      resolve_trigger(from.trigger_event, from.triggered, &to);
    }
  }

  __device__ void fill_stop() const {
    if (lane_ == 0) slot().kind = kSlotStop;
  }

  /* Hands the slot over to the loader and the compute warps. */
  __device__ void publish() {
    __syncwarp();
    if (kEveryLaneArrives || lane_ == 0) mbarrier_arrive(&shared_state().slot_full[place_]);
    if (++place_ == kSlots) {
      place_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  /* Finds the one address that trigger_event (trigger.h) would add to in static placement. `event` is Descriptor::triggered. */
  __device__ void resolve_trigger(uint64_t event_id, const mpk_event& event, TaskSlot* to) const {
    const FetchedIteration& iteration = shared_state().fetched;
    to->trigger = nullptr;
    to->trigger_system = 0;
    to->trigger_steps = 0;
    if (event_id == MPK_EVENT_INVALID) return;
    const bool own = is_own_event(rank_, event_id);
    if (own) to->triggered = event;
    if (iteration.dynamic) {
      to->trigger_steps = 1;
      return;
    }
    uint64_t* counter = iteration.counters + static_cast<uint64_t>(event_id_index(event_id)) * MPK_COUNTER_STRIDE;
    if (own && !event.remote_triggers) {
      to->trigger = counter;
      return;
    }
    /* As platform::signal_add: counters that peers trigger take one kind of addition. */
    to->trigger = rank_->signals == MPK_SIGNALS_DIRECT ? platform::peer_address(rank_, own ? rank_->rank : event_id_owner(event_id), counter) : nullptr;
    to->trigger_system = 1;
    to->trigger_steps = to->trigger == nullptr;
  }

  const mpk_rank* rank_;
  uint32_t lane_;
  uint32_t place_ = 0, parity_ = 0;
};

}  // namespace gpu
}  // namespace mpk
