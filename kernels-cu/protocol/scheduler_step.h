/* The scheduler's steps (dynamic placement): a completed event becomes queued tasks.
 *
 * Local schedulers own the events that only this rank triggers, the remote scheduler those that peers trigger; so
 * mpk_graph.launched has one writer for each event. A worker blocks on nothing but a full scheduler queue, and
 * that has room for every event of a graph; so workers always come back to their queues, and a scheduler that
 * finds them all full gets on. */
#ifndef MPK_PROTOCOL_SCHEDULER_STEP_H
#define MPK_PROTOCOL_SCHEDULER_STEP_H

#include "batch_step.h"
#include "trigger.h"

namespace mpk {

struct Scheduler {
  const mpk_rank* rank;
  uint32_t index;       /* in mpk_rank's schedulers; the remote one is the last where world > 1 */
  uint32_t next_worker; /* whose turn it is */
  uint32_t begun;       /* last iteration of which it has taken notice */
  uint32_t ending;      /* iteration whose end event it has seen and whose last tasks it waits for; 0: none */
  mpk_status* status;
};

MPK_DEVICE mpk_queue* worker_queue(const mpk_rank* rank, uint32_t worker, uint32_t scheduler) {
  return &rank->worker_queues[static_cast<uint64_t>(worker) * rank->num_schedulers + scheduler];
}

/* Queues a task at the next worker that has room. Returns MPK_OK or an abort code. */
MPK_DEVICE int launch_task(Scheduler* scheduler, uint64_t task_id) {
  const mpk_rank* rank = scheduler->rank;
  Wait wait(rank, scheduler->status);
  for (;;) {
    for (uint32_t tried = 0; tried < rank->num_workers; ++tried) {
      const uint32_t worker = scheduler->next_worker;
      scheduler->next_worker = worker + 1 == rank->num_workers ? 0 : worker + 1;
      if (queue_try_push_single(worker_queue(rank, worker, scheduler->index), task_id)) return MPK_OK;
    }
    const int code = wait.poll(task_id);
    if (code != MPK_OK) return code;
  }
}

MPK_DEVICE int launch_range(Scheduler* scheduler, uint32_t iteration, uint32_t first, uint32_t last) {
  for (uint32_t task = first; task < last; ++task) {
    const int code = launch_task(scheduler, make_task_id(iteration, task));
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

/* Runs the batch step if the iteration has an end event that is ready, and all its tasks are done. */
MPK_DEVICE int end_iteration(Scheduler* scheduler) {
  if (scheduler->ending == 0 || !claim_batch_step(scheduler->rank, scheduler->ending)) return MPK_OK;
  scheduler->ending = 0;
  return next_iteration(scheduler->rank, scheduler->status);
}

/* Does what a ready event asks for. `share` of `shares`: the part of a massive launch that is this scheduler's. */
MPK_DEVICE int handle_event(Scheduler* scheduler, const Iteration& iteration, uint32_t index, uint32_t share, uint32_t shares) {
  const mpk_event* event = &iteration.graph->events[index];
  switch (event->event_type) {
    case MPK_EVENT_LAUNCH_TASKS:
    case MPK_EVENT_LAUNCH_DEPENDENT_TASKS:
      return launch_range(scheduler, iteration.number, event->first_task, event->last_task);
    case MPK_EVENT_LAUNCH_MASSIVE_TASKS: {
      const uint64_t tasks = event->last_task - event->first_task;
      return launch_range(scheduler, iteration.number, event->first_task + static_cast<uint32_t>(tasks * share / shares),
                          event->first_task + static_cast<uint32_t>(tasks * (share + 1) / shares));
    }
    case MPK_EVENT_END_OF_TASK_GRAPH:
      scheduler->ending = iteration.number;
      return end_iteration(scheduler);
    default:
      return MPK_OK;
  }
}

/* True once for each epoch of an event that this scheduler owns. */
MPK_DEVICE bool mark_launched(const Iteration& iteration, uint32_t index) {
  uint32_t* launched = &iteration.graph->launched[index];
  if (static_cast<int32_t>(iteration.epoch - *launched) <= 0) return false;
  *launched = iteration.epoch;
  return true;
}

/* The current iteration, for a thread that still has something to launch or to run in it. */
MPK_DEVICE Iteration current_iteration(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  return Iteration{&rank->graphs[batch->graph], batch->graph, batch->iteration, batch->epoch};
}

/* One step of a local scheduler. Sets `*worked` if it did something, `*stop` at the end of the run. */
MPK_DEVICE int local_scheduler_step(Scheduler* scheduler, bool* worked, bool* stop) {
  const mpk_rank* rank = scheduler->rank;
  *worked = false;
  *stop = false;
  const int ended = end_iteration(scheduler);
  if (ended != MPK_OK) return ended;
  if (scheduler->index == 0) {
    const Publication publication = read_publication(rank);
    if (publication.iteration != scheduler->begun) {
      scheduler->begun = publication.iteration;
      *worked = true;
      if (publication.stop) {
        /* Event 0: every worker gets task 0. Nothing else is left in the queues. */
        *stop = true;
        for (uint32_t worker = 0; worker < rank->num_workers; ++worker) {
          Wait wait(rank, scheduler->status);
          while (!queue_try_push_single(worker_queue(rank, worker, 0), make_task_id(publication.iteration, MPK_TASK_TERMINATE))) {
            const int code = wait.poll(worker);
            if (code != MPK_OK) return code;
          }
        }
        return MPK_OK;
      }
      /* Event 1 is triggered by the batch step; the iteration can't end before its tasks are launched. */
      if (!needs_scheduler(&rank->graphs[publication.graph].events[MPK_EVENT_BEGIN])) return MPK_OK;
      const Iteration iteration = current_iteration(rank);
      if (mark_launched(iteration, MPK_EVENT_BEGIN)) return handle_event(scheduler, iteration, MPK_EVENT_BEGIN, 0, 1);
      return MPK_OK;
    }
  }
  uint64_t id;
  if (!queue_pop(&rank->scheduler_queues[scheduler->index], &id)) {
    if (scheduler->index != 0) *stop = read_publication(rank).stop;
    return MPK_OK;
  }
  *worked = true;
  const Iteration iteration = current_iteration(rank);
  const uint32_t index = task_id_index(id);
  /* The acquire in the test makes the work of all triggers visible here, and through the queue to the tasks. */
  if (task_id_iteration(id) != iteration.number || index >= iteration.graph->num_events ||
      !event_test(iteration.graph, index, iteration.epoch)) {
    return MPK_ABORT_QUEUE;
  }
  if (iteration.graph->events[index].event_type == MPK_EVENT_LAUNCH_MASSIVE_TASKS) {
    return handle_event(scheduler, iteration, index, scheduler->index, num_local_schedulers(rank));
  }
  return mark_launched(iteration, index) ? handle_event(scheduler, iteration, index, 0, 1) : static_cast<int>(MPK_OK);
}

/* One round of the remote scheduler over the rings of all senders; `heads` [world] are its own positions.
 *
 * An entry of a future iteration stays until the batch step reaches it; what lies behind it is of that iteration
 * or a later one, since a task's push comes before its count in the sender's progress. An entry of a past
 * iteration is dropped: that can't have ended before the event was launched. So is one whose event is not ready
 * yet, since a later trigger's entry follows, and one whose event has been launched in that epoch. */
MPK_DEVICE int remote_scheduler_round(Scheduler* scheduler, uint64_t* heads, bool* worked, bool* stop) {
  const mpk_rank* rank = scheduler->rank;
  *worked = false;
  const int ended = end_iteration(scheduler);
  if (ended != MPK_OK) return ended;
  *stop = read_publication(rank).stop;
  if (*stop) return MPK_OK;
  for (uint32_t sender = 0; sender < rank->world; ++sender) {
    const uint64_t tail = ring_tail(rank, sender); /* once: other rings get their turn */
    while (heads[sender] != tail) {
      mpk_remote_entry entry;
      const int peeked = ring_peek(rank, sender, heads[sender], tail, &entry);
      if (peeked != MPK_OK) return peeked;
      if (entry.graph >= rank->num_graphs || entry.event >= rank->graphs[entry.graph].num_events) return MPK_ABORT_QUEUE;
      const uint32_t current = read_publication(rank).iteration;
      if (static_cast<int32_t>(entry.iteration - current) > 0) break;
      ++heads[sender];
      *worked = true;
      if (entry.iteration != current) continue;
      const Iteration iteration = {&rank->graphs[entry.graph], entry.graph, entry.iteration, entry.epoch};
      if (!event_test(iteration.graph, entry.event, entry.epoch) || !needs_scheduler(&iteration.graph->events[entry.event])) continue;
      if (!mark_launched(iteration, entry.event)) continue;
      const int code = handle_event(scheduler, iteration, entry.event, 0, 1);
      if (code != MPK_OK) return code;
    }
  }
  return MPK_OK;
}

/* Whether all that the task depends on has happened in `epoch`. */
MPK_DEVICE bool dependencies_met(const mpk_graph* graph, const mpk_task* task, uint32_t epoch) {
  const mpk_dependency* dependencies = graph->dependencies + task->first_dependency;
  for (uint32_t d = 0; d < task->num_dependencies; ++d) {
    if (!event_test(graph, dependencies[d].event, epoch, dependencies[d].epochs_back)) return false;
  }
  return true;
}

/* An event that must happen before `held_up` can, because a task that triggers `held_up` waits for it; `held_up`
 * itself where none of its tasks waits. */
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

/* For the report of a scheduler that has waited in vain: from the first event of this rank's own tasks that is not
 * ready back to the one that nothing here holds up, a peers' event or one whose task runs. The task named is the
 * last on the way that can't be launched. */
MPK_DEVICE void report_missing_event(const Scheduler& scheduler) {
  const mpk_rank* rank = scheduler.rank;
  const Publication publication = read_publication(rank);
  if (publication.iteration == 0 || publication.stop || publication.graph >= rank->num_graphs) return;
  const mpk_graph* graph = &rank->graphs[publication.graph];
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
  report(&scheduler.status->task, waiting);
  report(&scheduler.status->graph, publication.graph);
  report(&scheduler.status->iteration, publication.iteration);
  report_wait(scheduler.status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, missing),
              event_wanted(graph, missing, epoch, 0), event_count(graph, missing));
}

}  // namespace mpk

#endif
