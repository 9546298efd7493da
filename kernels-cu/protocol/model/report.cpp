/* How an execution is described. */
#include "model/explorer.h"

namespace mpk {
namespace model {

std::string Explorer::signature() const {
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

std::string Explorer::waiting() const {
  std::string text;
  for (const auto& thread : threads_) {
    if (thread->state != State::kStuck) continue;
    text += (text.empty() ? "" : ", ") + thread->name;
  }
  return text + " would wait forever";
}

std::string Explorer::name_of(size_t offset) const {
  auto at = names_.upper_bound(offset);
  if (at == names_.begin()) return "memory at " + std::to_string(offset);
  --at;
  return offset == at->first ? at->second : at->second + " + " + std::to_string(offset - at->first);
}

std::string Explorer::description() const {
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

}  // namespace model
}  // namespace mpk
