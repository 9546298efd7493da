// The region sanitizer: compares the reads and writes of a task's kernel with those that the task declared.
//
// The kernels are compiled a second time with gcc's or clang's kernel address sanitizer, which calls a function
// before each load and store (build.sh). Here these functions compare the address with the boxes of bytes of the
// task's operands. Memory that no operand of the graph names (stacks, scratch, parameters) is not checked.
//
// A store must be in an output, or in an input that is declared as written in place. A load must be in an input,
// or in bytes of an output that the task itself has written.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/task.h"

namespace mpk {
namespace sanitizer {
namespace {

enum Trust : uint32_t { ROWS_OF_SLOT = 0, PAGES_OF_SLOT = 1 };

// An operand whose bytes are known only at run time; `lo` and `hi` count from the view's first element.
struct Declared {
  uint32_t trust, slot;
  uint32_t lo[MPK_MAX_DIMS], hi[MPK_MAX_DIMS];
};

using Interval = std::pair<uintptr_t, uintptr_t>;

std::shared_mutex lock;
std::unordered_map<const mpk_operand*, Declared>& declared() {
  static std::unordered_map<const mpk_operand*, Declared> all;
  return all;
}
std::unordered_map<const mpk_operand*, std::shared_ptr<const std::vector<Interval>>>& tracked() {
  static std::unordered_map<const mpk_operand*, std::shared_ptr<const std::vector<Interval>>> all;
  return all;
}

// Runs of `run` bytes, one at every index of up to four dimensions, widest stride first.
struct Box {
  uintptr_t start = 0, end = 0;
  uint64_t run = 0;
  uint32_t dims = 0;
  uint64_t count[MPK_MAX_DIMS], stride[MPK_MAX_DIMS];
  bool write = false;
  // For the pages of a slot: its page table, the number of its pages, and the plane within a page.
  const int32_t* pages = nullptr;
  uint32_t num_pages = 0, planes = 0, plane = 0;

