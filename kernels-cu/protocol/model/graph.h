/* An execution as a graph: the atomic accesses of each thread in program order, the write that each read takes its value
 * from (`from`), and the order of the writes of each location (`order`). It determines an execution completely, for any
 * interleaving of the threads.
 *
 * Consistent graphs obey release and acquire (C++20, with release sequences through read-modify-writes) and coherence for
 * each location, and a read-modify-write reads the write directly before its own. Program order and `from` form no cycle,
 * so load buffering is not modelled. */
#ifndef MPK_MODEL_GRAPH_H
#define MPK_MODEL_GRAPH_H

#include <cstdint>
#include <memory>
#include <vector>

namespace mpk {
namespace model {

constexpr uint32_t kMaxThreads = 24;
constexpr uint32_t kMaxEvents = 250; /* of one thread */
constexpr uint8_t kInitial = 0xFF;   /* the "thread" that writes the initial value of a location */

struct Id {
  uint8_t thread = kInitial;
  uint8_t index = 0;
  bool operator==(const Id& other) const { return thread == other.thread && (thread == kInitial || index == other.index); }
};

/* The number of events of each thread that come before. */
struct Clock {
  uint8_t known[kMaxThreads] = {};
  void join(const Clock& other) {
    for (uint32_t t = 0; t < kMaxThreads; ++t)
      if (other.known[t] > known[t]) known[t] = other.known[t];
  }
  bool has(Id event) const { return event.thread == kInitial || event.index < known[event.thread]; }
};

struct Event {
  enum Type : uint8_t { kRead, kWrite, kChoice };
  Type type = kRead;
  bool exclusive = false; /* half of a read-modify-write that writes */
  bool acquire = false, release = false;
  uint16_t location = 0;
  Id from;                /* of a read: the write */
  uint32_t stamp = 0;     /* when it was added to the graph */
  uint64_t value = 0;     /* read, written or chosen */
  Clock hb;               /* what happens before it, including itself */
  Clock causes;           /* the same by program order and `from`, whatever the memory orders */
  Clock other;            /* of a write: what its reader acquires; of a read: `hb` before it */
  const char* file = nullptr;
  int line = 0;
};

class Graph {
 public:
  std::vector<Event> events[kMaxThreads];
  std::vector<std::vector<Id>> order;    /* by location; the first is the initial value */
  std::vector<std::vector<Id>> accesses; /* by location */
  uint32_t next_stamp = 1;
  /* Options::causal_writes */
  static bool causal_writes;

  Event& at(Id id) { return events[id.thread][id.index]; }
  const Event& at(Id id) const { return events[id.thread][id.index]; }
  void grow(uint32_t locations);
  /* The position of a write in the order of its location. */
  uint32_t place(uint32_t location, Id write) const;
  bool is_exclusive(uint32_t location, uint32_t place) const;
  /* The position of the newest write that a thread with `hb` cannot miss: reads may not read an older one, and
   * writes come after it. */
  uint32_t oldest(uint32_t location, const Clock& hb) const;
  void add(uint8_t thread, const Event& event);
  /* Puts the thread's last event, a write, at `place` in its location's order. */
  void insert(uint8_t thread, uint32_t place);

  /* Possible positions of a write, newest first. Empty if another read-modify-write precludes this one. */
  std::vector<uint32_t> places(const Event& write, Id own_read) const;

  /* The graphs in which an earlier read takes the value of `write`, the next event of `thread`, which is not yet in the
   * graph (`own_read`: the read half if it is a read-modify-write). Each execution is reached once: the events removed for
   * it must have been added in the one way that is every event's default (TruSt, Kokologiannakis et al., POPL 2022). */
  void revisit(uint8_t thread, const Event& write, Id own_read, std::vector<std::unique_ptr<Graph>>* found) const;

 private:
  bool before(const Event& event, Id id, uint32_t stamp, const Clock& causes) const {
    return event.stamp <= stamp || causes.has(id);
  }
  bool in_default_way(Id id, const Clock& causes) const;
};

}  // namespace model
}  // namespace mpk

#endif
