/* The schedulers' loop: steps, and a bounded wait between them. Each runs until the run has stopped (MPK_OK) or with the abort
 * code. */
#ifndef MPK_PROTOCOL_SCHEDULER_LOOP_H
#define MPK_PROTOCOL_SCHEDULER_LOOP_H

#include "missing.h"
#include "scheduler_step.h"

namespace mpk {

/* By all of the team; all get the same. `step(found)` is the leader's, `at_poll()` it calls now and then while it finds nothing
 * to do. Where it always finds something nothing else is looked at: after an abort the workers leave, and then there is nothing. */
template <typename Team, typename Step, typename AtPoll>
MPK_DEVICE int scheduler_loop(const Team& team, Scheduler* scheduler, const Step& step, const AtPoll& at_poll) {
  const mpk_rank* rank = scheduler->rank;
  /* Mixed: in a static iteration a worker knows the cause, in a dynamic one this loop does. */
  const bool mixed = platform::kMixedPlacement && rank->placement == MPK_MIXED;
  Wait wait(rank, scheduler->status, mixed ? rank->deadline_ns + rank->deadline_ns / 8 : rank->deadline_ns);
  for (uint32_t idle = 0;;) {
    Found found;
    int code = MPK_OK;
    if (team.member() == 0) {
      code = end_iteration(scheduler);
      if (code == MPK_OK) code = step(&found);
      if (found.worked) {
        idle = 0;
        wait.reset();
      } else if (code == MPK_OK && ++idle % platform::kStepsBetweenPolls == 0) {
        at_poll();
        const Publication publication = read_publication(rank);
        if (scheduler->index != 0) found.stop = publication.stop;
        if (!found.stop) code = wait.poll(publication.iteration); /* which changes when the run moves on */
        if (code != MPK_OK) report_missing_event(rank, scheduler->status);
      }
    }
    /* What the leader acquired is before what the others release. */
    team.sync();
    code = team.from_leader(code);
    if (code != MPK_OK || team.from_leader(static_cast<int>(found.stop)) != 0) return code;
    const Launch launch = {team.from_leader(found.launch.iteration), team.from_leader(found.launch.first), team.from_leader(found.launch.last)};
    code = launch_tasks(team, scheduler, launch);
    if (code != MPK_OK) return code;
    if (found.handled != nullptr) queue_take(found.handled);
  }
}

}  // namespace mpk

#endif
