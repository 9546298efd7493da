/* The schedulers' loops: steps, and a bounded wait between them. Each runs on one thread until the run has stopped (MPK_OK)
 * or with the abort code. */
#ifndef MPK_PROTOCOL_SCHEDULER_LOOP_H
#define MPK_PROTOCOL_SCHEDULER_LOOP_H

#include "scheduler_step.h"

namespace mpk {

/* After a step: goes on at once where it did something. `seen`: what changes when the run moves on. */
MPK_DEVICE int rest(const Scheduler& scheduler, Wait* wait, bool worked, uint64_t seen) {
  if (worked) {
    wait->reset();
    return abort_code(scheduler.rank);
  }
  const int code = wait->poll(seen);
  if (code != MPK_OK) report_missing_event(scheduler);
  return code;
}

/* `between(round)` is called after each step, from round 1. */
template <typename Between>
MPK_DEVICE int local_scheduler_loop(Scheduler* scheduler, const Between& between) {
  Wait wait(scheduler->rank, scheduler->status);
  for (uint32_t round = 1;; ++round) {
    bool worked, stop;
    int code = local_scheduler_step(scheduler, &worked, &stop);
    if (code != MPK_OK || stop) return code;
    between(round);
    code = rest(*scheduler, &wait, worked, scheduler->begun);
    if (code != MPK_OK) return code;
  }
}

/* `heads`: [world] words, 0. */
MPK_DEVICE int remote_scheduler_loop(Scheduler* scheduler, uint64_t* heads) {
  Wait wait(scheduler->rank, scheduler->status);
  for (;;) {
    bool worked, stop;
    int code = remote_scheduler_round(scheduler, heads, &worked, &stop);
    if (code != MPK_OK || stop) return code;
    code = rest(*scheduler, &wait, worked, read_publication(scheduler->rank).iteration);
    if (code != MPK_OK) return code;
  }
}

}  // namespace mpk

#endif
