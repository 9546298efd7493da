/* The scheduler's steps (dynamic placement): a completed event becomes queued tasks. A scheduler is a team (platform.h). Its
 * leader runs the steps, and the whole team queues the tasks. In mixed placement, schedulers have nothing to do in iterations of
 * static graphs: none of their events is queued or pushed.
 *
 * Local schedulers own the events that only this rank triggers; the remote scheduler owns those that peers trigger. A
 * worker can block only on a full scheduler queue, and that queue has room for every event of a graph. So workers
 * always return to their queues, and a scheduler that finds them all full makes progress. */
#ifndef MPK_PROTOCOL_SCHEDULER_STEP_H
#define MPK_PROTOCOL_SCHEDULER_STEP_H

#include "batch_step.h"
#include "trigger.h"

namespace mpk {

struct Scheduler {
  const mpk_rank* rank;
  uint32_t index; /* among mpk_rank's schedulers; the remote one is the last if world > 1 */
  mpk_status* status;
  PreparedStep* step = nullptr; /* memory for the batch step, if it runs end_iteration */
  uint32_t next_worker = 0; /* next in the round robin; the same in the whole team */
  /* Only the leader uses these: */
  bool begins = false;      /* the first batch step of the launch is still to run */
  uint32_t begun = 0;       /* last iteration that it has noticed */
  uint32_t ending = 0;      /* iteration whose end event it has seen and whose last tasks it waits for; 0: none */
  uint32_t next_sender = 0; /* sender whose ring is next */
};

/* Tasks [first, last) of an iteration, which a step of the leader gives to the team to queue. */
struct Launch {
  uint32_t iteration = 0, first = 0, last = 0;
};

MPK_DEVICE mpk_queue* worker_queue(const mpk_rank* rank, uint32_t worker, uint32_t scheduler) {
  return &rank->worker_queues[static_cast<uint64_t>(worker) * rank->num_schedulers + scheduler];
}

/* Queues the tasks, each at the next worker that has room. All threads of the team call it with the same
 * arguments, after a barrier. All get the same result: MPK_OK or an abort code. */
template <typename Team>
MPK_DEVICE int launch_tasks(const Team& team, Scheduler* scheduler, const Launch& launch) {
  const mpk_rank* rank = scheduler->rank;
  const uint32_t workers = rank->num_workers, before = (1u << team.member()) - 1;
  uint32_t task = launch.first + team.member();
  uint32_t refused = 0; /* number of consecutive workers without room */
  Wait wait(rank, scheduler->status);
  for (;;) {
    const uint32_t waiting = team.vote(task < launch.last);
    if (waiting == 0) return MPK_OK;
    /* Each member pushes to a different worker, because a queue has one producer. */
    const uint32_t offered = platform::count_bits(waiting) < workers ? platform::count_bits(waiting) : workers, turn = platform::count_bits(waiting & before);
    bool pushed = false;
    if (task < launch.last && turn < offered) {
      uint32_t worker = scheduler->next_worker + turn;
      if (worker >= workers) worker -= workers;
      pushed = queue_try_push_single(worker_queue(rank, worker, scheduler->index), make_task_id(launch.iteration, task));
    }
    if (pushed) task += Team::kSize;
    scheduler->next_worker += offered;
    if (scheduler->next_worker >= workers) scheduler->next_worker -= workers;
    refused = team.vote(pushed) != 0 ? 0 : refused + offered;
    team.sync(); /* the members take turns as the only producer of a queue */
    if (refused < workers) continue;
    refused = 0;
    const int code = team.from_leader(team.member() == 0 ? wait.poll(launch.first) : static_cast<int>(MPK_OK));
    if (code != MPK_OK) return code;
  }
}

/* Runs the batch step if the iteration's end event is ready and all its tasks are done, or if it is the first of the
 * launch. Called in one place only, because the batch step is inlined and large. */
MPK_DEVICE int end_iteration(Scheduler* scheduler) {
  if (!scheduler->begins && (scheduler->ending == 0 || !claim_batch_step(scheduler->rank, scheduler->ending))) return MPK_OK;
  scheduler->begins = false;
  scheduler->ending = 0;
  return next_iteration(scheduler->rank, scheduler->step, scheduler->status);
}

/* Does what a ready event asks for. This scheduler's part of its tasks is `share` of `shares`. */
MPK_DEVICE int handle_event(Scheduler* scheduler, const Iteration& iteration, const mpk_event& event, uint32_t share, uint32_t shares, Launch* launch) {
  switch (event.event_type) {
    case MPK_EVENT_LAUNCH_TASKS:
    case MPK_EVENT_LAUNCH_MASSIVE_TASKS:
    case MPK_EVENT_LAUNCH_DEPENDENT_TASKS: {
      launch->iteration = iteration.number;
      launch->first = event.first_task;
      launch->last = event.last_task;
      if (shares > 1) {
        const uint64_t tasks = event.last_task - event.first_task;
        launch->first = event.first_task + static_cast<uint32_t>(tasks * share / shares);
        launch->last = event.first_task + static_cast<uint32_t>(tasks * (share + 1) / shares);
      }
      return MPK_OK;
    }
    case MPK_EVENT_END_OF_TASK_GRAPH:
      scheduler->ending = iteration.number; /* used by end_iteration */
      return MPK_OK;
    default:
      return MPK_OK;
  }
}

/* Remote scheduler: true once per epoch of an event, although several of the event's entries may find it ready. */
MPK_DEVICE bool mark_launched(const Iteration& iteration, uint32_t index) {
  uint32_t* launched = &iteration.graph->launched[index];
  if (iteration.epoch <= *launched) return false; /* epochs do not wrap */
  *launched = iteration.epoch;
  return true;
}

/* The current iteration, for a thread that still has to launch or run something in it. */
MPK_DEVICE Iteration current_iteration(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  return Iteration{&rank->graphs[batch->graph], batch->graph, batch->iteration, batch->epoch};
}

/* What a step of the leader found. */
struct Found {
  bool worked = false; /* there was something to do */
  bool stop = false;   /* the end of the run; only scheduler 0 looks for it in its steps */
  Launch launch;       /* for the team to queue before the next step */
  mpk_queue* handled = nullptr; /* the queue whose first entry it was; taken after the launch, because others wait for the launch */
};

/* One step of a local scheduler, after end_iteration. */
MPK_DEVICE int local_scheduler_step(Scheduler* scheduler, Found* found) {
  const mpk_rank* rank = scheduler->rank;
  if (scheduler->index == 0) {
    const Publication publication = read_publication(rank);
    if (publication.iteration != scheduler->begun) {
      scheduler->begun = publication.iteration;
      found->worked = true;
      if (publication.stop) {
        /* Event 0: every worker gets task 0. No other task is left to run. */
        found->stop = true;
        for (uint32_t worker = 0; worker < rank->num_workers; ++worker) {
          Wait wait(rank, scheduler->status);
          while (!queue_try_push_single(worker_queue(rank, worker, 0), make_task_id(publication.iteration, MPK_TASK_TERMINATE))) {
            const int code = wait.poll(worker);
            if (code != MPK_OK) return code;
          }
        }
        return MPK_OK;
      }
      const mpk_graph* graph = &rank->graphs[publication.graph];
      if (platform::kMixedPlacement && graph->placement == MPK_STATIC) { /* mixed: the workers run it by themselves */
        found->worked = false;
        return MPK_OK;
      }
      /* The batch step triggers event 1; the iteration cannot end before the event's tasks are launched. */
      const mpk_event& event = graph->events[MPK_EVENT_BEGIN];
      return needs_scheduler(event) ? handle_event(scheduler, current_iteration(rank), event, 0, 1, &found->launch) : static_cast<int>(MPK_OK);
    }
  }
  mpk_queue* const queue = &rank->scheduler_queues[scheduler->index];
  uint64_t id;
  if (!queue_peek(queue, &id)) return MPK_OK;
  found->worked = true;
  found->handled = queue;
  const Iteration iteration = current_iteration(rank);
  const uint32_t index = task_id_index(id);
  if (task_id_iteration(id) != iteration.number || index >= iteration.graph->num_events) return MPK_ABORT_QUEUE;
  const mpk_event event = iteration.graph->events[index];
  /* The acquire in the test makes the work of all triggers visible here, and through the queue to the tasks. */
  if (event_count(iteration.graph, index, event) < event_wanted(event, iteration.epoch)) return MPK_ABORT_QUEUE;
  const bool shared = is_shared_out(rank, event);
  return handle_event(scheduler, iteration, event, shared ? scheduler->index : 0, shared ? num_local_schedulers(rank) : 1, &found->launch);
}

/* One step of the remote scheduler, after end_iteration. It goes through the rings of all senders, up to the first event with tasks to
 * launch. `heads` [world] are its positions in them.
 *
 * An entry of a future iteration stays until the batch step reaches that iteration. The entries after it belong to that iteration or a
 * later one, because a task's push comes before its count in the sender's progress. An entry of a past iteration is dropped: that iteration
 * cannot have ended before the event was launched. An entry whose event is not ready yet is dropped, because a later trigger's entry
 * follows. So is an entry whose event has been launched in that epoch. */
MPK_DEVICE int remote_scheduler_step(Scheduler* scheduler, uint64_t* heads, Found* found) {
  const mpk_rank* rank = scheduler->rank;
  for (uint32_t rings = 0; rings < rank->world; ++rings) {
    const uint32_t sender = scheduler->next_sender;
    scheduler->next_sender = sender + 1 == rank->world ? 0 : sender + 1;
    const uint64_t tail = ring_tail(rank, sender); /* read once, so that other rings get their turn */
    while (heads[sender] != tail) {
      mpk_remote_entry entry;
      const int peeked = ring_peek(rank, sender, heads[sender], tail, &entry);
      if (peeked != MPK_OK) return peeked;
      if (entry.graph >= rank->num_graphs || entry.event >= rank->graphs[entry.graph].num_events) return MPK_ABORT_QUEUE;
      const uint32_t current = read_publication(rank).iteration;
      /* Iterations do not wrap. Before this rank's first iteration of a launch `current` is 0, however many earlier
       * launches ran. */
      if (entry.iteration > current) break;
      ++heads[sender];
      found->worked = true;
      if (entry.iteration != current) continue;
      const Iteration iteration = {&rank->graphs[entry.graph], entry.graph, entry.iteration, entry.epoch};
      const mpk_event event = iteration.graph->events[entry.event];
      if (event_count(iteration.graph, entry.event, event) < event_wanted(event, iteration.epoch) || !needs_scheduler(event)) continue;
      if (!mark_launched(iteration, entry.event)) continue;
      const int code = handle_event(scheduler, iteration, event, 0, 1, &found->launch);
      if (code != MPK_OK || found->launch.first != found->launch.last) return code;
    }
  }
  return MPK_OK;
}

}  // namespace mpk

#endif
