/* The interface for the code of a task, and the rules that it must follow.
 *
 * A task type is a struct with static members, specialised by template arguments (its folder's `gpu` function in mod.rs
 * names them):
 *
 *   struct Example : mpk::gpu::TaskCode {
 *     static constexpr bool kInlined = true;                   // only for code that must be part of the kernel's function
 *     static __device__ int run(mpk::gpu::Context& context);   // all kComputeThreads threads
 *     static __device__ bool load(mpk::gpu::Loader& loader);   // the loader and the prefetch warp; only where weights are streamed
 *     static __device__ bool bring(const mpk::gpu::TaskSlot& slot);   // all lanes of the fetch warp; only if `load` lends it the ring
 *     static __device__ bool ready(...);                       // the fetch warp; only where flagged words are read
 *   };
 *
 * - `run` calls `wait_inputs` exactly once: before it writes anything, and before it reads anything that another task
 *   writes. It may read constant operands earlier, and use the work area.
 * - In `run`, every warp takes exactly the stages that `load` streams or `bring` brings.
 * - Threads leave `run` together. A thread that meets an error calls `fail` and continues to the next `sync` (or to the
 *   end of `run`). `sync` gives all threads the same code. If that is not MPK_OK, all of them return it.
 * - Outputs need no barrier after them: the caller orders them before the task's trigger. */
#pragma once

#include "gpu/ring.cuh"
#include "gpu/shared.cuh"
#include "platform/platform.h"
#include "event.h"
#include "kernel_wait.h"

namespace mpk {
namespace gpu {

class Context {
 public:
  const TaskSlot* slot;
  uint32_t thread; /* 0 .. kComputeThreads - 1 */
  uint32_t warp, lane;

  __device__ __forceinline__ explicit Context(const TaskSlot* task) : slot(task) { find_thread(); }

  /* The thread's index is read again for each task and after its wait. Otherwise the compiler would compute what depends only on
   * it, in all kernel variants, before the loop over tasks, and keep that in registers that the variants need. */
  __device__ __forceinline__ void find_thread() {
    thread = thread_index();
    warp = thread / 32;
    lane = thread % 32;
  }

  static __device__ __forceinline__ uint32_t thread_index() {
    uint32_t index;
    asm volatile("mov.u32 %0,%%tid.x;" : "=r"(index));
    return index;
  }
  static __device__ __forceinline__ const mpk_rank* rank() { return &shared_state().rank; }
  static __device__ __forceinline__ mpk_status* status() { return rank()->status + blockIdx.x; }
  /* kWorkBytes of shared memory, aligned to 1024; its content does not outlive the task. */
  static __device__ __forceinline__ uint8_t* work() { return work_area(); }

  __device__ __forceinline__ const mpk_operand& input(uint32_t i) const { return slot->operands[i]; }
  __device__ __forceinline__ const mpk_operand& output(uint32_t i) const { return slot->operands[slot->task.num_inputs + i]; }
  template <typename Params>
  __device__ __forceinline__ const Params& params() const { return *reinterpret_cast<const Params*>(slot->params); }
  __device__ __forceinline__ const mpk_batch* batch() const { return &shared_state().batch; }
  /* The numbers of active slot `a`, see mpk_batch. */
  struct Active {
    uint32_t slot, first_row, num_rows, context;
  };
  static __device__ __forceinline__ Active active(uint32_t a) {
    const Shared& shared = shared_state();
    if (a < kKeptActive) {
      return {static_cast<uint32_t>(shared.active_slot[a]), static_cast<uint32_t>(shared.active_first_row[a]),
              static_cast<uint32_t>(shared.active_num_rows[a]), static_cast<uint32_t>(shared.active_context[a])};
    }
    const mpk_batch& batch = shared.batch;
    return {static_cast<uint32_t>(batch.active_slot[a]), static_cast<uint32_t>(batch.active_first_row[a]),
            static_cast<uint32_t>(batch.active_num_rows[a]), static_cast<uint32_t>(batch.active_context[a])};
  }
  static __device__ __forceinline__ uint32_t pages_per_slot() { return shared_state().pages_per_slot; }

