/* Static placement: a worker runs its list in order, and polls what each task depends on. */
#include "cpu/worker.h"

namespace mpk {
namespace cpu {

namespace {

/* Waits for an iteration other than `seen`. */
int wait_for_publication(const Worker& worker, uint32_t seen, Publication* publication) {
  *publication = read_publication(worker.rank);
  if (publication->iteration != seen) return MPK_OK;
  report_state(worker.status, MPK_WORKER_IDLE);
  Wait wait(worker.rank, worker.status, follower_deadline_ns(worker.rank));
  do {
    const int code = wait.poll(seen);
    if (code != MPK_OK) return code;
    *publication = read_publication(worker.rank);
  } while (publication->iteration == seen);
  return MPK_OK;
}

/* The list is done. Waits for the next iteration, or runs the batch step if the end event is ready and no other worker
 * has claimed it. */
int finish_iteration(const Worker& worker, const Iteration& iteration) {
  const mpk_rank* rank = worker.rank;
  const uint64_t wanted = event_wanted(iteration.graph, MPK_EVENT_END, iteration.epoch, 0);
  report_state(worker.status, MPK_WORKER_IDLE); /* the end depends on other threads' waits, and their reports say more */
  Wait wait(rank, worker.status, follower_deadline_ns(rank));
  for (;;) {
    if (read_publication(rank).iteration != iteration.number) return MPK_OK;
    const uint64_t seen = event_count(iteration.graph, MPK_EVENT_END);
    if (seen >= wanted && claim_batch_step(rank, iteration.number)) return next_iteration(rank, worker.status);
    const int code = wait.poll(seen);
    if (code == MPK_OK) continue;
    if (wait.timed_out()) report_wait(worker.status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, iteration.graph, MPK_EVENT_END), wanted, seen);
    return code;
  }
}

int run_list(const Worker& worker, const Iteration& iteration, const uint32_t* tasks, uint32_t count) {
  const mpk_rank* rank = worker.rank;
  const mpk_graph* graph = iteration.graph;
  report(&worker.status->graph, iteration.graph_index);
  report(&worker.status->iteration, iteration.number);
  for (uint32_t i = 0; i < count; ++i) {
    int code = abort_code(rank);
    if (code != MPK_OK) return code;
    const mpk_task* task = &graph->tasks[tasks[i]];
    const uint64_t fetched_ns = trace_clock(rank);
    uint32_t waited_for = MPK_TRACE_NO_WAIT;
    report(&worker.status->task, tasks[i]);
    const mpk_dependency* dependencies = graph->dependencies + task->first_dependency;
    for (uint32_t d = 0; d < task->num_dependencies; ++d) {
      if (is_traced(rank) && !event_test(graph, dependencies[d].event, iteration.epoch, dependencies[d].epochs_back)) waited_for = d;
      code = event_wait(rank, graph, dependencies[d].event, iteration.epoch, dependencies[d].epochs_back, worker.status);
      if (code != MPK_OK) return code;
    }
    code = run_task(worker, iteration, tasks[i], fetched_ns, waited_for);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

/* Runs the worker's list of a published iteration of a static graph, if it has a list there; sets `worked` in
 * that case. */
int run_iteration(const Worker& worker, const Publication& publication, bool* worked) {
  const mpk_rank* rank = worker.rank;
  const mpk_graph* graph = &rank->graphs[publication.graph];
  if (worker.index >= graph->num_workers) return MPK_OK;
  const uint32_t first = graph->worker_first[worker.index];
  const uint32_t last = graph->worker_first[worker.index + 1];
  if (first == last) return MPK_OK;
  *worked = true;
  /* There is work for this worker, so the batch stays constant until the work is done (publication.h). */
  const Iteration iteration = {graph, publication.graph, publication.iteration, rank->batch->epoch};
  const int code = run_list(worker, iteration, graph->worker_tasks + first, last - first);
  return code == MPK_OK ? finish_iteration(worker, iteration) : code;
}

}  // namespace

int run_static(const Worker& worker) {
  uint32_t seen = 0;
  for (;;) {
    Publication publication;
    int code = wait_for_publication(worker, seen, &publication);
    if (code != MPK_OK) return code;
    if (publication.stop) return MPK_OK;
    seen = publication.iteration;
    bool worked = false;
    code = run_iteration(worker, publication, &worked);
    if (code != MPK_OK) return code;
  }
}

int run_static_between(const Worker& worker, uint32_t* seen, bool* worked) {
  const Publication publication = read_publication(worker.rank);
  if (publication.iteration == *seen || publication.stop) return MPK_OK;
  *seen = publication.iteration;
  if (worker.rank->graphs[publication.graph].placement != MPK_STATIC) return MPK_OK;
  return run_iteration(worker, publication, worked);
}

}  // namespace cpu
}  // namespace mpk
