// The region sanitizer: compares the reads and writes of a task's kernel with those that the task declared.
//
// The kernels are compiled a second time with gcc's or clang's kernel address sanitizer, which calls a function
// before each load and store (build.sh). Here these functions compare the address with the boxes of bytes of the
// task's operands (operands.cpp) and with the list of other memory that a task may access (parts.cpp). Every other
// access is reported before it happens, and never happens: the task ends at once.
//
// A store must be in an output, or in an input that is declared as written in place. A load must be in an input,
// or in bytes of an output that the task itself has written.
#include <setjmp.h>
#include <string.h>

#include <unordered_map>

#include "cpu/sanitizer/operands.h"
#include "cpu/sanitizer/parts.h"
#include "cpu/sanitizer/report.h"

namespace mpk {
namespace sanitizer {
namespace {

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
  Call call{};
  std::vector<Box> boxes;
  std::vector<Range> permitted;
  // What the task has written: one bit per byte, in groups of 64 bytes.
  std::unordered_map<uintptr_t, uint64_t> written;
  // The last group used, because accesses go along rows.
  uintptr_t line = 0;
  uint64_t* bits = nullptr;
  Known<8> inputs, outputs;
  // Permitted ranges: those that may be written, and the others.
  Known<4> own, shared;
  jmp_buf refused;
};

// Read at each access, so it must be found without a call, also in a library that is loaded late.
__attribute__((tls_model("initial-exec"))) thread_local Task* current = nullptr;

// Ends the task before the access.
[[noreturn]] void refuse(Task* task, uintptr_t at, uint64_t bytes, bool write, const char* why) {
  report_access(task->type, task->call, at, bytes, write, why);
  longjmp(task->refused, 1);
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

// Number of permitted bytes from `at` on; 0: none.
uint64_t permitted(Task* task, uintptr_t at, bool write) {
  for (const Range& range : task->permitted) {
    if (at < range.start || at >= range.end || (write && !range.write)) continue;
    if (range.write) task->own.add(range.start, range.end);
    else task->shared.add(range.start, range.end);
    return range.end - at;
  }
  return 0;
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
      covered = std::min(permitted(task, next, write), rest);
      if (covered == 0) refuse(task, next, rest, write, "that it did not declare");
    } else {
      // Only what has been written of an output is known: a read of the same bytes may belong to an input.
      if (write) task->outputs.add(next - before, next + covered);
      else if (!by->write) task->inputs.add(next - before, next + covered);
      covered = std::min(covered, rest);
      if (by->write && !mark(task, next, covered, write))
        refuse(task, next, covered, false, "of an output that it has not written");
    }
    next += covered;
    rest -= covered;
  }
  current = task;
}

inline void check(uintptr_t at, uint64_t bytes, bool write) {
  Task* task = current;
  if (task == nullptr || bytes == 0) return;
  if (task->own.has(at, bytes)) return;
  if (!write) {
    if (task->inputs.has(at, bytes) || task->shared.has(at, bytes)) return;
  } else if (task->outputs.has(at, bytes)) {
    current = nullptr; // a new group allocates memory, which a checked memset clears
    mark(task, at, bytes, true);
    current = task;
    return;
  }
  look_up(task, at, bytes, write);
}

// Prepares the checks of a call; false if the batch breaks an assumption.
bool prepare(Task* task, const char* type, const Call& call) {
  const mpk_kernel_args* args = call.args;
  // Otherwise the first task that asks for the instruction level would read the environment.
  static const int32_t level = mpk_cpu_isa();
  (void)level;
  task->type = type;
  task->call = call;
  task->boxes.clear();
  task->permitted.clear();
  // Clearing takes as long as for the largest task so far, so a large map is dropped instead.
  if (task->written.bucket_count() > 1024) task->written = {};
  else task->written.clear();
  task->bits = nullptr;
  task->inputs.clear();
  task->outputs.clear();
  task->own.clear();
  task->shared.clear();
  add_permitted(call, &task->permitted);
  bool sound = true;
  for (uint32_t i = 0; i < args->task->num_inputs; ++i) sound &= add_operand(args, args->inputs[i], false, &task->boxes);
  for (uint32_t i = 0; i < args->task->num_outputs; ++i) sound &= add_operand(args, args->outputs[i], true, &task->boxes);
  if (!sound) report_batch(type, call, "finds a row of the batch that belongs to two slots");
  return sound;
}

// Calls `kernel`; `refused` if it is about to access something that the task did not declare.
__attribute__((noinline)) int call_checked(const char* type, mpk_kernel_fn kernel, const mpk_kernel_args* args, int refused) {
  static thread_local Task task;
  if (!prepare(&task, type, {args, reinterpret_cast<uintptr_t>(__builtin_frame_address(0))})) return refused;
  if (setjmp(task.refused) != 0) return refused;
  current = &task;
  const int code = kernel(args);
  current = nullptr;
  return code;
}

// The test of a task's flagged words was refused on this thread.
thread_local bool refused_test = false;

} // namespace

// Runs `kernel`; MPK_ABORT_KERNEL if it is about to access something that the task did not declare.
int checked(const char* type, mpk_kernel_fn kernel, const mpk_kernel_args* args) {
  if (refused_test) {
    refused_test = false;
    return MPK_ABORT_KERNEL;
  }
  return call_checked(type, kernel, args, MPK_ABORT_KERNEL);
}

// The same for the test whether all flagged words have arrived. It cannot fail, so it says yes, and the task fails.
int checked_test(const char* type, mpk_kernel_fn kernel, const mpk_kernel_args* args) {
  const int ready = call_checked(type, kernel, args, -1);
  if (ready >= 0) return ready;
  refused_test = true;
  return 1;
}

} // namespace sanitizer
} // namespace mpk

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