  /* Rows in use of `capacity`: the values of a `rows_kind` word in a params struct (0 tokens, 1 samples, 2 all). */
  __device__ __forceinline__ uint32_t rows_in_use(uint32_t rows_kind, uint32_t capacity) const {
    const uint32_t rows = rows_kind == 0 ? slot->num_rows : rows_kind == 1 ? slot->num_samples : capacity;
    return rows < capacity ? rows : capacity;
  }
  /* The same for a block of `capacity` rows that starts at row `first` of its tensor. */
  __device__ __forceinline__ uint32_t rows_in_use_from(uint32_t rows_kind, uint32_t first, uint32_t capacity) const {
    const uint32_t rows = rows_in_use(rows_kind, first + capacity);
    return rows > first ? rows - first : 0;
  }

  /* Barrier of all compute threads; orders their memory accesses. Returns MPK_OK, or the code with which a thread failed before the
   * barrier. The result is the same for all threads, because the failure passes through the barrier itself. */
  static __device__ __forceinline__ int sync() {
    return compute_barrier_any(peek(shared_state().code) != MPK_OK) ? peek(shared_state().code) : static_cast<int32_t>(MPK_OK);
  }
  static __device__ __forceinline__ void fail(int code) { poke(shared_state().code, code); }

  /* All compute threads: waits until every event that the task depends on is ready. Also a barrier. `loads_under_way`: the task has
   * begun loads that it does not need yet. `always`: also in a kernel that leaves out waits. */
  __device__ int wait_inputs(bool loads_under_way = false, bool always = false);

