/* The search: runs the world's threads as fibers along a graph, lets them go on where it ends, and keeps the graphs of what else
 * could have happened. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>

#include "model/graph.h"
#include "model/model.h"
#include "model/shadow.h"

namespace mpk {
namespace model {

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kLongTime = uint64_t{1} << 40;

enum class State {
  kReady,
  kFollows,  /* a message whose predecessors are not all there */
  kReplayed, /* at the end of its part of the graph, while others are not */
  kNeeds,    /* in replay: reads a write that is still to be done */
  kBlocked,  /* waits for another value */
  kStuck,    /* would still wait with the latest values */
  kDone,
};

struct Thread {
  std::string name;
  uint32_t rank = 0;
  std::function<void()> body;
  State state = State::kReady;
  uint32_t done = 0; /* events */
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
  /* Of this execution: */
  uint64_t execution = 0;
  uint64_t initial = 0;
  uint32_t ranks = 0;
  bool narrow = false; /* somebody asked for device scope only */
};

class Explorer {
 public:
  Explorer(Check& check, const Site* weakened, bool reversed) : check_(check), weakened_(weakened), reversed_(reversed) {}

  Result explore() {
    Graph::causal_writes = check_.options.causal_writes;
    todo_.emplace_back(new Graph);
    while (!todo_.empty() && result_.error.empty()) {
      if (check_.options.limit != 0 && result_.begun >= check_.options.limit) {
        result_.limited = true;
        break;
      }
      graph_ = std::move(todo_.back());
      todo_.pop_back();
      ++result_.begun;
      run();
    }
    return result_;
  }

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
    if (result_.begun != 1) return; /* the world is the same each time */
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

  uint64_t load(const void* address, size_t bytes, bool system, Order order, const char* function) {
    if (!in_thread()) return raw_load(address, bytes);
    /* The status is left out, and so is what only decides how long a wait may last. */
    if (strcmp(function, "poll") == 0) return 0;
    if (!check_.options.aborts && strcmp(function, "abort_code") == 0) return raw_load(address, bytes);
    const uint16_t location = find(address, bytes, system);
    const uint64_t value = read(location, acquires(order), false, [](uint64_t) { return false; });
    return part(location, address, bytes, value);
  }

  void store(void* address, size_t bytes, bool system, uint64_t value, Order order, const char* function) {
    if (!in_thread()) return raw_store(address, bytes, value);
    if (strcmp(function, "report") == 0) return;
    const uint16_t location = find(address, bytes, system);
    if (locations_[location].bytes != bytes) error("a store of half a word");
    write(location, value, releases(order), false, order);
  }

  uint64_t fetch_add(void* address, size_t bytes, bool system, uint64_t value, Order order) {
    if (!in_thread()) {
      const uint64_t old = raw_load(address, bytes);
      raw_store(address, bytes, old + value);
      return old;
    }
    const uint16_t location = find(address, bytes, system);
    const uint64_t old = read(location, acquires(order), true, [](uint64_t) { return true; });
    write(location, old + value, releases(order), true, order);
    return old;
  }

  bool compare_exchange(void* address, size_t bytes, bool system, uint64_t* expected, uint64_t desired, Order order) {
    if (!in_thread()) {
      const uint64_t old = raw_load(address, bytes);
      if (old == *expected) return raw_store(address, bytes, desired), true;
      *expected = old;
      return false;
    }
    const uint16_t location = find(address, bytes, system);
    const uint64_t wanted = *expected;
    const uint64_t old = read(location, acquires(order), true, [wanted](uint64_t value) { return value == wanted; });
    *expected = old;
    if (old != wanted) return false;
    write(location, desired, releases(order), true, order);
    return true;
  }

  void plain(const void* address, size_t bytes, bool writes) {
    if (final_) return;
    Thread& self = *current_;
    const size_t offset = offset_of(address);
    if (writes) {
      for (size_t at = offset / 4; at < (offset + bytes + 3) / 4; ++at) {
        if (by_offset_[at] != 0 && locations_[by_offset_[at] - 1].execution == result_.begun)
          error("plain write to " + name_of(offset) + ", which is also accessed by atomics");
      }
    }
    race(shadow_access(address, bytes, writes ? Access::kPlainWrite : Access::kPlainRead, self_id_, self.done, self.hb),
         writes ? "plain write of " : "plain read of ", offset);
  }

