/* What threads do: each operation of model.h is found in the graph; or it is new, and its alternatives are
 * collected. */
#include <stdarg.h>

#include "model/explorer.h"

namespace mpk {
namespace model {

uint64_t Explorer::load(const void* address, size_t bytes, bool system, Order order, const char* function) {
  if (!in_thread()) return raw_load(address, bytes);
  /* Leaves out the status, and everything that only decides how long a wait may last. */
  if (strcmp(function, "poll") == 0) return 0;
  if (!check_.options.aborts && strcmp(function, "abort_code") == 0) return raw_load(address, bytes);
  const uint16_t location = find(address, bytes, scope(system, order));
  const uint64_t value = read(location, acquires(order), false, [](uint64_t) { return false; });
  return part(location, address, bytes, value);
}

void Explorer::store(void* address, size_t bytes, bool system, uint64_t value, Order order, const char* function) {
  if (!in_thread()) return raw_store(address, bytes, value);
  if (strcmp(function, "report") == 0) return;
  const uint16_t location = find(address, bytes, scope(system, order));
  if (locations_[location].bytes != bytes) error("a store of half a word");
  write(location, value, releases(order), false, order);
}

uint64_t Explorer::fetch_add(void* address, size_t bytes, bool system, uint64_t value, Order order) {
  if (!in_thread()) {
    const uint64_t old = raw_load(address, bytes);
    raw_store(address, bytes, old + value);
    return old;
  }
  const uint16_t location = find(address, bytes, scope(system, order));
  const uint64_t old = read(location, acquires(order), true, [](uint64_t) { return true; });
  write(location, old + value, releases(order), true, order);
  return old;
}

bool Explorer::compare_exchange(void* address, size_t bytes, bool system, uint64_t* expected, uint64_t desired, Order order) {
  if (!in_thread()) {
    const uint64_t old = raw_load(address, bytes);
    if (old == *expected) return raw_store(address, bytes, desired), true;
    *expected = old;
    return false;
  }
  const uint16_t location = find(address, bytes, scope(system, order));
  const uint64_t wanted = *expected;
  const uint64_t old = read(location, acquires(order), true, [wanted](uint64_t value) { return value == wanted; });
  *expected = old;
  if (old != wanted) return false;
  write(location, desired, releases(order), true, order);
  return true;
}

void Explorer::plain(const void* address, size_t bytes, bool writes) {
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

bool Explorer::wait_turn(uint32_t turns) {
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

uint32_t Explorer::choose(uint32_t options) {
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

void Explorer::send(uint64_t channel, bool after_predecessors, std::function<void()> message) {
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
    choose(1); /* a choice, so that the message's last plain accesses come before an event */
  };
  prepare(id);
}

Kind Explorer::kind(Order order) {
  if (order.kind == Kind::kRelaxed) return order.kind;
  const char*& seen = sites_[static_cast<uint32_t>(order.line) % 4096];
  if (seen != order.file) {
    seen = order.file;
    result_.sites.insert(Site{last_part(order.file), order.line});
  }
  return is(order, variation_.weakened) ? Kind::kRelaxed : order.kind;
}

bool Explorer::scope(bool system, Order order) {
  if (!system) return false;
  const char*& seen = system_sites_[static_cast<uint32_t>(order.line) % 4096];
  if (seen != order.file) {
    seen = order.file;
    result_.system_sites.insert(Site{last_part(order.file), order.line});
  }
  return !is(order, variation_.narrowed);
}

Order Explorer::acquires(Order order) {
  const Kind k = kind(order);
  return Order{k == Kind::kAcquire || k == Kind::kAcquireRelease ? Kind::kAcquire : Kind::kRelaxed, order.file, order.line};
}

bool Explorer::releases(Order order) {
  const Kind k = kind(order);
  return k == Kind::kRelease || k == Kind::kAcquireRelease;
}

uint16_t Explorer::find(const void* address, size_t bytes, bool system) {
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

bool Explorer::replayed() {
  Thread& self = *current_;
  if (self.done >= kMaxEvents) die("a thread has too many events: does it wait without Wait?");
  while (self.done == graph_->events[self_id_].size() && replaying_) {
    self.state = State::kReplayed;
    yield();
  }
  return self.done < graph_->events[self_id_].size();
}

Event& Explorer::here(Event::Type type) {
  Event& event = graph_->events[self_id_][current_->done];
  if (event.type != type) die("a thread does not do the same when it is run again");
  return event;
}

void Explorer::step(Event& event) {
  Thread& self = *current_;
  ++self.done;
  self.hb.known[self_id_] = self.causes.known[self_id_] = static_cast<uint8_t>(self.done);
  event.hb = self.hb;
  event.causes = self.causes;
}

void Explorer::race(int other, const char* what, size_t offset) {
  if (other < 0) return;
  error(std::string("data race: ") + what + name_of(offset) + " by " + current_->name + " is not ordered with an access by " +
        threads_[static_cast<size_t>(other)]->name);
}

template <typename Writes>
uint64_t Explorer::read(uint16_t location, Order order, bool may_write, const Writes& writes) {
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
        /* Another read-modify-write already has it. This one may have it only if the other could read this
         * one's write instead. */
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

void Explorer::write(uint16_t location, uint64_t value, bool release, bool exclusive, Order order) {
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
  /* Memory holds the newest write done so far, for plain reads that come after all of them. */
  const std::vector<Id>& writes = graph_->order[location];
  for (uint32_t i = graph_->place(location, id) + 1; i < writes.size(); ++i)
    if (is_done(writes[i])) return;
  raw_store(g_arena + locations_[location].offset, locations_[location].bytes, value);
}

Clock Explorer::released(const Clock& hb, bool release, Id own_read) const {
  Clock clock;
  if (release) clock = hb;
  if (own_read.thread != kInitial) {
    const Id from = graph_->at(own_read).from;
    if (from.thread != kInitial) clock.join(graph_->at(from).other);
  }
  return clock;
}

/* ---- the interface, for the running explorer ---- */

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

}  // namespace model
}  // namespace mpk