  // Number of adjacent bytes of the box from `at` on, and before it; 0: `at` is not in the box.
  uint64_t from(uintptr_t at, uint64_t* before) const {
    if (at < start || at >= end) return 0;
    uint64_t rest = at - start;
    if (pages != nullptr) {
      const uint64_t page = rest / stride[0];
      rest %= stride[0];
      const uint64_t in_page = rest / stride[1];
      rest %= stride[1];
      if (in_page % (planes / 2) != plane) return 0;
      *before = rest;
      for (uint32_t i = 0; i < num_pages; ++i)
        if (pages[i] >= 0 && static_cast<uint64_t>(pages[i]) == page) return stride[1] - rest;
      return 0;
    }
    for (uint32_t d = 0; d < dims; ++d) {
      const uint64_t index = rest / stride[d];
      if (index >= count[d]) return 0;
      rest -= index * stride[d];
    }
    *before = rest;
    return rest < run ? run - rest : 0;
  }
};

// Ranges of bytes that were looked up recently. Kernels read a few streams in parallel.
template <uint32_t N> struct Known {
  uintptr_t first[N], end[N];
  uint32_t next = 0;

  void clear() { std::fill(first, first + N, UINTPTR_MAX), std::fill(end, end + N, 0); }
  bool has(uintptr_t at, uint64_t bytes) const {
    for (uint32_t i = 0; i < N; ++i)
      if (at >= first[i] && at + bytes <= end[i]) return true;
    return false;
  }
  void add(uintptr_t from, uintptr_t to) {
    first[next] = from;
    end[next] = to;
    next = (next + 1) % N;
  }
};

struct Task {
  const char* type = nullptr;
  const mpk_kernel_args* args = nullptr;
  std::vector<Box> boxes;
  std::shared_ptr<const std::vector<Interval>> memory;
  // What the task has written: one bit per byte, in groups of 64 bytes.
  std::unordered_map<uintptr_t, uint64_t> written;
  // The last group used, because accesses go along rows.
  uintptr_t line = 0;
  uint64_t* bits = nullptr;
  Known<8> inputs, outputs;
  // Addresses that hold nothing of the graph.
  Known<4> elsewhere;
  bool failed = false;
};

// Read at each access, so it must be found without a call, also in a library that is loaded late.
__attribute__((tls_model("initial-exec"))) thread_local Task* current = nullptr;

bool view_box(const mpk_operand& o, const uint32_t* lo, const uint32_t* hi, int64_t shift, Box* box) {
  const uint64_t bytes = element_bytes(o.dtype);
  box->start = static_cast<uintptr_t>(o.addr) + static_cast<uintptr_t>(shift);
  box->dims = 0;
  box->run = bytes;
  if (o.layout == MPK_LAYOUT_TILED) {
    const uint64_t rows = (o.dims[0] + MPK_TILE_ROWS - 1) / MPK_TILE_ROWS * MPK_TILE_ROWS;
    box->run = rows * o.strides[0] * bytes;
    box->end = box->start + box->run;
    return box->run > 0;
  }
  struct Dim {
    uint64_t count, stride;
  } dims[MPK_MAX_DIMS];
  uint32_t n = 0;
  for (uint32_t d = 0; d < o.ndim; ++d) {
    const uint32_t first = lo != nullptr ? lo[d] : 0, last = hi != nullptr ? hi[d] : o.dims[d];
    if (first >= last) return false;
    box->start += uint64_t{first} * o.strides[d] * bytes;
    if (last - first > 1) dims[n++] = {last - first, o.strides[d] * bytes};
  }
  std::sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  while (n > 0 && dims[n - 1].stride == box->run) box->run *= dims[--n].count;
  box->end = box->start + box->run;
  box->dims = n;
  for (uint32_t d = 0; d < n; ++d) {
    box->count[d] = dims[d].count;
    box->stride[d] = dims[d].stride;
    box->end += (dims[d].count - 1) * dims[d].stride;
  }
  return true;
}

void add_operand(Task* task, const mpk_operand& o, bool write) {
  const mpk_kernel_args* args = task->args;
  const mpk_batch* batch = args->batch;
  Box box;
  box.write = write;
  const Declared* trust = nullptr;
  {
    std::shared_lock<std::shared_mutex> hold(lock);
    const auto found = declared().find(&o);
    if (found != declared().end()) trust = &found->second;
  }
  if (trust != nullptr && trust->slot >= batch->num_active) return; // the slot is not active: nothing may be accessed
  if (trust != nullptr && trust->trust == PAGES_OF_SLOT) {
    if (!view_box(o, nullptr, nullptr, 0, &box)) return;
    const mpk_batch_config* config = args->rank->batch_config;
    const uint64_t bytes = element_bytes(o.dtype);
    const uint32_t slot = static_cast<uint32_t>(batch->active_slot[trust->slot]);
    const uint32_t tokens = static_cast<uint32_t>(batch->active_context[trust->slot] + batch->active_num_rows[trust->slot]);
    box.pages = batch->page_table + uint64_t{slot} * config->pages_per_slot;
    box.num_pages = std::min((tokens + config->page_size - 1) / config->page_size, config->pages_per_slot);
    if (write) {
      // Pages before the new tokens are full, and may be shared with other slots.
      const uint32_t full = std::min(static_cast<uint32_t>(batch->active_context[trust->slot]) / config->page_size, box.num_pages);
      box.pages += full;
      box.num_pages -= full;
    }
    box.planes = o.dims[1];
    box.plane = trust->lo[1];
    box.stride[0] = o.strides[0] * bytes;
    box.stride[1] = o.strides[1] * bytes;
    task->boxes.push_back(box);
    return;
  }
  if (trust != nullptr) {
    uint32_t lo[MPK_MAX_DIMS], hi[MPK_MAX_DIMS];
    memcpy(lo, trust->lo, sizeof(lo));
    memcpy(hi, trust->hi, sizeof(hi));
    lo[0] = static_cast<uint32_t>(batch->active_first_row[trust->slot]);
    hi[0] = lo[0] + static_cast<uint32_t>(batch->active_num_rows[trust->slot]);
    // The invariant: no row belongs to two slots.
    for (uint32_t a = 0; a + 1 < batch->num_active; ++a)
      if (batch->active_first_row[a] + batch->active_num_rows[a] > batch->active_first_row[a + 1]) task->failed = true;
    if (view_box(o, lo, hi, 0, &box)) task->boxes.push_back(box);
    return;
  }
  const mpk_rank* rank = args->rank;
  // From this rank's memory to the other rank's; no shift if there is no other rank, or it is out of reach.
  const auto shift = [&](uint32_t pe) {
    const bool other = rank->world > 1 && pe < rank->world && rank->sym[pe] != nullptr;
    return other ? static_cast<int64_t>(rank->sym[pe] - rank->sym[rank->rank]) : 0;
  };
  if (o.pe == -2) {
    for (uint32_t pe = 0; pe < rank->world; ++pe)
      if (view_box(o, nullptr, nullptr, shift(pe), &box)) task->boxes.push_back(box);
  } else if (view_box(o, nullptr, nullptr, o.pe >= 0 ? shift(static_cast<uint32_t>(o.pe)) : 0, &box)) {
    task->boxes.push_back(box);
  }
}

// The memory that operands of the graph name, on every rank within reach.
std::shared_ptr<const std::vector<Interval>> memory_of(const mpk_kernel_args* args) {
  const mpk_graph* graph = args->graph;
  const mpk_operand* first = graph->num_operands > 0 ? graph->operands : args->inputs;
  const uint64_t count = graph->num_operands > 0 ? graph->num_operands : 0;
  if (count > 0) {
    std::shared_lock<std::shared_mutex> hold(lock);
    const auto found = tracked().find(first);
    if (found != tracked().end()) return found->second;
  }
  auto all = std::make_shared<std::vector<Interval>>();
  const mpk_rank* rank = args->rank;
  const auto add = [&](const mpk_operand& o) {
    Box box;
    if (!view_box(o, nullptr, nullptr, 0, &box)) return;
    all->emplace_back(box.start, box.end);
    for (uint32_t pe = 0; o.symmetric != 0 && rank->world > 1 && pe < rank->world; ++pe) {
      if (rank->sym[pe] == nullptr) continue;
      const auto shift = static_cast<uintptr_t>(rank->sym[pe] - rank->sym[rank->rank]);
      all->emplace_back(box.start + shift, box.end + shift);
    }
  };
  for (uint64_t i = 0; i < count; ++i) add(first[i]);
  if (count == 0) { // a single hand-made task
    for (uint32_t i = 0; i < args->task->num_inputs; ++i) add(args->inputs[i]);
    for (uint32_t i = 0; i < args->task->num_outputs; ++i) add(args->outputs[i]);
  }
  std::sort(all->begin(), all->end());
  size_t kept = 0;
  for (const Interval& next : *all) {
    if (kept > 0 && next.first <= (*all)[kept - 1].second)
      (*all)[kept - 1].second = std::max((*all)[kept - 1].second, next.second);
    else
      (*all)[kept++] = next;
  }
  all->resize(kept);
  if (count > 0) {
    std::unique_lock<std::shared_mutex> hold(lock);
    tracked()[first] = all;
  }
  return all;
}

bool is_tracked(const Task& task, uintptr_t at) {
  const auto after = std::upper_bound(task.memory->begin(), task.memory->end(), Interval{at, UINTPTR_MAX});
  return after != task.memory->begin() && at < std::prev(after)->second;
}

// Remembers the addresses around an untracked one, up to the next tracked ones. All boxes are in tracked memory.
void note_elsewhere(Task* task, uintptr_t at) {
  const auto after = std::upper_bound(task->memory->begin(), task->memory->end(), Interval{at, UINTPTR_MAX});
  const uintptr_t from = after == task->memory->begin() ? 0 : std::prev(after)->second;
  task->elsewhere.add(from, after == task->memory->end() ? UINTPTR_MAX : after->first);
}

// Marks bytes of outputs as written; for a read, returns whether all of them were.
bool mark(Task* task, uintptr_t at, uint64_t bytes, bool write) {
  bool all = true;
  for (uint64_t i = 0; i < bytes;) {
    const uintptr_t line = (at + i) / 64;
    const uint64_t offset = (at + i) % 64, n = std::min<uint64_t>(64 - offset, bytes - i);
    const uint64_t mask = (n == 64 ? ~0ull : (1ull << n) - 1) << offset;
    if (task->bits == nullptr || task->line != line) {
      task->bits = &task->written[line];
      task->line = line;
    }
    if (write) *task->bits |= mask;
    else all &= (*task->bits & mask) == mask;
    i += n;
  }
  return all;
}

void report(Task* task, uintptr_t at, uint64_t bytes, bool write, const char* why) {
  if (task->failed) return;
  task->failed = true;
  const mpk_kernel_args* args = task->args;
  char near[160] = "no operand of this task is near";
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
    snprintf(near, sizeof(near), "%s %u begins %lld bytes before and is %llu bytes from end to end",
             input ? "input" : "output", number, static_cast<long long>(at - box.start),
             static_cast<unsigned long long>(box.end - box.start));
  }
  fprintf(stderr,
          "region sanitizer: rank %u: %s task %u (operator %u, arguments %d %d %d) %s %llu bytes %s; %s\n",
          args->rank->rank, task->type, args->task_index, args->task->op, args->task->args[0], args->task->args[1],
          args->task->args[2], write ? "writes" : "reads", static_cast<unsigned long long>(bytes), why, near);
}

// An access that none of the known ranges covers.
__attribute__((noinline)) void look_up(Task* task, uintptr_t at, uint64_t bytes, bool write) {
  current = nullptr; // the code below is not checked itself
  uintptr_t next = at;
  uint64_t rest = bytes;
  while (rest > 0) {
    uint64_t covered = 0, before = 0;
    const Box* by = nullptr;
    for (const Box& box : task->boxes) {
      if (write && !box.write) continue;
      uint64_t start = 0;
      const uint64_t here = box.from(next, &start);
      // An input first: an output may be read only where it has been written.
      if (here > 0 && (by == nullptr || (by->write && !box.write))) {
        covered = here;
        before = start;
        by = &box;
      }
    }
    if (by == nullptr) {
      if (is_tracked(*task, next)) report(task, next, rest, write, "that it did not declare");
      else note_elsewhere(task, next);
      break;
    }
    // Only what has been written of an output is known: a read of the same bytes may belong to an input.
    if (write) task->outputs.add(next - before, next + covered);
    else if (!by->write) task->inputs.add(next - before, next + covered);
    covered = std::min(covered, rest);
    if (by->write && !mark(task, next, covered, write))
      report(task, next, covered, false, "of an output that it has not written");
    next += covered;
    rest -= covered;
  }
  current = task;
}

inline void check(uintptr_t at, uint64_t bytes, bool write) {
  Task* task = current;
  if (task == nullptr || bytes == 0) return;
  if (task->elsewhere.has(at, bytes)) return;
  if (!write) {
    if (task->inputs.has(at, bytes)) return;
  } else if (task->outputs.has(at, bytes)) {
    current = nullptr; // a new group allocates memory, which a checked memset clears
    mark(task, at, bytes, true);
    current = task;
    return;
  }
  look_up(task, at, bytes, write);
}

} // namespace

// Runs `kernel`; MPK_ABORT_KERNEL if it accessed something that the task did not declare.
int checked(const char* type, mpk_kernel_fn kernel, const mpk_kernel_args* args) {
  static thread_local Task task;
  task.type = type;
  task.args = args;
  task.failed = false;
  task.boxes.clear();
  // Clearing takes as long as for the largest task so far, so a large map is dropped instead.
  if (task.written.bucket_count() > 1024) task.written = {};
  else task.written.clear();
  task.bits = nullptr;
  task.inputs.clear();
  task.outputs.clear();
  task.elsewhere.clear();
  task.memory = memory_of(args);
  for (uint32_t i = 0; i < args->task->num_inputs; ++i) add_operand(&task, args->inputs[i], false);
  for (uint32_t i = 0; i < args->task->num_outputs; ++i) add_operand(&task, args->outputs[i], true);
  current = &task;
  const int code = kernel(args);
  current = nullptr;
  return task.failed ? MPK_ABORT_KERNEL : code;
}

} // namespace sanitizer
} // namespace mpk