  bool wait_turn(uint32_t turns) {
    if (!in_thread()) return true;
    if (final_) {
      current_->state = State::kStuck;
      yield();
    }
    if (check_.options.timeouts && turns < 2) {
      if (turns == 0 && choose(2) == 0) return block();
      current_->clock += kLongTime;
      return true;
    }
    if (turns < check_.options.turns) return true;
    return block();
  }

  uint64_t clock() { return in_thread() ? current_->clock : 1; }

  uint32_t choose(uint32_t options) {
    if (final_) free_to_go();
    if (!replayed()) {
      Event event;
      event.type = Event::kChoice;
      for (uint32_t value = 1; value < options; ++value) {
        std::unique_ptr<Graph> other(new Graph(*graph_));
        event.value = value;
        other->add(self_id_, event);
        todo_.push_back(std::move(other));
      }
      event.value = 0;
      graph_->add(self_id_, event);
    }
    Event& event = here(Event::kChoice);
    step(event);
    return static_cast<uint32_t>(event.value);
  }

  void send(uint64_t channel, bool after_predecessors, std::function<void()> message) {
    choose(1);
    Thread& self = *current_;
    const Id sent = {self_id_, static_cast<uint8_t>(self.done - 1)};
    const std::pair<uint8_t, uint32_t> key(self_id_, self.sent++);
    const auto known = message_threads_.find(key);
    const uint8_t id = known != message_threads_.end() ? known->second : static_cast<uint8_t>(num_threads_ + message_threads_.size());
    message_threads_[key] = id;
    if (id >= kMaxThreads) die("too many messages");
    while (threads_.size() <= id) {
      threads_.emplace_back(new Thread);
      threads_.back()->state = State::kDone; /* not sent in this execution, or not yet */
    }
    Thread& fresh = *threads_[id];
    fresh.name = self.name + ", message " + std::to_string(key.second);
    fresh.rank = self.rank;
    fresh.hb = self.hb;
    fresh.causes = self.causes;
    for (const Message& earlier : messages_)
      if (after_predecessors && earlier.channel == channel && self.hb.has(earlier.sent)) fresh.follows.push_back(earlier.thread);
    messages_.push_back({channel, sent, id});
    fresh.state = State::kFollows;
    fresh.body = [this, message = std::move(message)] {
      message();
      choose(1); /* so that its last plain accesses come before an event */
    };
    prepare(id);
  }

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
  Kind kind(Order order) {
    if (order.kind == Kind::kRelaxed) return order.kind;
    const char*& seen = sites_[static_cast<uint32_t>(order.line) % 4096];
    if (seen != order.file) {
      seen = order.file;
      result_.sites.insert(Site{last_part(order.file), order.line});
    }
    if (weakened_ != nullptr && order.line == weakened_->line && last_part(order.file) == weakened_->file) return Kind::kRelaxed;
    return order.kind;
  }
  static std::string last_part(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash != nullptr ? slash + 1 : file;
  }
  Order acquires(Order order) {
    const Kind k = kind(order);
    return Order{k == Kind::kAcquire || k == Kind::kAcquireRelease ? Kind::kAcquire : Kind::kRelaxed, order.file, order.line};
  }
  bool releases(Order order) {
    const Kind k = kind(order);
    return k == Kind::kRelease || k == Kind::kAcquireRelease;
  }

  /* ---- locations ---- */
  uint16_t find(const void* address, size_t bytes, bool system) {
    if (!in_arena(address)) die("an atomic outside of the world's memory");
    size_t offset = offset_of(address);
    if (bytes == 4 && whole_[offset / 8]) offset = offset / 8 * 8, bytes = 8;
    uint16_t& slot = by_offset_[offset / 4];
    if (slot == 0) {
      locations_.push_back(Location{offset, static_cast<uint32_t>(bytes)});
      slot = static_cast<uint16_t>(locations_.size());
    }
    Location& location = locations_[slot - 1];
    if (location.bytes != bytes) die("atomics of two sizes: see whole_word");
    if (location.execution != result_.begun) {
      location.execution = result_.begun;
      location.initial = raw_load(g_arena + offset, bytes);
      location.ranks = 0;
      location.narrow = false;
    }
    graph_->grow(static_cast<uint32_t>(locations_.size()));
    location.ranks |= 1u << (current_->rank % 32);
    location.narrow |= !system;
    if (location.narrow && (location.ranks & (location.ranks - 1)) != 0 && !final_)
      error(name_of(offset) + " is accessed by two ranks, but with a scope that is not the system");
    return static_cast<uint16_t>(slot - 1);
  }

