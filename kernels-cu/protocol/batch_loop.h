/* The loop of a team of threads that runs nothing but batch steps, and so prepares each of them while the tasks run (steady_step.h). On
 * a GPU in static placement, this is a warp. No other thread claims the end of an iteration. */
#ifndef MPK_PROTOCOL_BATCH_LOOP_H
#define MPK_PROTOCOL_BATCH_LOOP_H

#include "batch_step.h"

namespace mpk {

/* Reports that the end of an iteration did not come. Called if no other loop could say why. The status is the one after the
 * workers'. */
MPK_DEVICE_COLD void report_end(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  const mpk_graph* graph = &rank->graphs[batch->graph];
  mpk_status* const status = &rank->status[rank->num_workers];
  report(&status->timed_out, 1u);
  report(&status->graph, batch->graph);
  report(&status->iteration, batch->iteration);
  report_wait(status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, MPK_EVENT_END), event_wanted(graph, MPK_EVENT_END, batch->epoch, 0),
              event_count(graph, MPK_EVENT_END));
}

/* By the leader: waits until the published iteration and all its tasks are done. Meanwhile it takes rank 0's decision, if that had not
 * arrived when the step was prepared. It knows what it has published and how many tasks must be done before the next step, so it polls one
 * word. Few polls come with anything else, because each other load would delay the next poll. */
template <typename AtPoll>
MPK_DEVICE int await_end(const mpk_rank* rank, PreparedStep* prepared, const AtPoll& at_poll) {
  constexpr uint32_t kSome = platform::kStepsBetweenPolls, kMany = kSome * kSome;
  const mpk_batch* batch = rank->batch;
  const mpk_graph* graph = &rank->graphs[batch->graph];
  const mpk_event end = graph->events[MPK_EVENT_END];
  const uint64_t* const end_counter = event_counter(graph, MPK_EVENT_END);
  const uint64_t wanted = event_wanted(end, batch->epoch), expected = batch_state(rank)->expected;
  bool looks = rank->batch_config->generate && !prepared->decided;
  Wait wait(rank, nullptr, follower_deadline_ns(rank));
  for (uint32_t polls = 1;; ++polls) {
    /* As in claim_batch_step. A task counts when it triggers its event (finish_task), so if no peer triggers the end event, the counts
     * say all. */
    const uint64_t done = platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kAcquire);
    if (done >= expected && (!end.remote_triggers || event_count(end_counter, end) >= wanted)) return MPK_OK;
    if (looks && polls % kSome == 0) looks = !(prepared->decided = find_decision(rank, &prepared->decision));
    if (polls % kMany != 0) continue;
    at_poll();
    const int code = wait.poll(done);
    if (code == MPK_OK) continue;
    if (wait.timed_out()) report_end(rank); /* if the run ended for another reason, another wait's report says more */
    return code;
  }
}

/* Runs the first batch step of a launch, and one after each iteration. Returns MPK_OK after the last one, or the abort code. The team
 * shares `prepared`. The leader calls `published()` after each publication, and `at_poll()` now and then while it waits.
 * `before_change`: see batch_step. */
template <typename Team, typename Published, typename AtPoll, typename BeforeChange>
MPK_DEVICE int batch_loop(const Team& team, const mpk_rank* rank, PreparedStep* prepared, const Published& published, const AtPoll& at_poll, const BeforeChange& before_change) {
  NextToken first = prepare_step(team, rank, prepared);
  for (;;) {
    int code = next_iteration(team, rank, prepared, first, nullptr, published, before_change);
    const bool leads = team.member() == 0;
    const bool ends = team.from_leader(static_cast<int>(leads && (code != MPK_OK || (prepared->next.graph & MPK_LAUNCH_STOP) != 0))) != 0;
    if (ends) return code;
    first = prepare_step(team, rank, prepared);
    if (leads) code = await_end(rank, prepared, at_poll);
    code = team.from_leader(code);
    if (code != MPK_OK) return code;
  }
}

}  // namespace mpk

#endif
