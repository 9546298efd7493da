#include "cpu/sanitizer/report.h"

#include <stdio.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "cpu/sanitizer/boxes.h"

namespace mpk {
namespace sanitizer {
namespace {

struct Tensor {
  std::string name;
  uintptr_t start;
  uint64_t bytes, row_bytes;
  bool symmetric;
};

std::mutex lock;
// By the address of a graph's operands.
std::unordered_map<const mpk_operand*, std::vector<Tensor>>& named() {
  static std::unordered_map<const mpk_operand*, std::vector<Tensor>> all;
  return all;
}

thread_local std::string last;

template <typename... Values> std::string text(const char* format, Values... values) {
  char line[256];
  snprintf(line, sizeof(line), format, values...);
  return line;
}

// The tensors of the graph that contain the address; a plan may give several the same memory.
std::string tensors_at(const mpk_kernel_args* args, uintptr_t at) {
  constexpr uint32_t kMost = 4;
  const mpk_rank* rank = args->rank;
  std::string found;
  uint32_t count = 0;
  std::lock_guard<std::mutex> hold(lock);
  for (const Tensor& tensor : named()[args->graph->operands]) {
    for (uint32_t pe = 0; pe < rank->world; ++pe) {
      const bool own = pe == rank->rank;
      if (!own && (!tensor.symmetric || rank->sym[pe] == nullptr)) continue;
      const uintptr_t start = tensor.start + (own ? 0 : static_cast<uintptr_t>(rank->sym[pe] - rank->sym[rank->rank]));
      if (at < start || at - start >= tensor.bytes || ++count > kMost) continue;
      const uint64_t offset = at - start;
      found += text("%stensor %s%s, row %llu, byte %llu of the row", found.empty() ? "" : ", or ", tensor.name.c_str(),
                    own ? "" : text(" of rank %u", pe).c_str(), static_cast<unsigned long long>(offset / tensor.row_bytes),
                    static_cast<unsigned long long>(offset % tensor.row_bytes));
    }
  }
  if (count > kMost) found += text(", or %u more that share this memory", count - kMost);
  return found;
}

std::string place_of(const Call& call, uintptr_t at) {
  std::string found = tensors_at(call.args, at);
  if (!found.empty()) return found;
  Range range{};
  const Part* part = part_of(call, at, &range);
  if (part == nullptr) return "memory that is neither a tensor's nor the runtime's";
  return text("byte %llu of ", static_cast<unsigned long long>(at - range.start)) + text(part->name, range.number);
}

std::string nearest_operand(const mpk_kernel_args* args, uintptr_t at) {
  std::string near = "the task has no operands";
  uint64_t best = UINT64_MAX;
  const uint32_t operands = args->task->num_inputs + args->task->num_outputs;
  for (uint32_t i = 0; i < operands; ++i) {
    const bool input = i < args->task->num_inputs;
    const uint32_t number = input ? i : i - args->task->num_inputs;
    Box box;
    if (!view_box(input ? args->inputs[number] : args->outputs[number], nullptr, nullptr, 0, &box)) continue;
    const uint64_t distance = at < box.start ? box.start - at : at >= box.end ? at - box.end : 0;
    if (distance >= best) continue;
    best = distance;
    near = text("nearest operand: %s %u, which begins %lld bytes before and is %llu bytes from end to end", input ? "input" : "output",
                number, static_cast<long long>(at - box.start), static_cast<unsigned long long>(box.end - box.start));
  }
  return near;
}

void print(const char* type, const Call& call, const std::string& what) {
  const mpk_kernel_args* args = call.args;
  const int32_t* constants = args->task->args;
  last = text("region sanitizer: rank %u, worker %u: %s task %u (operator %u, arguments %d %d %d) ", args->rank->rank, args->worker, type,
              args->task_index, args->task->op, constants[0], constants[1], constants[2]) +
         what;
  fprintf(stderr, "%s\n", last.c_str());
}

} // namespace

void report_access(const char* type, const Call& call, uintptr_t at, uint64_t bytes, bool write, const char* why) {
  print(type, call,
        text("%s %llu bytes at 0x%llx %s: ", write ? "writes" : "reads", static_cast<unsigned long long>(bytes),
             static_cast<unsigned long long>(at), why) +
            place_of(call, at) + "; " + nearest_operand(call.args, at));
}

void report_batch(const char* type, const Call& call, const char* what) { print(type, call, what); }

} // namespace sanitizer
} // namespace mpk

// Names a tensor of the graph whose operands are at `operands`.
extern "C" void mpk_sanitizer_name(const mpk_operand* operands, const char* name, uint64_t start, uint64_t bytes, uint64_t row_bytes,
                                   uint32_t symmetric) {
  using namespace mpk::sanitizer;
  std::lock_guard<std::mutex> hold(lock);
  named()[operands].push_back({name, static_cast<uintptr_t>(start), bytes, row_bytes == 0 ? 1 : row_bytes, symmetric != 0});
}

// Forgets the names of the tensors of this graph.
extern "C" void mpk_sanitizer_forget_names(const mpk_operand* operands) {
  using namespace mpk::sanitizer;
  std::lock_guard<std::mutex> hold(lock);
  named().erase(operands);
}

// The last report of the calling thread; empty if there was none.
extern "C" const char* mpk_sanitizer_report(void) { return mpk::sanitizer::last.c_str(); }
