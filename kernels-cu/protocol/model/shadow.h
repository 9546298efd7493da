/* The world's memory, and which threads have accessed it: finds data races with vector clocks. */
#ifndef MPK_MODEL_SHADOW_H
#define MPK_MODEL_SHADOW_H

#include <stddef.h>
#include <stdint.h>

#include "model/graph.h"

namespace mpk {
namespace model {

constexpr size_t kArenaBytes = 128 * 1024;
extern uint8_t g_arena[kArenaBytes];

inline bool in_arena(const void* address) {
  return static_cast<size_t>(static_cast<const uint8_t*>(address) - g_arena) < kArenaBytes;
}

enum class Access { kPlainRead, kPlainWrite, kAtomicRead, kAtomicWrite };

/* Forgets all accesses. */
void shadow_reset();
/* Records an access by `thread`, which knows `hb` and has done `events` atomic events before. Returns the thread
 * that raced with it, or -1. */
int shadow_access(const void* address, size_t bytes, Access access, uint8_t thread, uint32_t events, const Clock& hb);

/* A plain access in a thread of the world; the compiler's instrumentation calls this. */
void plain_access(const void* address, size_t bytes, bool write);

}  // namespace model
}  // namespace mpk

#endif
