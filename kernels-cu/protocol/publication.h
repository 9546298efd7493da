/* How an iteration reaches the workers, and why nobody reads a batch that is being rewritten.
 *
 * The batch step writes mpk_batch and then stores one 64-bit word: iteration in the low half
 * (mpk_control.iteration), graph and stop bit in the high half (mpk_control.launch). A worker that sees a new
 * word looks up, with the graph of the word alone, whether it has work in that iteration:
 *  - It has. Every task of a rank happens before the rank's end event, the batch step runs only after that
 *    event, hence mpk_batch stays as it is until the worker's last task of the iteration has triggered. The
 *    worker copies the epoch before its first task and reads nothing of mpk_batch after its last one.
 *  - It has not (static placement: its list is empty). It reads nothing of mpk_batch and waits for the next word.
 *    It may miss words that lie between, but none with work for it: such an iteration can't end without it.
 * So each worker sees each iteration that has work for it exactly once and in order, without a barrier.
 * In dynamic placement who holds a task or an event that must still be launched stands in the first case; the
 * remote scheduler, which may hold entries that are no longer needed, reads the word and the entry only.
 *
 * Exactly one thread runs the batch step: whoever finds the end event ready exchanges BatchState.claimed. */
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

/* Acquire: pairs with publish; with the iteration come mpk_batch and the batch step's state. */
MPK_DEVICE Publication read_publication(const mpk_rank* rank) {
  const uint64_t word = platform::load<platform::Scope::kDevice>(
      reinterpret_cast<const uint64_t*>(&rank->control->iteration), platform::kAcquire);
  const uint32_t launch = static_cast<uint32_t>(word >> 32);
  return Publication{static_cast<uint32_t>(word), launch & ~MPK_LAUNCH_STOP, (launch & MPK_LAUNCH_STOP) != 0};
}

/* Makes the batch as it stands the current iteration; the trigger of its graph's task 1 (begin) comes with it. */
MPK_DEVICE void publish(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  uint32_t launch = batch->graph;
  if (batch->stop) {
    launch |= MPK_LAUNCH_STOP;
  } else {
    const mpk_graph* graph = &rank->graphs[batch->graph];
    trigger_local(graph, MPK_EVENT_BEGIN, graph->events[MPK_EVENT_BEGIN].num_triggers);
  }
  const uint64_t word = (static_cast<uint64_t>(launch) << 32) | batch->iteration;
  /* Release: pairs with read_publication. */
  platform::store<platform::Scope::kDevice>(reinterpret_cast<uint64_t*>(&rank->control->iteration), word,
                                            platform::kRelease);
}

}  // namespace mpk

#endif
