/* For the report of a stuck run (dynamic placement): finds the missing event if a loop does not wait for one particular
 * event. */
#ifndef MPK_PROTOCOL_MISSING_H
#define MPK_PROTOCOL_MISSING_H

#include "publication.h"

namespace mpk {

/* Whether everything that the task depends on has happened in `epoch`. */
MPK_DEVICE bool dependencies_met(const mpk_graph* graph, const mpk_task* task, uint32_t epoch) {
  const mpk_dependency* dependencies = graph->dependencies + task->first_dependency;
  for (uint32_t d = 0; d < task->num_dependencies; ++d) {
    if (!event_test(graph, dependencies[d].event, epoch, dependencies[d].epochs_back)) return false;
  }
  return true;
}

/* Reports what `task_index` waits for: the first task of a worker that has only held tasks. Flagged words have no counter, so
 * the report shows the tag of the previous epoch as the value seen. */
MPK_DEVICE void report_parked_task(const mpk_rank* rank, const mpk_graph* graph, uint32_t task_index, uint32_t epoch, mpk_status* status) {
  const mpk_task* task = &graph->tasks[task_index];
  report(&status->task, task_index);
  const mpk_dependency* dependencies = graph->dependencies + task->first_dependency;
  for (uint32_t d = 0; d < task->num_dependencies; ++d) {
    const uint32_t event = dependencies[d].event;
    const uint64_t wanted = event_wanted(graph, event, epoch, dependencies[d].epochs_back);
    const uint64_t seen = event_count(graph, event);
    if (seen < wanted) return report_wait(status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, event), wanted, seen);
  }
  const uint32_t tag = MPK_FLAG_TAG(*task, epoch);
  report_wait(status, MPK_WORKER_WAITS_FLAG, MPK_EVENT_INVALID, tag, tag - task->flag_count);
}

/* An event that must happen before `held_up` can, because a task that triggers `held_up` waits for it;
 * `held_up` itself if none of these tasks waits. */
MPK_DEVICE uint32_t event_before(const mpk_graph* graph, uint32_t held_up, uint32_t epoch) {
  for (uint32_t index = 2; index < graph->num_tasks; ++index) {
    const mpk_task* task = &graph->tasks[index];
    const uint64_t trigger = task->trigger_event;
    if (trigger == MPK_EVENT_INVALID || event_id_tag(trigger) != MPK_EVENT_TAG_LOCAL) continue;
    if (event_id_index(trigger) != held_up) continue;
    for (uint32_t d = 0; d < task->num_dependencies; ++d) {
      const mpk_dependency* dependency = &graph->dependencies[task->first_dependency + d];
      if (!event_test(graph, dependency->event, epoch, dependency->epochs_back)) return dependency->event;
    }
  }
  return held_up;
}

/* For the report of a scheduler whose wait timed out. Starts at the first event of this rank's own tasks that
 * is not ready, and goes back to an event that nothing on this rank holds up: a peer's event, or one whose task runs.
 * The task named is the last one on the way that cannot be launched. */
MPK_DEVICE void report_missing_event(const mpk_rank* rank, mpk_status* status) {
  const Publication publication = read_publication(rank);
  if (publication.iteration == 0 || publication.stop || publication.graph >= rank->num_graphs) return;
  const mpk_graph* graph = &rank->graphs[publication.graph];
  if (platform::kMixedPlacement && graph->placement == MPK_STATIC) return; /* mixed: the workers report what they wait for */
  const uint32_t epoch = static_cast<uint32_t>(event_count(graph, MPK_EVENT_BEGIN) / graph->events[MPK_EVENT_BEGIN].num_triggers);
  uint32_t missing = MPK_EVENT_END;
  for (uint32_t index = MPK_EVENT_END + 1; index < graph->num_events && missing == MPK_EVENT_END; ++index) {
    if (!graph->events[index].remote_triggers && !event_test(graph, index, epoch)) missing = index;
  }
  uint32_t waiting = graph->events[missing].first_task;
  for (uint32_t step = 0; step < graph->num_events; ++step) {
    const uint32_t before = event_before(graph, missing, epoch);
    if (before == missing) break;
    missing = before;
    if (graph->events[missing].remote_triggers) break;
    waiting = graph->events[missing].first_task;
  }
  report(&status->task, waiting);
  report(&status->graph, publication.graph);
  report(&status->iteration, publication.iteration);
  report_wait(status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, missing),
              event_wanted(graph, missing, epoch, 0), event_count(graph, missing));
}

}  // namespace mpk

#endif