  /* One thread: waits until the flagged word at `word` (8 bytes, this rank's memory) has arrived, and returns its value. After a
   * failure, which `fail` records, the value is arbitrary. */
  __device__ float wait_flagged(const uint64_t* word) const;
};

/* What a task type has unless it says otherwise. */
struct TaskCode {
  /* Whether `run` is always part of the kernel's own function: for products that run asynchronously on the tensor cores, which the
   * compiler serialises in other functions, and for what a decode step mainly consists of. See run_variant. */
  static constexpr bool kInlined = false;
  static __device__ bool load(Loader&) { return true; }
  static __device__ bool bring(const TaskSlot&) { return true; }
  /* Whether all flagged words that the task reads have arrived; all lanes of the fetch warp call it and get the same. */
  static __device__ bool ready(const TaskSlot&, const mpk_rank*, uint32_t) { return true; }
};

__device__ __forceinline__ uint32_t element_bytes(uint32_t dtype) {
  return dtype == MPK_U8 ? 1 : dtype == MPK_F16 || dtype == MPK_BF16 ? 2 : dtype == MPK_F32_FLAGGED ? 8 : 4;
}
/* Address of row `row` of a view whose dimension 0 is rows. */
__device__ __forceinline__ uint8_t* row_address(const mpk_operand& view, uint32_t row) {
  return reinterpret_cast<uint8_t*>(view.addr) + static_cast<uint64_t>(row) * view.strides[0] * element_bytes(view.dtype);
}

/* Number of polls before the protocol's bounded wait takes over. That wait also checks the abort word and the clock. */
constexpr uint32_t kQuickPolls = 512;

/* The slow part of wait_inputs, for one lane: a bounded wait for one event after the other, so that the status shows the missing
 * event with its own counts. */
__device__ __forceinline__ int wait_events_slowly(const mpk_rank* rank, mpk_status* status, const TaskSlot* slot) {
  int code = MPK_OK;
#pragma unroll 1
  for (uint32_t i = 0; i < slot->task.num_dependencies && code == MPK_OK; ++i) {
    const mpk_dependency& d = slot->graph->dependencies[slot->task.first_dependency + i];
    code = event_wait(rank, slot->graph, d.event, slot->epoch, d.epochs_back, status);
  }
  return code;
}

__device__ __forceinline__ int Context::wait_inputs(bool loads_under_way, bool always) {
  tell_state(kIsWaiting);
  const bool waits = !kWithoutWaits || always || slot->num_rows > kMostRowsWithoutWaits;
  /* Not the warp that triggers the last task's event at this time, because a release takes most of a microsecond. */
  if (waits && thread_index() / 32 == kComputeWarps - 1) {
    const uint32_t lane = thread_index() % 32, count = slot->num_waits;
    uint64_t wanted = 0;
    const uint64_t* counter = nullptr;
    if (lane < count) {
      wanted = slot->waits[lane].wanted;
      counter = slot->waits[lane].counter;
    }
    bool missing = lane < count;
    uint32_t awaited = 0; /* timeline: lanes whose event was missing at the last test but one */
    /* Acquire, with system scope because a peer may have triggered. The event's own test (event.h) chooses the scope; here the
     * wider scope serves both cases. Pairs with the triggers' release. Each acquire empties the first-level cache, which would hurt
     * loads that are under way. With such loads, the polls are relaxed and one acquire follows. */
    for (uint32_t polls = 0; polls < kQuickPolls; ++polls) {
      if (missing) {
        missing = (loads_under_way ? platform::load<platform::Scope::kSystem>(counter, platform::kRelaxed)
                                   : platform::load<platform::Scope::kSystem>(counter, platform::kAcquire)) < wanted;
      }
      if constexpr (platform::kTraces) {
        const uint32_t still = __ballot_sync(0xFFFFFFFFu, missing);
        if (still != 0) awaited = still;
      }
      if (!__any_sync(0xFFFFFFFFu, missing)) break;
    }
    if constexpr (platform::kTraces) {
      /* Beside the slot, because this warp may begin the next task before the task's times are taken. */
      TaskTimes& times = shared_state().times[slot - shared_state().slots];
      if (lane == 0) poke(times.waited_for, awaited != 0 ? static_cast<uint32_t>(__ffs(static_cast<int>(awaited)) - 1) : MPK_TRACE_NO_WAIT);
    }
    if (loads_under_way && lane < count && !missing) platform::load<platform::Scope::kSystem>(counter, platform::kAcquire);
    for (uint32_t i = kSlotWaits + lane; i < slot->task.num_dependencies; i += 32) {
      const mpk_dependency& d = slot->graph->dependencies[slot->task.first_dependency + i];
      missing |= !event_test(slot->graph, d.event, slot->epoch, d.epochs_back);
    }
    if (__any_sync(0xFFFFFFFFu, missing) && lane == 0) {
      const int code = wait_events_slowly(rank(), status(), slot);
      if (code != MPK_OK) fail(code);
    }
    __syncwarp();
  }
  const int code = sync();
  tell_state(kIsReady);
  if (thread_index() == 0 && is_traced(rank())) poke(shared_state().ready_ns, platform::clock_ns());
  find_thread();
  return code;
}

__device__ __forceinline__ uint64_t wait_flagged_slowly(const mpk_rank* rank, mpk_status* status, const uint64_t* word, uint32_t tag, int* code) {
  Wait wait(rank, status);
  uint64_t seen = 0;
  for (;;) {
    seen = platform::load<platform::Scope::kSystem>(word, platform::kRelaxed);
    if (mpk_flagged_arrived(seen, tag)) return seen;
    *code = wait.poll(seen >> 32);
    if (*code != MPK_OK) {
      report_wait(status, MPK_WORKER_WAITS_FLAG, MPK_EVENT_INVALID, tag, seen >> 32);
      return seen;
    }
  }
}

__device__ inline float Context::wait_flagged(const uint64_t* word) const {
  if constexpr (kWithoutAllreduces) return 0.0f;
  uint64_t seen = 0;
  [[maybe_unused]] uint64_t began_ns = 0;
  if constexpr (platform::kTraces) began_ns = wait_clock();
  for (uint32_t polls = 0; polls < kQuickPolls; ++polls) {
    /* Relaxed: the word carries its value, and no other memory is read because of it. */
    seen = platform::load<platform::Scope::kSystem>(word, platform::kRelaxed);
    if (!mpk_flagged_arrived(seen, slot->tag)) continue;
    if constexpr (platform::kTraces) add_wait(shared_state().peer_ns, began_ns);
    return mpk_flagged_value(seen);
  }
  int code = MPK_OK;
  seen = wait_flagged_slowly(rank(), status(), word, slot->tag, &code);
  if (code != MPK_OK) fail(code);
  if constexpr (platform::kTraces) add_wait(shared_state().peer_ns, began_ns);
  return mpk_flagged_value(seen);
}

}  // namespace gpu
}  // namespace mpk
