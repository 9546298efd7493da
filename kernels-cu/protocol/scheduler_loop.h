/* The schedulers' loop: steps, with a bounded wait between them. It runs until the run has stopped (MPK_OK), or returns the
 * abort code. */
#ifndef MPK_PROTOCOL_SCHEDULER_LOOP_H
#define MPK_PROTOCOL_SCHEDULER_LOOP_H

#include "missing.h"
#include "scheduler_step.h"

namespace mpk {

/* All threads of the team call this, and all get the same result. The leader runs `step(found)`. While it finds nothing to do,
 * it calls `at_poll()` now and then. While there is work it does not check for an abort: after an abort the workers leave, so
 * the work runs out. */
template <typename Team, typename Step, typename AtPoll>
MPK_DEVICE int scheduler_loop(const Team& team, Scheduler* scheduler, const Step& step, const AtPoll& at_poll) {
  const mpk_rank* rank = scheduler->rank;
  /* Mixed: in a static iteration a worker knows the cause, in a dynamic one this loop does. So its deadline
   * lies between that of such a worker and that of a follower. */
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
        if (!found.stop) code = wait.poll(publication.iteration); /* this value changes when the run moves on */
        if (code != MPK_OK) report_missing_event(rank, scheduler->status);
      }
    }
    /* What the leader acquired comes before what the others release. */
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