  uint64_t part(uint16_t location, const void* address, size_t bytes, uint64_t value) const {
    if (bytes == locations_[location].bytes) return value;
    return (value >> (8 * (offset_of(address) - locations_[location].offset))) & 0xFFFFFFFFu;
  }

  /* In this run of the execution. */
  bool is_done(Id event) const {
    return event.thread == kInitial || (event.thread < threads_.size() && threads_[event.thread]->done > event.index);
  }

  uint64_t value_of(uint16_t location, Id write) const {
    return write.thread == kInitial ? locations_[location].initial : graph_->at(write).value;
  }

  /* ---- events ---- */
  /* Whether the thread's next event is in the graph. */
  bool replayed() {
    Thread& self = *current_;
    if (self.done >= kMaxEvents) die("a thread has too many events: does it wait without Wait?");
    while (self.done == graph_->events[self_id_].size() && replaying_) {
      self.state = State::kReplayed;
      yield();
    }
    return self.done < graph_->events[self_id_].size();
  }

  Event& here(Event::Type type) {
    Event& event = graph_->events[self_id_][current_->done];
    if (event.type != type) die("a thread does not do the same when it is run again");
    return event;
  }

  void step(Event& event) {
    Thread& self = *current_;
    ++self.done;
    self.hb.known[self_id_] = self.causes.known[self_id_] = static_cast<uint8_t>(self.done);
    event.hb = self.hb;
    event.causes = self.causes;
  }

  void race(int other, const char* what, size_t offset) {
    if (other < 0) return;
    error(std::string("data race: ") + what + name_of(offset) + " by " + current_->name + " is not ordered with an access by " +
          threads_[static_cast<size_t>(other)]->name);
  }

  template <typename Writes>
  uint64_t read(uint16_t location, Order order, bool may_write, const Writes& writes) {
    Thread& self = *current_;
    if (final_) {
      const uint64_t value = value_of(location, graph_->order[location].back());
      if (may_write && writes(value)) free_to_go();
      return value;
    }
    if (!replayed()) {
      Event event;
      event.location = location;
      event.other = self.hb;
      std::vector<Id> options;
      const std::vector<Id>& ordered = graph_->order[location];
      const uint32_t oldest = graph_->oldest(location, self.hb);
      for (uint32_t place = static_cast<uint32_t>(ordered.size()); place-- > oldest;) {
        const Id write = ordered[place];
        if (may_write && writes(value_of(location, write)) && graph_->is_exclusive(location, place + 1)) {
          /* Another read-modify-write has it. Only if that could read this one's write instead. */
          const Id rival = ordered[place + 1];
          if (self.causes.has(Id{rival.thread, static_cast<uint8_t>(rival.index - 1)})) continue;
        }
        options.push_back(write);
      }
      for (size_t i = 1; i < options.size(); ++i) {
        std::unique_ptr<Graph> other(new Graph(*graph_));
        event.from = options[i];
        other->add(self_id_, event);
        todo_.push_back(std::move(other));
      }
      event.from = options[0];
      graph_->add(self_id_, event);
    }
    const Id from = here(Event::kRead).from;
    while (!is_done(from)) {
      self.state = State::kNeeds;
      self.needs = from;
      yield();
    }
    race(shadow_access(g_arena + locations_[location].offset, locations_[location].bytes, Access::kAtomicRead, self_id_, self.done, self.hb),
         "atomic read of ", locations_[location].offset);
    Event& event = here(Event::kRead);
    if (event.location != location) die("a thread does not do the same when it is run again");
    event.value = value_of(location, from);
    event.exclusive = may_write && writes(event.value);
    event.acquire = order.kind == Kind::kAcquire && (!may_write || event.exclusive);
    event.other = self.hb;
    event.file = order.file;
    event.line = order.line;
    if (from.thread != kInitial) {
      const Event& write = graph_->at(from);
      self.causes.join(write.causes);
      if (event.acquire) self.hb.join(write.other);
    }
    step(event);
    self.in_exclusive = event.exclusive;
    return event.value;
  }

