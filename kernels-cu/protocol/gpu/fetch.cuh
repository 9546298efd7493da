/* The fetch warp: decides which task the block runs next. Static placement: from the worker's list. Dynamic placement:
 * from the worker's queues, and from a list of held tasks that still wait, so no worker waits with a task in hand. Mixed
 * placement: as dynamic, with the lists of static graphs in between (cpu/worker_dynamic.cpp). */
#pragma once

#include "slots.cuh"

namespace mpk {
namespace gpu {

/* Called after the slot has been published: fetches the inputs that are found in tables (warp_loader.cuh), if the task has any. The next task's
 * descriptor is fetched only after that. This costs little, because such tasks are long. The slot does not change meanwhile, because the
 * loader releases it later. Returns false if the compute warps have left. */
__device__ __forceinline__ bool bring(const TaskSlot& slot) { return slot.task.code == MPK_NO_CODE || bring_code(slot.task.code, slot); }

__device__ inline void stop_block(SlotWriter& writer) {
  if (!writer.acquire()) return;
  writer.fill_stop();
  writer.publish();
}

/* A worker's list in one graph. */
struct WorkerList {
  uint32_t graph = 0xFFFFFFFFu, first = 0, last = 0;
  uint32_t head = 0; /* of the list's first 32 tasks, the one that this lane keeps */

  __device__ void read(const mpk_rank* rank, uint32_t graph_index, uint32_t worker, uint32_t lane) {
    const mpk_graph* from = rank->graphs + graph_index;
    graph = graph_index;
    first = last = 0;
    if (worker >= from->num_workers) return;
    first = from->worker_first[worker];
    last = from->worker_first[worker + 1];
    if (first + lane < last) head = from->worker_tasks[first + lane];
  }
};

/* Number of looks for the next iteration from one check of the abort word and the clock to the next. A check takes as long as a look. If an
 * iteration is published meanwhile, the block begins later, and one late block of many delays all others. So checks are rare: one in 0.2 ms. */
constexpr uint32_t kLooksBetweenPolls = 256;

__device__ inline void fetch_static(SlotWriter& writer, const mpk_rank* rank, uint32_t worker, uint32_t lane) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  WorkerList list;
  Descriptor next; /* of the list's first task; fetched before the next iteration is known, because that usually has the same graph */
  uint32_t seen = 0, told = 0;
  for (;;) {
    /* Here, because it would take time between the publication and the first task. The next iteration is published only after all tasks
     * are done. */
    if (!writer.wait_for_readers()) return;
    writer.record_tasks();
    Publication publication = {0, 0, false};
    int code = MPK_OK;
    if (lane == 0) {
      /* The block that runs the batch step polls a counter in its shared memory, because acquires would drop the step's data from the
       * L1 cache. The publication may become visible a little later than the counter. */
      const bool is_told = worker == 0;
      if (!is_told) publication = read_publication(rank);
      else publication.iteration = seen;
      /* Only the compute warps write the worker's status. */
      Wait wait(rank, nullptr, follower_deadline_ns(rank));
      for (uint32_t looks = 1; publication.iteration == seen && code == MPK_OK; ++looks) {
        if (looks % kLooksBetweenPolls == 0) code = wait.poll(seen);
        const uint32_t published = peek(shared_state().published);
        if (is_told && published == told) continue;
        publication = read_publication(rank);
        if (publication.iteration != seen) told = published;
      }
    }
    __syncwarp();
    code = __shfl_sync(kAll, code, 0);
    const bool stop = __shfl_sync(kAll, publication.stop, 0);
    if (code != MPK_OK && lane == 0) abort_broadcast(rank, static_cast<uint32_t>(code));
    if (code != MPK_OK || stop) return stop_block(writer);
    seen = __shfl_sync(kAll, publication.iteration, 0);
    const uint32_t graph_index = __shfl_sync(kAll, publication.graph, 0);
    const bool predicted = graph_index == list.graph;
    if (!predicted) list.read(rank, graph_index, worker, lane);
    if (list.first == list.last) continue;
    read_iteration(rank, graph_index, seen, lane);
    if (!predicted) next.fetch(rank, __shfl_sync(kAll, list.head, 0), lane);
    uint32_t ahead = list.head;
    for (uint32_t i = list.first; i < list.last; ++i) {
      if (!writer.acquire()) return;
      writer.fill(next, i + 1 == list.last ? list.last - list.first : 0);
      const TaskSlot& filled = writer.slot();
      writer.publish();
      if (!bring(filled)) return;
      const uint32_t after = i + 1 == list.last ? list.first : i + 1, place = (after - list.first) & 31;
      if (after == list.first) ahead = list.head;
      else if (place == 0 && after + lane < list.last) ahead = shared_state().fetched.worker_tasks[after + lane];
      next.fetch(rank, __shfl_sync(kAll, ahead, place), lane);
    }
  }
}

/* The held tasks. Their numbers are in device memory, directly before the worker's scratch, with room for all tasks of the largest
 * graph. */
class Deferred {
 public:
  __device__ Deferred(const mpk_rank* rank, uint32_t worker) {
    uint64_t most = 1;
    for (uint32_t g = 0; g < rank->num_graphs; ++g) {
      if (rank->graphs[g].num_tasks > most) most = rank->graphs[g].num_tasks;
    }
    tasks_ = reinterpret_cast<volatile uint32_t*>(rank->scratch[worker] - (most * 4 + 255) / 256 * 256);
  }
  __device__ uint32_t count() const { return count_; }
  __device__ uint32_t at(uint32_t place) const { return tasks_[place]; }
  __device__ void add(uint32_t task, uint32_t lane) {
    if (lane == 0) tasks_[count_] = task;
    ++count_;
    __syncwarp();
  }
  /* Keeps the order of the others. */
  __device__ void remove(uint32_t place, uint32_t lane) {
    --count_;
    if (lane == 0) {
      for (uint32_t i = place; i < count_; ++i) tasks_[i] = tasks_[i + 1];
    }
    __syncwarp();
  }

