/* An execution as a graph: the atomic accesses of each thread in program order, which write each read reads (`from`), and the
 * order of the writes of each location (`order`). It fixes an execution completely, whatever the threads' interleaving was.
 *
 * What is consistent: release and acquire (C++20, with release sequences through read-modify-writes), coherence for each
 * location, read-modify-writes that read the write directly before their own. Program order and `from` have no circle
 * together, so load buffering is not modelled. */
#ifndef MPK_MODEL_GRAPH_H
#define MPK_MODEL_GRAPH_H

#include <cstdint>
#include <memory>
#include <vector>

namespace mpk {
namespace model {

constexpr uint32_t kMaxThreads = 24;
constexpr uint32_t kMaxEvents = 250; /* of one thread */
constexpr uint8_t kInitial = 0xFF;   /* the "thread" of the values that a location starts with */

struct Id {
  uint8_t thread = kInitial;
  uint8_t index = 0;
  bool operator==(const Id& other) const { return thread == other.thread && (thread == kInitial || index == other.index); }
};

/* How many events of each thread come before. */
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
  Id from;                /* a read's */
  uint32_t stamp = 0;     /* when it was added to the graph */
  uint64_t value = 0;     /* read, written or chosen */
  Clock hb;               /* what happens before it, itself included */
  Clock causes;           /* likewise by program order and `from`, whatever their memory orders */
  Clock other;            /* a write's: what its reader acquires; a read's: `hb` before it */
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
  /* Where a write stands in the order of its location. */
  uint32_t place(uint32_t location, Id write) const;
  bool is_exclusive(uint32_t location, uint32_t place) const;
  /* The place of the newest write that whoever knows `hb` can't miss: reads may not read an older one, writes come after. */
  uint32_t oldest(uint32_t location, const Clock& hb) const;
  void add(uint8_t thread, const Event& event);
  /* Puts the thread's last event, a write, at `place` of its location's order. */
  void insert(uint8_t thread, uint32_t place);

  /* Places at which a write may stand, newest first. Empty: a read-modify-write that another one precludes. */
  std::vector<uint32_t> places(const Event& write, Id own_read) const;

  /* The graphs in which an earlier read takes the value of `write`, the next event of `thread`, which is not yet in the graph
   * (`own_read`: of a read-modify-write). Each execution is reached once: what has to go for it must have been added in the one
   * way that is every event's default (TruSt, Kokologiannakis et al., POPL 2022). */
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
