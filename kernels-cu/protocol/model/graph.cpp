#include "model/graph.h"

namespace mpk {
namespace model {

void Graph::grow(uint32_t locations) {
  while (order.size() < locations) {
    order.push_back({Id{}});
    accesses.push_back({});
  }
}

uint32_t Graph::place(uint32_t location, Id write) const {
  const std::vector<Id>& writes = order[location];
  for (uint32_t i = 0; i < writes.size(); ++i)
    if (writes[i] == write) return i;
  return 0xFFFFFFFFu; /* unreachable: the write of a read is in the graph */
}

bool Graph::is_exclusive(uint32_t location, uint32_t place) const {
  return place != 0 && place < order[location].size() && at(order[location][place]).exclusive;
}

uint32_t Graph::oldest(uint32_t location, const Clock& hb) const {
  uint32_t oldest = 0;
  for (const Id& id : accesses[location]) {
    if (!hb.has(id)) continue;
    const Event& event = at(id);
    const uint32_t seen = place(location, event.type == Event::kWrite ? id : event.from);
    if (seen > oldest) oldest = seen;
  }
  return oldest;
}

void Graph::add(uint8_t thread, const Event& event) {
  events[thread].push_back(event);
  events[thread].back().stamp = next_stamp++;
  if (event.type != Event::kChoice) accesses[event.location].push_back(Id{thread, static_cast<uint8_t>(events[thread].size() - 1)});
}

void Graph::insert(uint8_t thread, uint32_t place) {
  const uint8_t index = static_cast<uint8_t>(events[thread].size() - 1);
  std::vector<Id>& writes = order[events[thread][index].location];
  writes.insert(writes.begin() + place, Id{thread, index});
}

bool Graph::causal_writes = false;

std::vector<uint32_t> Graph::places(const Event& write, Id own_read) const {
  std::vector<uint32_t> found;
  if (write.exclusive) {
    const uint32_t after = place(write.location, at(own_read).from) + 1;
    if (!is_exclusive(write.location, after)) found.push_back(after);
    return found;
  }
  const uint32_t oldest_place = oldest(write.location, causal_writes ? write.causes : write.hb);
  for (uint32_t at_place = static_cast<uint32_t>(order[write.location].size()); at_place > oldest_place; --at_place) {
    /* Not between the two halves of a read-modify-write. */
    if (!is_exclusive(write.location, at_place)) found.push_back(at_place);
  }
  return found;
}

/* Whether the event is what it would be if it were added last, after everything that came before it and everything
 * that causes the write: a read of the newest write, a write that is the newest, a first choice. */
bool Graph::in_default_way(Id id, const Clock& causes) const {
  const Event& event = at(id);
  if (event.type == Event::kChoice) return event.value == 0;
  Id newest = id;
  if (event.type == Event::kRead) {
    newest = event.from;
    if (newest.thread != kInitial && !before(at(newest), newest, event.stamp, causes)) return false;
  } else {
    for (const Id& reader : accesses[event.location]) {
      const Event& read = at(reader);
      if (read.type == Event::kRead && read.from == id && before(read, reader, event.stamp, causes)) return false;
    }
  }
  const std::vector<Id>& writes = order[event.location];
  for (uint32_t i = place(event.location, newest) + 1; i < writes.size(); ++i)
    if (before(at(writes[i]), writes[i], event.stamp, causes)) return false;
  return true;
}

void Graph::revisit(uint8_t thread, const Event& write, Id own_read, std::vector<std::unique_ptr<Graph>>* found) const {
  for (const Id& id : accesses[write.location]) {
    const Event& read = at(id);
    if (read.type != Event::kRead || write.causes.has(id)) continue;
    /* The number of events to keep of each thread. */
    uint32_t keep[kMaxThreads];
    bool possible = in_default_way(id, write.causes);
    for (uint32_t t = 0; t < kMaxThreads && possible; ++t) {
      keep[t] = 0;
      while (keep[t] < events[t].size() && events[t][keep[t]].stamp <= read.stamp) ++keep[t];
      if (write.causes.known[t] > keep[t]) keep[t] = write.causes.known[t];
      if (keep[t] > events[t].size()) keep[t] = static_cast<uint32_t>(events[t].size()); /* the write itself */
      for (uint32_t i = keep[t]; i < events[t].size() && possible; ++i) possible = in_default_way(Id{static_cast<uint8_t>(t), static_cast<uint8_t>(i)}, write.causes);
    }
    if (!possible) continue;
    Graph kept;
    kept.next_stamp = next_stamp;
    for (uint32_t t = 0; t < kMaxThreads; ++t) kept.events[t].assign(events[t].begin(), events[t].begin() + keep[t]);
    kept.grow(static_cast<uint32_t>(order.size()));
    for (uint32_t l = 0; l < order.size(); ++l) {
      for (uint32_t i = 1; i < order[l].size(); ++i)
        if (order[l][i].index < keep[order[l][i].thread]) kept.order[l].push_back(order[l][i]);
      for (const Id& access : accesses[l])
        if (access.index < keep[access.thread]) kept.accesses[l].push_back(access);
    }
    const uint32_t oldest_place = kept.oldest(write.location, read.other);
    for (uint32_t at_place : kept.places(write, own_read)) {
      if (at_place <= oldest_place) continue; /* the reader knows a newer write */
      std::unique_ptr<Graph> next(new Graph(kept));
      next->add(thread, write);
      next->insert(thread, at_place);
      next->at(id).from = Id{thread, static_cast<uint8_t>(next->events[thread].size() - 1)};
      found->push_back(std::move(next));
    }
  }
}

}  // namespace model
}  // namespace mpk