// Declares before the run what an operand stands for: `slot` is the active slot, and the box counts from the view's
// start.
extern "C" void mpk_sanitizer_declare(const mpk_operand* operand, uint32_t trust, uint32_t slot, const uint32_t* lo,
                                      const uint32_t* hi) {
  using namespace mpk::sanitizer;
  Declared entry{trust, slot, {}, {}};
  memcpy(entry.lo, lo, sizeof(entry.lo));
  memcpy(entry.hi, hi, sizeof(entry.hi));
  std::unique_lock<std::shared_mutex> hold(lock);
  declared()[operand] = entry;
}

// Forgets the declarations of the `count` operands at this address.
extern "C" void mpk_sanitizer_forget(const mpk_operand* operands, uint64_t count) {
  using namespace mpk::sanitizer;
  std::unique_lock<std::shared_mutex> hold(lock);
  tracked().erase(operands);
  if (declared().empty()) return;
  for (uint64_t i = 0; i < count; ++i) declared().erase(operands + i);
}

// Called by the compiler before each access, and by the linker in place of functions that access many bytes.
extern "C" {
#define MPK_ACCESS(size)                                                                       \
  void __asan_load##size##_noabort(uintptr_t at) { mpk::sanitizer::check(at, size, false); }   \
  void __asan_store##size##_noabort(uintptr_t at) { mpk::sanitizer::check(at, size, true); }
MPK_ACCESS(1)
MPK_ACCESS(2)
MPK_ACCESS(4)
MPK_ACCESS(8)
MPK_ACCESS(16)
void __asan_loadN_noabort(uintptr_t at, uint64_t size) { mpk::sanitizer::check(at, size, false); }
void __asan_storeN_noabort(uintptr_t at, uint64_t size) { mpk::sanitizer::check(at, size, true); }
void __asan_handle_no_return(void) {}

void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
void* __wrap_memcpy(void* to, const void* from, size_t size) {
  mpk::sanitizer::check(reinterpret_cast<uintptr_t>(from), size, false);
  mpk::sanitizer::check(reinterpret_cast<uintptr_t>(to), size, true);
  return __real_memcpy(to, from, size);
}
void* __wrap_memmove(void* to, const void* from, size_t size) {
  mpk::sanitizer::check(reinterpret_cast<uintptr_t>(from), size, false);
  mpk::sanitizer::check(reinterpret_cast<uintptr_t>(to), size, true);
  return __real_memmove(to, from, size);
}
void* __wrap_memset(void* to, int value, size_t size) {
  mpk::sanitizer::check(reinterpret_cast<uintptr_t>(to), size, true);
  return __real_memset(to, value, size);
}
}