  void write(uint16_t location, uint64_t value, bool release, bool exclusive, Order order) {
    Thread& self = *current_;
    if (final_) free_to_go();
    if (locations_[location].bytes == 4) value &= 0xFFFFFFFFu;
    const Id own_read = exclusive ? Id{self_id_, static_cast<uint8_t>(self.done - 1)} : Id{};
    if (!replayed()) {
      Event event;
      event.type = Event::kWrite;
      event.location = location;
      event.value = value;
      event.exclusive = exclusive;
      event.hb = self.hb;
      event.causes = self.causes;
      event.hb.known[self_id_] = event.causes.known[self_id_] = static_cast<uint8_t>(self.done + 1);
      event.other = released(event.hb, release, own_read);
      event.file = order.file;
      event.line = order.line;
      graph_->revisit(self_id_, event, own_read, &todo_);
      const std::vector<uint32_t> places = graph_->places(event, own_read);
      if (places.empty()) stop();
      for (size_t i = 1; i < places.size(); ++i) {
        std::unique_ptr<Graph> other(new Graph(*graph_));
        other->add(self_id_, event);
        other->insert(self_id_, places[i]);
        todo_.push_back(std::move(other));
      }
      graph_->add(self_id_, event);
      graph_->insert(self_id_, places[0]);
    }
    race(shadow_access(g_arena + locations_[location].offset, locations_[location].bytes, Access::kAtomicWrite, self_id_, self.done, self.hb),
         "atomic write of ", locations_[location].offset);
    Event& event = here(Event::kWrite);
    if (event.location != location || event.value != value) die("a thread does not do the same when it is run again");
    const Id id = {self_id_, static_cast<uint8_t>(self.done)};
    step(event);
    event.release = release;
    event.other = released(event.hb, release, own_read);
    self.in_exclusive = false;
    /* Memory holds the newest of what has been done, for plain reads that come after all. */
    const std::vector<Id>& writes = graph_->order[location];
    for (uint32_t i = graph_->place(location, id) + 1; i < writes.size(); ++i)
      if (is_done(writes[i])) return;
    raw_store(g_arena + locations_[location].offset, locations_[location].bytes, value);
  }

  Clock released(const Clock& hb, bool release, Id own_read) const {
    Clock clock;
    if (release) clock = hb;
    if (own_read.thread != kInitial) {
      const Id from = graph_->at(own_read).from;
      if (from.thread != kInitial) clock.join(graph_->at(from).other);
    }
    return clock;
  }

  /* ---- fibers ---- */
  static void enter();

  void prepare(uint8_t id) {
    Thread& thread = *threads_[id];
    while (stacks_.size() <= id) stacks_.emplace_back(new uint8_t[kStackBytes]);
    getcontext(&thread.first);
    thread.first.uc_stack.ss_sp = stacks_[id].get();
    thread.first.uc_stack.ss_size = kStackBytes;
    thread.first.uc_link = nullptr;
    makecontext(&thread.first, enter, 0);
    thread.started = false;
  }

  [[gnu::noinline]] void resume(uint8_t id) {
    self_id_ = id;
    current_ = threads_[id].get();
    current_->state = State::kReady;
    if (_setjmp(main_) == 0) {
      if (current_->started) _longjmp(current_->where, 1);
      current_->started = true;
      setcontext(&current_->first);
    }
    current_ = nullptr;
  }

  [[gnu::noinline]] void yield() {
    if (_setjmp(current_->where) == 0) _longjmp(main_, 1);
  }

  /* This execution leads no further. */
  void stop() {
    stopped_ = true;
    for (;;) yield();
  }

  bool block() {
    /* A stale last read is never taken back, and what would end the wait is seen where it was not stale. */
    const std::vector<Event>& events = graph_->events[self_id_];
    if (current_->done == events.size() && !events.empty() && events.back().type == Event::kRead) {
      const Event& read = events.back();
      const std::vector<Id>& writes = graph_->order[read.location];
      for (uint32_t i = graph_->place(read.location, read.from) + 1; i < writes.size(); ++i)
        if (graph_->at(writes[i]).stamp < read.stamp) stop();
    }
    current_->state = State::kBlocked;
    yield();
    return false; /* only with the latest values, see stuck() */
  }

  void free_to_go() {
    current_->state = State::kReady;
    for (;;) yield();
  }

