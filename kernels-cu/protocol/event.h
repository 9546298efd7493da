/* Events: monotonic counters in symmetric memory. In epoch e of its graph, an event is ready when its
 * counter is at least num_triggers x e. The counter may be larger, because a peer may be an epoch
 * ahead. */
#ifndef MPK_PROTOCOL_EVENT_H
#define MPK_PROTOCOL_EVENT_H

#include "identifiers.h"
#include "wait.h"

namespace mpk {

MPK_DEVICE uint64_t* event_counter(const mpk_graph* graph, uint32_t index) {
  return graph->counters + static_cast<uint64_t>(index) * MPK_COUNTER_STRIDE;
}

/* The caller passes the event's description, so that it is read once: on a GPU, another read after an acquire would
 * miss the L1 cache. */
MPK_DEVICE uint64_t event_wanted(const mpk_event& event, uint32_t epoch, uint32_t epochs_back = 0) {
  /* There is nothing to wait for before the first epoch. */
  if (epoch <= epochs_back) return 0;
  return static_cast<uint64_t>(event.num_triggers) * (epoch - epochs_back);
}
MPK_DEVICE uint64_t event_wanted(const mpk_graph* graph, uint32_t index, uint32_t epoch, uint32_t epochs_back) {
  return event_wanted(graph->events[index], epoch, epochs_back);
}

/* Acquire: pairs with the release of every trigger (trigger_local, signal_add). The additions form one
 * release sequence, so a reader of the last one sees the data of all. System scope if a peer may have
 * triggered. */
MPK_DEVICE uint64_t event_count(const uint64_t* counter, const mpk_event& event) {
  if (!event.remote_triggers) return platform::load<platform::Scope::kDevice>(counter, platform::kAcquire);
  return platform::load<platform::Scope::kSystem>(counter, platform::kAcquire);
}
MPK_DEVICE uint64_t event_count(const mpk_graph* graph, uint32_t index, const mpk_event& event) { return event_count(event_counter(graph, index), event); }
MPK_DEVICE uint64_t event_count(const mpk_graph* graph, uint32_t index) { return event_count(graph, index, graph->events[index]); }

MPK_DEVICE bool event_test(const mpk_graph* graph, uint32_t index, uint32_t epoch, uint32_t epochs_back = 0) {
  const mpk_event event = graph->events[index];
  return event_count(graph, index, event) >= event_wanted(event, epoch, epochs_back);
}

/* Triggers one of this rank's events that no peer triggers (with one rank: any event). Returns the counter's new
 * value. Release: pairs with event_count, at the same scope. */
MPK_DEVICE uint64_t trigger_local(const mpk_graph* graph, uint32_t index, const mpk_event& event, uint64_t times = 1) {
  if (!event.remote_triggers) return platform::fetch_add<platform::Scope::kDevice>(event_counter(graph, index), times, platform::kRelease) + times;
  return platform::fetch_add<platform::Scope::kSystem>(event_counter(graph, index), times, platform::kRelease) + times;
}

/* Triggers an event of rank `owner`, which may be this rank, after everything that this thread has put there. This is the
 * only way to trigger an event with remote triggers. False: the rank is out of reach. */
MPK_DEVICE bool trigger_remote(const mpk_rank* rank, const mpk_graph* graph, uint32_t owner, uint32_t index) {
  return platform::signal_add(rank, owner, event_counter(graph, index), 1);
}

/* Waits until the event is ready in `epoch` - `epochs_back`. Returns MPK_OK or an abort code. The status names the
 * event only while the wait lasts. */
MPK_DEVICE int event_wait(const mpk_rank* rank, const mpk_graph* graph, uint32_t index, uint32_t epoch,
                          uint32_t epochs_back, mpk_status* status) {
  const uint64_t wanted = event_wanted(graph, index, epoch, epochs_back);
  uint64_t seen = event_count(graph, index);
  if (seen >= wanted) return MPK_OK;
  report_wait(status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, index), wanted, seen);
  Wait wait(rank, status);
  for (;;) {
    const int code = wait.poll(seen);
    if (code != MPK_OK) return code;
    seen = event_count(graph, index);
    if (seen >= wanted) break;
  }
  report_state(status, MPK_WORKER_RUNS);
  return MPK_OK;
}

}  // namespace mpk

#endif
