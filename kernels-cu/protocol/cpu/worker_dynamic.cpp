/* Dynamic placement: a worker takes tasks from its queues, one queue per scheduler. A task that still waits (for flagged
 * words, or for an event of an earlier epoch) is held aside, so it never blocks the worker.
 *
 * Mixed placement: between dynamic iterations the worker runs its lists of the static graphs. Until an iteration has ended,
 * all of its tasks come the same way: in a dynamic iteration, a worker with an empty queue has nothing to do, and a static
 * iteration queues nothing. The end of the run comes through the queues, as event 0. */
#include "cpu/worker.h"

#include <stdlib.h>

namespace mpk {
namespace cpu {

namespace {

/* Indices of held tasks, with room for every task of the largest graph. */
class Deferred {
 public:
  explicit Deferred(const mpk_rank* rank) {
    uint32_t capacity = 1;
    for (uint32_t g = 0; g < rank->num_graphs; ++g) {
      if (rank->graphs[g].num_tasks > capacity) capacity = rank->graphs[g].num_tasks;
    }
    tasks = static_cast<uint32_t*>(malloc(capacity * sizeof(uint32_t)));
  }
  ~Deferred() { free(tasks); }
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

  void remove(uint32_t place) {
    --count;
    for (uint32_t i = place; i < count; ++i) tasks[i] = tasks[i + 1];
  }

  uint32_t* tasks;
  uint32_t count = 0;
};

/* Whether a launched task can run without waiting. */
bool is_ready(const Worker& worker, const Iteration& iteration, uint32_t task_index) {
  const mpk_graph* graph = iteration.graph;
  const mpk_task* task = &graph->tasks[task_index];
  if (!dependencies_met(graph, task, iteration.epoch)) return false;
  if ((task->flags & MPK_TASK_FLAGGED_INPUTS) == 0) return true;
  const mpk_kernel_fn ready = worker.rank->kernels[task->task_type].ready;
  if (ready == nullptr) return true;
  const mpk_kernel_args args = kernel_args(worker, iteration, task_index);
  return ready(&args) != 0;
}

bool pop_any(const Worker& worker, uint64_t* id) {
  for (uint32_t scheduler = 0; scheduler < worker.rank->num_schedulers; ++scheduler) {
    if (queue_pop(worker_queue(worker.rank, worker.index, scheduler), id)) return true;
  }
  return false;
}

}  // namespace

int run_dynamic(const Worker& worker) {
  const mpk_rank* rank = worker.rank;
  Deferred deferred(rank);
  if (deferred.tasks == nullptr) return MPK_ABORT_KERNEL;
  Iteration iteration = {nullptr, 0, 0, 0};
  Wait idle(rank, worker.status, follower_deadline_ns(rank));
  Wait held(rank, worker.status); /* with held tasks: this worker knows what is missing */
  uint64_t looks_since_ns = trace_clock(rank);
  uint32_t waited_for = MPK_TRACE_NO_WAIT;
  uint32_t seen = 0; /* mixed: the last publication that this worker has read */
  for (;;) {
    int code = abort_code(rank);
    if (code != MPK_OK) return code;
    uint32_t next = MPK_TASK_TERMINATE;
    for (uint32_t i = 0; i < deferred.count; ++i) {
      if (!is_ready(worker, iteration, deferred.tasks[i])) continue;
      next = deferred.tasks[i];
      deferred.remove(i);
      break;
    }
    if (next == MPK_TASK_TERMINATE) {
      uint64_t id;
      if (pop_any(worker, &id)) {
        next = task_id_index(id);
        if (next == MPK_TASK_TERMINATE) return MPK_OK;
        /* With a task in hand, the batch stays constant until the task is done (publication.h). */
        if (task_id_iteration(id) != iteration.number) {
          if (deferred.count != 0) return MPK_ABORT_QUEUE;
          iteration = current_iteration(rank);
          if (task_id_iteration(id) != iteration.number || next >= iteration.graph->num_tasks) return MPK_ABORT_QUEUE;
          report(&worker.status->graph, iteration.graph_index);
          report(&worker.status->iteration, iteration.number);
        }
        if (!is_ready(worker, iteration, next)) {
          deferred.tasks[deferred.count++] = next;
          continue;
        }
      } else if (deferred.count != 0) {
        waited_for = MPK_TRACE_HELD;
        report_parked_task(rank, iteration.graph, deferred.tasks[0], iteration.epoch, worker.status);
        code = held.poll(worker.status->seen);
        if (code != MPK_OK) return code;
        continue;
      } else {
        if (rank->placement == MPK_MIXED) {
          bool worked = false;
          code = run_static_between(worker, &seen, &worked);
          if (code != MPK_OK) return code;
          if (worked) {
            idle.reset();
            looks_since_ns = trace_clock(rank);
            continue;
          }
        }
        waited_for = MPK_TRACE_QUEUE;
        report_state(worker.status, MPK_WORKER_IDLE);
        code = idle.poll(0);
        if (code != MPK_OK) return code;
        continue;
      }
    }
    idle.reset();
    held.reset();
    report(&worker.status->task, next);
    code = run_task(worker, iteration, next, looks_since_ns, waited_for);
    if (code != MPK_OK) return code;
    looks_since_ns = trace_clock(rank);
    waited_for = MPK_TRACE_NO_WAIT;
  }
}

}  // namespace cpu
}  // namespace mpk