  /* ---- one execution ---- */
  void run() {
    memset(g_arena, 0, used_);
    used_ = 0;
    threads_.clear();
    messages_.clear();
    shadow_reset();
    stopped_ = final_ = false;
    replaying_ = true;
    check_.build();
    if (reversed_) std::reverse(threads_.begin(), threads_.end());
    num_threads_ = static_cast<uint32_t>(threads_.size());
    graph_->grow(static_cast<uint32_t>(locations_.size()));
    for (uint32_t t = 0; t < num_threads_; ++t) prepare(static_cast<uint8_t>(t));
    for (;;) {
      const int next = pick();
      if (next < 0 && !replaying_) break;
      if (next < 0) {
        replaying_ = false;
        for (uint32_t t = 0; t < kMaxThreads; ++t)
          if (!graph_->events[t].empty() && (t >= threads_.size() || threads_[t]->done < graph_->events[t].size())) die("replay does not reach its end");
        for (auto& thread : threads_) {
          if (thread->state == State::kNeeds) die("replay does not end");
          if (thread->state == State::kReplayed) thread->state = State::kReady;
        }
        continue;
      }
      resume(static_cast<uint8_t>(next));
      if (stopped_) return;
    }
    bool all = true;
    for (auto& thread : threads_) all &= thread->state == State::kDone;
    if (all) {
      ++result_.complete;
      if (check_.options.distinct && !seen_.insert(signature()).second) error("the same execution was explored twice");
      check_.finish();
    } else if (stuck()) {
      if (!check_.may_wait()) error("deadlock: " + waiting());
      ++result_.waiting;
    } else {
      ++result_.waiting;
    }
  }

  int pick() {
    int ready = -1;
    for (size_t t = 0; t < threads_.size(); ++t) {
      Thread& thread = *threads_[t];
      if (thread.state == State::kFollows) {
        bool may = true;
        for (uint8_t earlier : thread.follows) may &= threads_[earlier]->state == State::kDone;
        if (!may) continue;
        for (uint8_t earlier : thread.follows) {
          thread.hb.join(threads_[earlier]->hb);
          thread.causes.join(threads_[earlier]->causes);
        }
        thread.state = State::kReady;
      }
      if (thread.state == State::kNeeds && is_done(thread.needs)) thread.state = State::kReady;
      if (thread.state != State::kReady) continue;
      if (!replaying_ && thread.in_exclusive) return static_cast<int>(t);
      if (ready < 0) ready = static_cast<int>(t);
    }
    return ready;
  }

  /* Whether those that wait would still do so if they all read the latest values once more. */
  bool stuck() {
    final_ = true;
    bool all = true;
    for (size_t t = 0; t < threads_.size(); ++t) {
      if (threads_[t]->state != State::kBlocked) continue;
      resume(static_cast<uint8_t>(t));
      all &= threads_[t]->state == State::kStuck;
    }
    return all;
  }

  /* What makes an execution: who reads what, and the order of writes. */
  std::string signature() const {
    std::string text;
    for (const auto& events : graph_->events) {
      for (const Event& event : events) {
        if (event.type == Event::kRead) text += std::to_string(event.from.thread) + "." + std::to_string(event.from.index) + ",";
        if (event.type == Event::kChoice) text += std::to_string(event.value) + ",";
      }
      text += ";";
    }
    for (const auto& writes : graph_->order) {
      for (const Id& write : writes) text += std::to_string(write.thread) + "." + std::to_string(write.index) + ",";
      text += ";";
    }
    return text;
  }

  /* ---- reports ---- */
  std::string waiting() const {
    std::string text;
    for (const auto& thread : threads_) {
      if (thread->state != State::kStuck) continue;
      text += (text.empty() ? "" : ", ") + thread->name;
    }
    return text + " would wait for ever";
  }

  std::string name_of(size_t offset) const {
    auto at = names_.upper_bound(offset);
    if (at == names_.begin()) return "memory at " + std::to_string(offset);
    --at;
    return offset == at->first ? at->second : at->second + " + " + std::to_string(offset - at->first);
  }

  /* The graph, in an order in which it may have happened. */
  std::string description() const {
    std::string text;
    uint32_t done[kMaxThreads] = {};
    char line[400];
    for (bool more = true; more;) {
      more = false;
      for (uint32_t t = 0; t < threads_.size(); ++t) {
        const std::vector<Event>& events = graph_->events[t];
        while (done[t] < events.size() && done[t] < threads_[t]->done) {
          const Event& event = events[done[t]];
          bool may = true;
          for (uint32_t u = 0; u < kMaxThreads; ++u) may &= u == t || event.causes.known[u] <= done[u];
          if (!may) break;
          more = true;
          ++done[t];
          if (event.type == Event::kChoice) {
            if (event.value != 0) snprintf(line, sizeof(line), "  %-22s chooses %llu\n", threads_[t]->name.c_str(), static_cast<unsigned long long>(event.value)), text += line;
            continue;
          }
          const char* what = event.type == Event::kRead ? (event.acquire ? "load, acquire " : "load, relaxed ") : event.release ? "store, release" : "store, relaxed";
          std::string source;
          if (event.type == Event::kRead) {
            const Id from = event.from;
            source = from.thread == kInitial ? "  (initial value)" : "  (from " + threads_[from.thread]->name + ")";
          }
          snprintf(line, sizeof(line), "  %-22s %s %s%s = 0x%llx%s  [%s:%d]\n", threads_[t]->name.c_str(), event.exclusive ? "atomic " : "", what,
                   (" " + name_of(locations_[event.location].offset)).c_str(), static_cast<unsigned long long>(event.value), source.c_str(),
                   last_part(event.file).c_str(), event.line);
          text += line;
        }
      }
    }
    return text;
  }

