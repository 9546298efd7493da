/* The search: runs the world's threads as fibers along a graph, continues them where the graph ends, and collects the graphs
 * of other possible executions. */
#include <algorithm>

#include "model/explorer.h"

namespace mpk {
namespace model {

Explorer* g_explorer = nullptr;

Result Explorer::explore() {
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

void Explorer::prepare(uint8_t id) {
  Thread& thread = *threads_[id];
  while (stacks_.size() <= id) stacks_.emplace_back(new uint8_t[kStackBytes]);
  getcontext(&thread.first);
  thread.first.uc_stack.ss_sp = stacks_[id].get();
  thread.first.uc_stack.ss_size = kStackBytes;
  thread.first.uc_link = nullptr;
  makecontext(&thread.first, enter, 0);
  thread.started = false;
}

void Explorer::resume(uint8_t id) {
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

void Explorer::yield() {
  if (_setjmp(current_->where) == 0) _longjmp(main_, 1);
}

void Explorer::stop() {
  stopped_ = true;
  for (;;) yield();
}

bool Explorer::block() {
  /* A stale last read is never undone: another execution, in which the read was not stale, sees the value that ends the wait. */
  const std::vector<Event>& events = graph_->events[self_id_];
  if (current_->done == events.size() && !events.empty() && events.back().type == Event::kRead) {
    const Event& read = events.back();
    const std::vector<Id>& writes = graph_->order[read.location];
    for (uint32_t i = graph_->place(read.location, read.from) + 1; i < writes.size(); ++i)
      if (graph_->at(writes[i]).stamp < read.stamp) stop();
  }
  current_->state = State::kBlocked;
  yield();
  return false; /* this happens only with the latest values, see stuck() */
}

void Explorer::free_to_go() {
  current_->state = State::kReady;
  for (;;) yield();
}

void Explorer::run() {
  memset(g_arena, 0, used_);
  used_ = 0;
  threads_.clear();
  messages_.clear();
  shadow_reset();
  stopped_ = final_ = false;
  replaying_ = true;
  check_.build();
  if (variation_.reversed) std::reverse(threads_.begin(), threads_.end());
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

int Explorer::pick() {
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

bool Explorer::stuck() {
  final_ = true;
  bool all = true;
  for (size_t t = 0; t < threads_.size(); ++t) {
    if (threads_[t]->state != State::kBlocked) continue;
    resume(static_cast<uint8_t>(t));
    all &= threads_[t]->state == State::kStuck;
  }
  return all;
}

void Explorer::enter() {
  Explorer* self = g_explorer;
  self->current_->body();
  self->current_->state = State::kDone;
  for (;;) {
    if (self->final_) self->current_->state = State::kReady; /* this thread would not wait */
    self->yield();
  }
}

Result explore(Check& check, const Variation& variation) {
  std::unique_ptr<Explorer> explorer(new Explorer(check, variation));
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
