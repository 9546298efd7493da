/* The shared memory of a block: slots of task descriptors, the ring of stages, the work area. */
#pragma once

#include "gpu/barrier.cuh"
#include "gpu/config.cuh"
#include "mpk/abi.h"
#include "steady_step.h"

namespace mpk {
namespace gpu {

/* An event that a task waits for, resolved: ready when *counter >= wanted. */
struct SlotWait {
  const uint64_t* counter;
  uint64_t wanted;
};

enum SlotKind : uint32_t { kSlotTask = 0, kSlotStop = 1 };

/* A position in a ring of `Size` places, and the parity of its phase. */
struct RingPlace {
  uint32_t index, parity;
  template <uint32_t Size>
  __device__ __forceinline__ void next() {
    if (++index == Size) {
      index = 0;
      parity ^= 1;
    }
  }
};

/* A task as the compute warps and the loader see it: written by the fetch warp, constant while it is in use. */
struct alignas(16) TaskSlot {
  uint32_t kind;
  uint32_t task_index, graph_index, iteration;
  uint32_t epoch;
  uint32_t num_rows, num_samples, num_active; /* of the batch; all rows where flagged words are refreshed */
  uint64_t batch_hash;
  const mpk_graph* graph;
  uint32_t num_waits;     /* in `waits`; further dependencies are read from the graph */
  uint32_t finished;      /* tasks to count in control->progress when this one is done */
  uint64_t fetched_ns;    /* trace */
  uint64_t* trigger;      /* static placement: the counter that the task triggers, here or at a peer; else NULL */
  uint32_t trigger_system; /* 1: with system scope */
  uint32_t tag;           /* of the flagged words that the task writes or waits for */
  uint32_t trigger_steps; /* 1: by the protocol's trigger_event, */
  mpk_event triggered;    /* of which this is the event, if this rank owns it */
  mpk_task task;
  uint32_t params[MPK_MAX_PARAMS]; /* of the variant */
  SlotWait waits[kSlotWaits];
  alignas(16) mpk_operand operands[kSlotOperands]; /* inputs, then outputs */
};

/* Timeline: what is not in the slot of a task that has ended (timeline.cuh). */
struct TaskTimes {
  uint64_t ready_ns, done_ns;
  uint32_t waited_for, peer_ns, page_ns; /* as in mpk_trace_record */
  uint32_t unrecorded;                   /* 1: the task has ended, and the fetch warp has not recorded it */
};

/* The iteration of the fetch warp's tasks. It is not in registers: they would be spilled, and reading them back after the publication takes
 * as long as reading the batch. */
struct FetchedIteration {
  const mpk_graph* graph; /* NULL: none yet. Its addresses follow: */
  const mpk_task* tasks;
  const mpk_operand* operands;
  const mpk_variant* variants;
  const mpk_dependency* dependencies;
  const mpk_event* events;
  uint64_t* counters;
  const uint32_t* worker_tasks;
  uint32_t index, number; /* of the graph; of the iteration */
  bool dynamic;
};

/* The block's shared memory, in this order: stages, work area, then this. */
struct alignas(128) Shared {
  uint64_t stage_full[kStages];  /* loader -> compute */
  uint64_t stage_empty[kStages]; /* compute -> loader, one arrival of each compute warp */
  uint64_t place_full[kPlaces];  /* of wide products: loader -> compute */
  uint64_t place_empty[kPlaces]; /* compute -> loader */
  uint64_t slot_full[kSlots];    /* fetch -> loader, prefetch, compute */
  uint64_t slot_empty[kSlots];   /* all three -> fetch */
  int32_t code;                  /* compute warps: an abort code once one of them failed */
  /* The compute warps' next slot and stage, between two tasks. They are not in registers: those would be spilled around the
   * kernel variants, and reading them back takes a microsecond while the memory is busy. */
  RingPlace next_slot, next_stage, next_place;
  uint32_t wide_begun;           /* wide products that the compute warps have begun since the launch; wraps */
  uint64_t ready_ns;             /* timeline: of the task that runs, see mpk_trace_record */
  uint32_t peer_ns, page_ns;
  uint32_t left;                 /* 1: the compute warps have left; nobody takes from ring and slots any more */
  uint32_t streamed;             /* stages that the loader has started since the launch */
  uint32_t ring_is_full;         /* 1: the loader waits for a free stage */
  uint32_t needs_noise;          /* 1: most tokens of the first thread needed their noise, in the block's last sampled logits. Only times depend on it */
  uint32_t published;            /* static placement, the block with the batch step: iterations that it has published since the launch */
  PreparedStep step;             /* the block with the batch step, or with a scheduler */
  uint32_t compute_state;        /* enum ComputeState, where kTellsState */
  mpk_rank rank;                 /* a copy of the rank's description */
  /* The iteration's data for the block's tasks: a copy of the batch's description (the arrays stay where they are), and the
   * numbers of its first slots. The fetch warp writes them while no task of the block runs. The addresses of the arrays are there from
   * the start. */
  mpk_batch batch;
  uint32_t pages_per_slot;
  uint32_t kept_active; /* slots that the arrays below can have: at most kKeptActive, and at most mpk_batch_config.max_batch */
  int32_t active_slot[kKeptActive], active_first_row[kKeptActive], active_num_rows[kKeptActive], active_context[kKeptActive];
  FetchedIteration fetched;
  uint64_t ring_heads[kMostRanks]; /* the remote scheduler's own positions */
  TaskSlot slots[kSlots];
  /* While the loader has lent the ring of stages to the fetch warp (warp_loader.cuh): the next stage, and how often the ring has
   * been lent and returned. */
  RingPlace lent;
  uint32_t lent_count, returned_count;
  uint32_t bring_begun, brought; /* number of lists that the compute warps have prepared for the fetch warp, and that it has finished */
  /* Timeline: mpk_rank.trace_count of the block's row, which only the fetch warp uses; and the times of the slots' tasks. */
  uint64_t traced;
  TaskTimes times[kSlots];
};

constexpr uint32_t kSharedBytes = kStages * kStageBytes + kWorkBytes + static_cast<uint32_t>(sizeof(Shared));

#ifdef MPK_SHARED_BYTES
static_assert(kSharedBytes <= MPK_SHARED_BYTES, "the launch gives the block MPK_SHARED_BYTES");
#endif

__device__ __forceinline__ uint8_t* shared_base() {
  extern __shared__ __align__(1024) uint8_t mpk_shared_memory[];
  return mpk_shared_memory;
}
__device__ __forceinline__ uint8_t* stage_at(uint32_t stage) { return shared_base() + stage * kStageBytes; }
__device__ __forceinline__ uint8_t* work_area() { return shared_base() + kStages * kStageBytes; }
__device__ __forceinline__ Shared& shared_state() { return *reinterpret_cast<Shared*>(shared_base() + kStages * kStageBytes + kWorkBytes); }

/* Reads a value that does not change while the task runs. It is always fetched from memory, so that it does not occupy a
 * register. */
template <typename T>
__device__ __forceinline__ T reread(const T& word) { return *const_cast<const volatile T*>(&word); }

/* Words in which warps publish their progress. No other memory is read because of them. In debug builds they use atomic
 * operations, because racecheck reports such words as races. */
template <typename T>
__device__ __forceinline__ T peek(const T& word) {
  if constexpr (kEveryLaneArrives && sizeof(T) == 4) return static_cast<T>(atomicOr(reinterpret_cast<uint32_t*>(const_cast<T*>(&word)), 0u));
  else return *const_cast<const volatile T*>(&word);
}

__device__ __forceinline__ RingPlace peek(const RingPlace& place) { return {peek(place.index), peek(place.parity)}; }

template <typename T>
__device__ __forceinline__ void poke(T& word, T value) {
  if constexpr (kEveryLaneArrives && sizeof(T) == 4) atomicExch(reinterpret_cast<uint32_t*>(&word), static_cast<uint32_t>(value));
  else *const_cast<volatile T*>(&word) = value;
}
__device__ __forceinline__ void poke(RingPlace& place, const RingPlace& value) {
  poke(place.index, value.index);
  poke(place.parity, value.parity);
}

/* The compute warps. */
__device__ __forceinline__ void tell_state(ComputeState state) {
  if constexpr (kTellsState) {
    if (threadIdx.x == 0) poke(shared_state().compute_state, static_cast<uint32_t>(state));
  }
}

}  // namespace gpu
}  // namespace mpk
