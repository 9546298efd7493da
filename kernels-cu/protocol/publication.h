/* How an iteration reaches the workers, and why no thread reads a batch while it is rewritten.
 *
 * Start. The batch step writes mpk_batch and then stores one 64-bit word: the iteration in the low half (mpk_control.iteration), the
 * graph and stop bit in the high half (mpk_control.launch).
 *
 * End. Each task of a graph runs once per iteration. Its worker counts it in mpk_control.progress as its last act for
 * the task: after its kernel, after its trigger, after its push to a peer's ring. (On a GPU, the trigger of a list's last task may become
 * visible after the count: finish_task.) The batch step of the next iteration runs when
 * the end event is ready *and* progress has reached the number of tasks of all iterations so far (BatchState.expected).
 * So at that time no task of the rank is running, queued or still to be launched, for any graph. Everything that the
 * tasks did is visible (release of each count, acquire of the sum).
 *
 * Placement. This holds for static and dynamic graphs alike, so a rank may have both (MPK_MIXED), one after the other. At the batch
 * step between them, all tasks of the first are done, its queues and lists are finished, and entries pushed to a ring carry their
 * iteration.
 *
 * Between start and end mpk_batch is constant. A thread may read it exactly while it still has to run or launch a task
 * of the iteration. With static placement, that is a worker with a non-empty list, until it has counted the last task
 * of the list. With dynamic placement, it is a worker with a task, or a scheduler with an event to launch, until those
 * tasks are counted. Any other thread reads only the published word: a worker whose list is empty in the word's graph
 * waits for the next word. It may miss words in between, but no word with work for it, because such an iteration cannot
 * end without it. So each worker runs each iteration that has work for it once and in order, without a barrier among
 * workers.
 *
 * Exactly one thread runs a batch step: a thread that finds the iteration ended exchanges BatchState.open, the number of the iteration
 * whose end may be claimed. That word is set after the batch step has published the iteration and has given the host the results of
 * the one before. Handing out the results takes longer than some iterations, and it reads memory that the next batch
 * step writes. */
#ifndef MPK_PROTOCOL_PUBLICATION_H
#define MPK_PROTOCOL_PUBLICATION_H

#include "event.h"

namespace mpk {

static_assert(offsetof(mpk_control, iteration) % 8 == 0 &&
                  offsetof(mpk_control, launch) == offsetof(mpk_control, iteration) + 4,
              "iteration and launch are stored as one 64-bit word");

struct Publication {
  uint32_t iteration; /* 0: none yet */
  uint32_t graph;
  bool stop;
};

/* Acquire: pairs with publish; mpk_batch and the batch step's state become visible with the iteration. */
MPK_DEVICE Publication read_publication(const mpk_rank* rank) {
  const uint64_t word = platform::load<platform::Scope::kDevice>(
      reinterpret_cast<const uint64_t*>(&rank->control->iteration), platform::kAcquire);
  const uint32_t launch = static_cast<uint32_t>(word >> 32);
  return Publication{static_cast<uint32_t>(word), launch & ~MPK_LAUNCH_STOP, (launch & MPK_LAUNCH_STOP) != 0};
}

/* Number of tasks that an iteration of this graph adds to mpk_control.progress: the tasks of the lists, or
 * all that events launch (every task but terminate and begin). */
MPK_DEVICE uint64_t counted_tasks(const mpk_graph* graph) {
  if (graph->placement == MPK_STATIC) return graph->worker_first[graph->num_workers];
  return graph->num_tasks > 2 ? graph->num_tasks - 2 : 0;
}

/* What `publish` needs to know of the iteration that mpk_batch describes. */
struct NextIteration {
  uint32_t iteration;
  uint32_t graph;      /* with MPK_LAUNCH_STOP: there is no further iteration */
  uint64_t* begin;     /* counter of the graph's begin event; NULL: none is triggered */
  uint64_t triggers;   /* how many triggers it needs */
};
MPK_DEVICE NextIteration next_iteration_of(const mpk_graph* graph, uint32_t graph_index, uint32_t iteration) {
  return NextIteration{iteration, graph_index, event_counter(graph, MPK_EVENT_BEGIN), graph->events[MPK_EVENT_BEGIN].num_triggers};
}
MPK_DEVICE NextIteration next_iteration_of(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  if (batch->stop) return NextIteration{batch->iteration, batch->graph | MPK_LAUNCH_STOP, nullptr, 0};
  return next_iteration_of(&rank->graphs[batch->graph], batch->graph, batch->iteration);
}

/* Makes the batch in mpk_batch the current iteration, and triggers the event of its graph's task 1 (begin). */
MPK_DEVICE void publish(const mpk_rank* rank, const NextIteration& next) {
  /* Relaxed: no peer triggers this event (batch_begin), and every thread that waits for it has acquired the publication, which comes
   * later: by itself, or through the queue from which it has the task. */
  if (next.begin != nullptr) platform::fetch_add<platform::Scope::kDevice>(next.begin, next.triggers, platform::kRelaxed);
  const uint64_t word = (static_cast<uint64_t>(next.graph) << 32) | next.iteration;
  /* Release: pairs with read_publication. */
  platform::store<platform::Scope::kDevice>(reinterpret_cast<uint64_t*>(&rank->control->iteration), word,
                                            platform::kRelease);
}
MPK_DEVICE void publish(const mpk_rank* rank) { publish(rank, next_iteration_of(rank)); }

}  // namespace mpk

#endif