 private:
  volatile uint32_t* tasks_;
  uint32_t count_ = 0;
};

/* Whether the task in `slot` can run without waiting. All lanes get the same result. */
__device__ inline bool is_ready(const TaskSlot& slot, const mpk_rank* rank, uint32_t lane) {
  bool missing = false;
  /* Acquire, at system scope because a peer may have triggered: as in wait_inputs. */
  if (lane < slot.num_waits) missing = platform::load<platform::Scope::kSystem>(slot.waits[lane].counter, platform::kAcquire) < slot.waits[lane].wanted;
  for (uint32_t d = kSlotWaits + lane; d < slot.task.num_dependencies; d += 32) {
    const mpk_dependency& dependency = slot.graph->dependencies[slot.task.first_dependency + d];
    missing |= !event_test(slot.graph, dependency.event, slot.epoch, dependency.epochs_back);
  }
  if (__any_sync(0xFFFFFFFFu, missing)) return false;
  if ((slot.task.flags & MPK_TASK_FLAGGED_INPUTS) == 0 || slot.task.code == MPK_NO_CODE) return true;
  return ready_code(slot.task.code, slot, rank, lane);
}

/* Mixed placement: hands out the worker's list of an iteration of a static graph. A task's descriptor is fetched only when it is the
 * task's turn, because dynamic placement leaves no registers for one that is fetched ahead. Returns false if the compute warps have
 * left. */
__device__ inline bool run_list(const mpk_rank* rank, SlotWriter& writer, uint32_t graph_index, uint32_t number, uint32_t worker, uint32_t lane) {
  const mpk_graph* const graph = rank->graphs + graph_index;
  if (worker >= graph->num_workers) return true;
  const uint32_t first = graph->worker_first[worker], last = graph->worker_first[worker + 1];
  if (first == last) return true;
  if (!writer.wait_for_readers()) return false;
  read_iteration(rank, graph_index, number, lane);
  for (uint32_t i = first; i < last; ++i) {
    if (!writer.acquire()) return false;
    writer.fill(graph->worker_tasks[i], i + 1 == last ? last - first : 0);
    const TaskSlot& filled = writer.slot();
    writer.publish();
    if (!bring(filled)) return false;
  }
  return true;
}

/* Finds a task in one of the schedulers' queues. Each lane checks one queue. All lanes get the same result, except that `from` is null in
 * all lanes but the one that checked this queue. That lane later takes the task from it. */
__device__ inline bool find_task(const mpk_rank* rank, uint32_t worker, uint32_t lane, uint64_t* id, mpk_queue** from) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  for (uint32_t first = 0; first < rank->num_schedulers; first += 32) {
    mpk_queue* const queue = worker_queue(rank, worker, first + lane);
    const uint32_t filled = __ballot_sync(kAll, first + lane < rank->num_schedulers && queue_peek(queue, id));
    if (filled == 0) continue;
    const uint32_t chosen = __ffs(static_cast<int>(filled)) - 1;
    __syncwarp(); /* what that lane has acquired comes before what the others read */
    *id = __shfl_sync(kAll, *id, chosen);
    *from = lane == chosen ? queue : nullptr;
    return true;
  }
  return false;
}

