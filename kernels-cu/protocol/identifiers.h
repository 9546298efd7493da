/* TaskId and EventId; the ABI header gives their bits. */
#ifndef MPK_PROTOCOL_IDENTIFIERS_H
#define MPK_PROTOCOL_IDENTIFIERS_H

#include "platform/platform.h"

namespace mpk {

MPK_DEVICE uint64_t make_task_id(uint32_t iteration, uint32_t index) {
  return (static_cast<uint64_t>(iteration) << 32) | index;
}
MPK_DEVICE uint32_t task_id_iteration(uint64_t id) { return static_cast<uint32_t>(id >> 32); }
MPK_DEVICE uint32_t task_id_index(uint64_t id) { return static_cast<uint32_t>(id); }

MPK_DEVICE uint64_t make_event_id(uint32_t tag, uint32_t owner, uint32_t index) {
  return (static_cast<uint64_t>(tag) << 48) | (static_cast<uint64_t>(owner & 0xFFFFu) << 32) | index;
}
MPK_DEVICE uint32_t event_id_tag(uint64_t id) { return static_cast<uint32_t>(id >> 48); }
MPK_DEVICE uint32_t event_id_owner(uint64_t id) { return static_cast<uint32_t>(id >> 32) & 0xFFFFu; }
MPK_DEVICE uint32_t event_id_index(uint64_t id) { return static_cast<uint32_t>(id); }

/* The EventId of one of this rank's own events, for reports. */
MPK_DEVICE uint64_t own_event_id(const mpk_rank* rank, const mpk_graph* graph, uint32_t index) {
  const uint32_t tag = graph->events[index].remote_triggers ? MPK_EVENT_TAG_NVSHMEM : MPK_EVENT_TAG_LOCAL;
  return make_event_id(tag, rank->rank, index);
}

}  // namespace mpk

#endif
