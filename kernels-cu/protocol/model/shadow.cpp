#include "model/shadow.h"

#include <string.h>

#include <vector>

namespace mpk {
namespace model {

alignas(64) uint8_t g_arena[kArenaBytes];

namespace {

/* Four bytes of memory. A time is 1 + the number of atomic events that the thread had done; 0: never. */
struct Cell {
  bool touched;
  uint8_t writer;
  uint16_t written;
  uint32_t reads, atomic_reads, atomic_writes; /* bit sets of threads */
  uint16_t read[kMaxThreads], atomic_read[kMaxThreads], atomic_written[kMaxThreads];
};

Cell g_cells[kArenaBytes / 4];
std::vector<uint32_t> g_touched;

/* A thread among `threads`, other than `self`, whose access at `times` does not happen before `hb`; -1 if there
 * is none. */
int unordered(uint32_t threads, const uint16_t* times, uint8_t self, const Clock& hb) {
  for (threads &= ~(1u << self); threads != 0; threads &= threads - 1) {
    const int other = __builtin_ctz(threads);
    if (hb.known[other] < times[other]) return other;
  }
  return -1;
}

}  // namespace

void shadow_reset() {
  for (uint32_t cell : g_touched) memset(&g_cells[cell], 0, sizeof(Cell));
  g_touched.clear();
}

int shadow_access(const void* address, size_t bytes, Access access, uint8_t thread, uint32_t events, const Clock& hb) {
  const size_t first = static_cast<size_t>(static_cast<const uint8_t*>(address) - g_arena);
  const uint16_t now = static_cast<uint16_t>(events + 1);
  for (size_t at = first / 4; at < (first + bytes + 3) / 4; ++at) {
    Cell& cell = g_cells[at];
    if (!cell.touched) {
      cell.touched = true;
      g_touched.push_back(static_cast<uint32_t>(at));
    }
    if (cell.written != 0 && cell.writer != thread && hb.known[cell.writer] < cell.written) return cell.writer;
    int racing = -1;
    switch (access) {
      case Access::kPlainRead:
        racing = unordered(cell.atomic_writes, cell.atomic_written, thread, hb);
        cell.reads |= 1u << thread;
        cell.read[thread] = now;
        break;
      case Access::kPlainWrite:
        racing = unordered(cell.atomic_writes, cell.atomic_written, thread, hb);
        if (racing < 0) racing = unordered(cell.atomic_reads, cell.atomic_read, thread, hb);
        if (racing < 0) racing = unordered(cell.reads, cell.read, thread, hb);
        cell.reads = 0;
        cell.writer = thread;
        cell.written = now;
        break;
      case Access::kAtomicRead:
        cell.atomic_reads |= 1u << thread;
        cell.atomic_read[thread] = now;
        break;
      case Access::kAtomicWrite:
        racing = unordered(cell.reads, cell.read, thread, hb);
        cell.atomic_writes |= 1u << thread;
        cell.atomic_written[thread] = now;
        break;
    }
    if (racing >= 0) return racing;
  }
  return -1;
}

}  // namespace model
}  // namespace mpk

/* The calls that the compiler makes with -fsanitize=thread; its own library is not linked. */
extern "C" {
#define MODEL_HOOK(bytes)                                                                                     \
  void __tsan_read##bytes(void* p) { mpk::model::plain_access(p, bytes, false); }                             \
  void __tsan_write##bytes(void* p) { mpk::model::plain_access(p, bytes, true); }                             \
  void __tsan_unaligned_read##bytes(void* p) { mpk::model::plain_access(p, bytes, false); }                   \
  void __tsan_unaligned_write##bytes(void* p) { mpk::model::plain_access(p, bytes, true); }                   \
  void __tsan_volatile_read##bytes(void* p) { mpk::model::plain_access(p, bytes, false); }                    \
  void __tsan_volatile_write##bytes(void* p) { mpk::model::plain_access(p, bytes, true); }
MODEL_HOOK(1)
MODEL_HOOK(2)
MODEL_HOOK(4)
MODEL_HOOK(8)
MODEL_HOOK(16)
void __tsan_read_range(void* p, unsigned long bytes) { mpk::model::plain_access(p, bytes, false); }
void __tsan_write_range(void* p, unsigned long bytes) { mpk::model::plain_access(p, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