/* At the end of a run: reports what this worker's tasks wait for. */
__device__ __noinline__ void report_parked(const mpk_rank* rank, uint32_t worker, uint32_t task) {
  mpk_status* const status = &rank->status[worker];
  /* Like read_iteration, but reads the memory again, so that no register is kept for this. */
  const mpk_batch* batch = rank->batch;
  report(&status->graph, batch->graph);
  report(&status->iteration, batch->iteration);
  report_parked_task(rank, &rank->graphs[batch->graph], task, batch->epoch, status);
}

template <bool kMixed>
__device__ inline void fetch_dynamic(SlotWriter& writer, const mpk_rank* rank, uint32_t worker, uint32_t lane) {
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const FetchedIteration& iteration = shared_state().fetched;
  Deferred deferred(rank, worker);
  Wait idle(rank, nullptr, follower_deadline_ns(rank));
  Wait held(rank, nullptr); /* with held tasks: this worker knows what is missing */
  uint32_t empty = 0; /* looks without result */
  uint32_t seen = 0;  /* mixed: the last publication that was read */
  for (;;) {
    /* Tasks in slots are all ready, so a slot becomes free. */
    if (!writer.acquire()) return;
    bool found = false;
    mpk_queue* from = nullptr;
    for (uint32_t i = 0; i < deferred.count() && !found; ++i) {
      writer.fill(deferred.at(i), 1);
      __syncwarp();
      found = is_ready(writer.slot(), rank, lane);
      if (found) deferred.remove(i, lane);
    }
    if (!found) {
      uint64_t id = 0;
      const bool launched = find_task(rank, worker, lane, &id, &from);
      int code = MPK_OK;
      if constexpr (kMixed) {
        if (!launched && deferred.count() == 0) {
          Publication now = {0, 0, false};
          if (lane == 0) now = read_publication(rank);
          __syncwarp();
          const uint32_t number = __shfl_sync(kAll, now.iteration, 0), graph = __shfl_sync(kAll, now.graph, 0);
          /* The end of the run comes through the queues, as event 0. */
          if (number != seen && __shfl_sync(kAll, static_cast<int>(now.stop), 0) == 0) {
            seen = number;
            if (rank->graphs[graph].placement == MPK_STATIC) {
              if (!run_list(rank, writer, graph, number, worker, lane)) return;
              idle.reset();
              continue;
            }
          }
        }
      }
      if (launched) {
        const uint32_t task = task_id_index(id);
        if (task == MPK_TASK_TERMINATE) {
          if (from != nullptr) queue_take(from);
          return stop_block(writer);
        }
        if (task_id_iteration(id) != iteration.number) {
          /* With a task in hand, the batch stays constant until the task is done (publication.h). */
          const Publication now = read_publication(rank);
          if (deferred.count() != 0 || now.iteration != task_id_iteration(id)) code = MPK_ABORT_QUEUE;
          else if (!writer.wait_for_readers()) return;
          else read_iteration(rank, now.graph, now.iteration, lane);
        }
        if (code == MPK_OK) {
          writer.fill(task, 1);
          __syncwarp();
          found = is_ready(writer.slot(), rank, lane);
          if (!found) deferred.add(task, lane);
        }
      } else if (lane == 0 && ++empty % platform::kStepsBetweenPolls == 0) {
        /* While they have a task, the status belongs to the compute warps. */
        if (deferred.count() != 0 && writer.readers_are_done()) {
          code = held.poll(deferred.at(0));
          if (code != MPK_OK) {
            report_parked(rank, worker, deferred.at(0));
            if (held.timed_out()) report(&rank->status[worker].timed_out, 1u);
          }
        } else {
          code = idle.poll(0);
        }
      }
      code = __shfl_sync(kAll, code, 0);
      if (code != MPK_OK) {
        if (lane == 0) abort_broadcast(rank, static_cast<uint32_t>(code));
        return stop_block(writer);
      }
      if (!found) {
        if (from != nullptr) queue_take(from);
        continue;
      }
    }
    idle.reset();
    held.reset();
    const TaskSlot& filled = writer.slot();
    writer.publish();
    if (from != nullptr) queue_take(from); /* last, because the compute warps wait for the slot */
    if (!bring(filled)) return;
  }
}

/* What the fetch warp does in a launch. */
__device__ inline void fetch_loop(const mpk_rank* rank, uint32_t worker, uint32_t lane) {
  SlotWriter writer(rank, lane);
  if (rank->placement == MPK_STATIC) fetch_static(writer, rank, worker, lane);
  else fetch_dynamic<platform::kMixedPlacement>(writer, rank, worker, lane);
  if (!is_traced(rank)) return;
  /* Tasks may still run. They end, or their waits see the abort. */
  while (load_acquire(shared_state().left) == 0) platform::sleep_ns(100);
  writer.record_tasks();
}

}  // namespace gpu
}  // namespace mpk
