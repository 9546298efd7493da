/* The explorer of one check: threads as fibers along a graph of what they have done, and the graphs of other possible
 * executions. explore.cpp has the search, operations.cpp what threads do, report.cpp how an execution is described. */
#ifndef MPK_MODEL_EXPLORER_H
#define MPK_MODEL_EXPLORER_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/graph.h"
#include "model/model.h"
#include "model/shadow.h"

namespace mpk {
namespace model {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kLongTime = uint64_t{1} << 40;

enum class State {
  kReady,
  kFollows,  /* a message whose predecessors have not all arrived */
  kReplayed, /* has reached the end of its part of the graph; other threads have not */
  kNeeds,    /* in replay: reads a write that has not been done yet */
  kBlocked,  /* waits for another value */
  kStuck,    /* would still wait with the latest values */
  kDone,
};

struct Thread {
  std::string name;
  uint32_t rank = 0;
  std::function<void()> body;
  State state = State::kReady;
  uint32_t done = 0; /* number of events */
  Clock hb, causes;
  Id needs;
  bool in_exclusive = false; /* between the halves of a read-modify-write */
  uint64_t clock = 1;
  uint32_t sent = 0;
  std::vector<uint8_t> follows;
  ucontext_t first;
  jmp_buf where;
  bool started = false;
};

struct Message {
  uint64_t channel;
  Id sent;
  uint8_t thread;
};

struct Location {
  uintptr_t offset;
  uint32_t bytes;
  /* The following belong to the current execution. */
  uint64_t execution = 0;
  uint64_t initial = 0;
  uint32_t ranks = 0;
  bool narrow = false; /* some access asked for device scope only */
};

class Explorer {
 public:
  Explorer(Check& check, const Variation& variation) : check_(check), variation_(variation) {}

  Result explore();

  /* ---- of the world being built ---- */
  void* allocate(size_t bytes, size_t alignment) {
    used_ = (used_ + alignment - 1) / alignment * alignment;
    void* memory = g_arena + used_;
    used_ += bytes;
    if (used_ > kArenaBytes) die("the world needs more memory than there is");
    return memory;
  }
  void add_thread(const char* name, uint32_t rank, std::function<void()> body) {
    if (threads_.size() == kMaxThreads) die("too many threads");
    threads_.emplace_back(new Thread);
    threads_.back()->name = name;
    threads_.back()->rank = rank;
    threads_.back()->body = std::move(body);
  }
  void whole_word(const void* address) { whole_[offset_of(address) / 8] = true; }
  void name(const void* address, const char* text, int number) {
    if (result_.begun != 1) return; /* the world is the same in each execution */
    names_[offset_of(address)] = number < 0 ? std::string(text) : std::string(text) + "[" + std::to_string(number) + "]";
  }
  void outcome(uint64_t value) { result_.outcomes.insert(value); }

  /* ---- what threads do ---- */
  bool in_thread() const { return current_ != nullptr; }

  void error(const std::string& text) {
    if (final_ && in_thread()) free_to_go();
    if (result_.error.empty()) result_.error = text + "\n" + description();
    if (in_thread()) stop();
  }

  uint64_t load(const void* address, size_t bytes, bool system, Order order, const char* function);
  void store(void* address, size_t bytes, bool system, uint64_t value, Order order, const char* function);
  uint64_t fetch_add(void* address, size_t bytes, bool system, uint64_t value, Order order);
  bool compare_exchange(void* address, size_t bytes, bool system, uint64_t* expected, uint64_t desired, Order order);
  void plain(const void* address, size_t bytes, bool writes);
  bool wait_turn(uint32_t turns);

  uint64_t clock() { return in_thread() ? current_->clock : 1; }

  uint32_t choose(uint32_t options);
  void send(uint64_t channel, bool after_predecessors, std::function<void()> message);

 private:
  [[noreturn]] void die(const char* what) {
    fprintf(stderr, "model %s: %s\n", check_.name, what);
    exit(1);
  }

  static size_t offset_of(const void* address) { return static_cast<size_t>(static_cast<const uint8_t*>(address) - g_arena); }

  static uint64_t raw_load(const void* address, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, address, bytes);
    return value;
  }
  static void raw_store(void* address, size_t bytes, uint64_t value) { memcpy(address, &value, bytes); }

  /* ---- memory orders ---- */
  Kind kind(Order order);
  static bool is(Order order, const Site* site) { return site != nullptr && order.line == site->line && last_part(order.file) == site->file; }
  bool scope(bool system, Order order);
  static std::string last_part(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash != nullptr ? slash + 1 : file;
  }
  Order acquires(Order order);
  bool releases(Order order);

  /* ---- locations ---- */
  uint16_t find(const void* address, size_t bytes, bool system);

  uint64_t part(uint16_t location, const void* address, size_t bytes, uint64_t value) const {
    if (bytes == locations_[location].bytes) return value;
    return (value >> (8 * (offset_of(address) - locations_[location].offset))) & 0xFFFFFFFFu;
  }

  /* Done in this run of the execution. */
  bool is_done(Id event) const {
    return event.thread == kInitial || (event.thread < threads_.size() && threads_[event.thread]->done > event.index);
  }

  uint64_t value_of(uint16_t location, Id write) const {
    return write.thread == kInitial ? locations_[location].initial : graph_->at(write).value;
  }

  /* ---- events ---- */
  /* Whether the thread's next event is in the graph. */
  bool replayed();
  Event& here(Event::Type type);
  void step(Event& event);
  void race(int other, const char* what, size_t offset);

  template <typename Writes>
  uint64_t read(uint16_t location, Order order, bool may_write, const Writes& writes);
  void write(uint16_t location, uint64_t value, bool release, bool exclusive, Order order);
  Clock released(const Clock& hb, bool release, Id own_read) const;

  /* ---- fibers ---- */
  static void enter();
  void prepare(uint8_t id);
  [[gnu::noinline]] void resume(uint8_t id);
  [[gnu::noinline]] void yield();

  /* Gives up this execution. */
  void stop();
  bool block();
  void free_to_go();

  /* ---- one execution ---- */
  void run();
  int pick();

  /* Whether the waiting threads would still wait if they all read the latest values once more. */
  bool stuck();

  /* What distinguishes two executions: the write that each read takes its value from, and the order of writes. */
  std::string signature() const;

  /* ---- reports ---- */
  std::string waiting() const;
  std::string name_of(size_t offset) const;

  /* The graph, in an order in which it may have happened. */
  std::string description() const;

  Check& check_;
  Variation variation_;
  Result result_;
  std::vector<std::unique_ptr<Graph>> todo_;
  std::unique_ptr<Graph> graph_;
  size_t used_ = kArenaBytes;
  std::vector<std::unique_ptr<Thread>> threads_;
  uint32_t num_threads_ = 0; /* without messages */
  std::map<std::pair<uint8_t, uint32_t>, uint8_t> message_threads_; /* by sender and number; the same in all executions */
  std::vector<Message> messages_;
  std::vector<Location> locations_;
  uint16_t by_offset_[kArenaBytes / 4] = {};
  bool whole_[kArenaBytes / 8] = {};
  std::map<size_t, std::string> names_;
  std::set<std::string> seen_;
  const char* sites_[4096] = {};
  const char* system_sites_[4096] = {};
  bool replaying_ = false, stopped_ = false, final_ = false;
  uint8_t self_id_ = 0;
  Thread* current_ = nullptr;
  jmp_buf main_;
  std::vector<std::unique_ptr<uint8_t[]>> stacks_;
};

extern Explorer* g_explorer; /* the running explorer */

}  // namespace model
}  // namespace mpk

#endif
