/* What a finished task causes: an addition to its trigger event's counter and, in dynamic placement, the
 * launch of the tasks that the event releases. */
#ifndef MPK_PROTOCOL_TRIGGER_H
#define MPK_PROTOCOL_TRIGGER_H

#include "event.h"
#include "queue.h"
#include "ring.h"

namespace mpk {

/* The iteration in which a task runs. This is a copy, which stays valid when mpk_batch is not (publication.h). */
struct Iteration {
  const mpk_graph* graph;
  uint32_t graph_index;
  uint32_t number;
  uint32_t epoch;
};

MPK_DEVICE uint32_t num_local_schedulers(const mpk_rank* rank) {
  return rank->world > 1 ? rank->num_schedulers - 1 : rank->num_schedulers;
}

/* Whether completing the event gives a scheduler something to do. */
MPK_DEVICE bool needs_scheduler(const mpk_event& event) {
  switch (event.event_type) {
    case MPK_EVENT_LAUNCH_TASKS:
    case MPK_EVENT_LAUNCH_MASSIVE_TASKS:
    case MPK_EVENT_LAUNCH_DEPENDENT_TASKS:
      return event.first_task < event.last_task;
    case MPK_EVENT_END_OF_TASK_GRAPH:
      return true;
    default:
      return false;
  }
}

/* Whether the local schedulers split the tasks that the event launches. They do not if one of them would be done before
 * all others could be notified: a push to a scheduler takes as long as one and a half rounds of its team. In any case
 * each must get at least one task: a scheduler without one would read the batch of an iteration that may have ended. */
MPK_DEVICE bool is_shared_out(const mpk_rank* rank, const mpk_event& event) {
  return event.event_type == MPK_EVENT_LAUNCH_MASSIVE_TASKS &&
         2 * (event.last_task - event.first_task) >= 3 * platform::Team::kSize * num_local_schedulers(rank);
}

/* Whether `event_id` names an event of this rank. */
MPK_DEVICE bool is_own_event(const mpk_rank* rank, uint64_t event_id) {
  return event_id != MPK_EVENT_INVALID && (event_id_tag(event_id) != MPK_EVENT_TAG_NVSHMEM || event_id_owner(event_id) == rank->rank);
}

/* Triggers `event_id` after everything that this thread has written and put. Returns MPK_OK or an abort code.
 *
 * An event that other ranks trigger belongs to the remote scheduler, whichever rank triggers it: this rank's own
 * triggers go through its ring to itself. The event's counter takes only one kind of addition (mpk_rank.signals), also
 * from this rank. The push to the ring takes the same path as the addition before it, so it cannot overtake it. All
 * other events are completed by exactly one trigger, which queues the event; the iteration cannot end before that entry
 * is handled.
 *
 * `event`: the description of an event of this rank. For events of other ranks it is not read. */
MPK_DEVICE int trigger_event(const mpk_rank* rank, const Iteration& iteration, uint64_t event_id, const mpk_event& event, mpk_status* status) {
  if (event_id == MPK_EVENT_INVALID) return MPK_OK;
  const mpk_graph* graph = iteration.graph;
  const uint32_t index = event_id_index(event_id);
  const bool dynamic = graph->placement == MPK_DYNAMIC;
  const mpk_remote_entry entry = {index, iteration.number, iteration.graph_index, iteration.epoch};
  if (!is_own_event(rank, event_id)) {
    const uint32_t owner = event_id_owner(event_id);
    if (!trigger_remote(rank, graph, owner, index)) return MPK_ABORT_PEER;
    /* The push comes after the signal: the scheduler that takes the entry sees this trigger in the counter.
     * So among all entries for an epoch, the entry of the last trigger finds the event ready. */
    return dynamic ? ring_push(rank, owner, entry, status) : static_cast<int>(MPK_OK);
  }
  if (event.remote_triggers && rank->world > 1) {
    if (!trigger_remote(rank, graph, rank->rank, index)) return MPK_ABORT_PEER;
    return dynamic ? ring_push(rank, rank->rank, entry, status) : static_cast<int>(MPK_OK);
  }
  const uint64_t count = trigger_local(graph, index, event);
  if (!dynamic) return MPK_OK;
  if (count < event_wanted(event, iteration.epoch) || !needs_scheduler(event)) return MPK_OK;
  const uint64_t id = make_task_id(iteration.number, index);
  const uint32_t locals = num_local_schedulers(rank);
  if (!is_shared_out(rank, event)) return queue_push(rank, &rank->scheduler_queues[index % locals], id, status);
  for (uint32_t scheduler = 0; scheduler < locals; ++scheduler) {
    const int code = queue_push(rank, &rank->scheduler_queues[scheduler], id, status);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

}  // namespace mpk

#endif