  Check& check_;
  const Site* weakened_;
  bool reversed_;
  Result result_;
  std::vector<std::unique_ptr<Graph>> todo_;
  std::unique_ptr<Graph> graph_;
  size_t used_ = kArenaBytes;
  std::vector<std::unique_ptr<Thread>> threads_;
  uint32_t num_threads_ = 0; /* but messages */
  std::map<std::pair<uint8_t, uint32_t>, uint8_t> message_threads_; /* by sender and number, the same in all executions */
  std::vector<Message> messages_;
  std::vector<Location> locations_;
  uint16_t by_offset_[kArenaBytes / 4] = {};
  bool whole_[kArenaBytes / 8] = {};
  std::map<size_t, std::string> names_;
  std::set<std::string> seen_;
  const char* sites_[4096] = {};
  bool replaying_ = false, stopped_ = false, final_ = false;
  uint8_t self_id_ = 0;
  Thread* current_ = nullptr;
  jmp_buf main_;
  std::vector<std::unique_ptr<uint8_t[]>> stacks_;
};

Explorer* g_explorer = nullptr;

void Explorer::enter() {
  Explorer* self = g_explorer;
  self->current_->body();
  self->current_->state = State::kDone;
  for (;;) {
    if (self->final_) self->current_->state = State::kReady; /* it would not wait */
    self->yield();
  }
}

}  // namespace

/* ---- the interface, for the explorer that runs ---- */

uint64_t load(const void* address, size_t bytes, bool system, Order order, const char* function) {
  return g_explorer->load(address, bytes, system, order, function);
}
void store(void* address, size_t bytes, bool system, uint64_t value, Order order, const char* function) {
  g_explorer->store(address, bytes, system, value, order, function);
}
uint64_t fetch_add(void* address, size_t bytes, bool system, uint64_t value, Order order) {
  return g_explorer->fetch_add(address, bytes, system, value, order);
}
bool compare_exchange(void* address, size_t bytes, bool system, uint64_t* expected, uint64_t desired, Order order) {
  return g_explorer->compare_exchange(address, bytes, system, expected, desired, order);
}

void plain_access(const void* address, size_t bytes, bool write) {
  if (in_arena(address) && g_explorer->in_thread()) g_explorer->plain(address, bytes, write);
}
void copy(void* to, const void* from, size_t bytes) {
  plain_access(from, bytes, false);
  plain_access(to, bytes, true);
  memcpy(to, from, bytes);
}

bool wait_turn(uint32_t turns) { return g_explorer->wait_turn(turns); }
uint64_t clock_ns() { return g_explorer->clock(); }
void send(uint64_t channel, bool after_predecessors, std::function<void()> message) {
  g_explorer->send(channel, after_predecessors, std::move(message));
}
void* allocate(size_t bytes, size_t alignment) { return g_explorer->allocate(bytes, alignment); }
void thread(const char* name, uint32_t rank, std::function<void()> body) { g_explorer->add_thread(name, rank, std::move(body)); }
void whole_word(const void* address) { g_explorer->whole_word(address); }
void label(const void* address, const char* text, int number) { g_explorer->name(address, text, number); }
uint32_t choose(uint32_t options) { return g_explorer->choose(options); }
void outcome(uint64_t value) { g_explorer->outcome(value); }

void fail(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  g_explorer->error(text);
}

Result explore(Check& check, const Site* weakened, bool reversed) {
  std::unique_ptr<Explorer> explorer(new Explorer(check, weakened, reversed));
  g_explorer = explorer.get();
  return explorer->explore();
}

std::vector<Check*>& checks() {
  static std::vector<Check*> all;
  return all;
}
std::vector<Check*>& litmus_tests() {
  static std::vector<Check*> all;
  return all;
}

}  // namespace model
}  // namespace mpk
