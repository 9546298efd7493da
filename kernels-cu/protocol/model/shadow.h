/* The world's memory, and who has touched which of it: finds data races by vector clocks. */
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

/* Forgets all. */
void shadow_reset();
/* Notes an access by `thread`, which knows `hb` and has done `events` atomic ones before. The thread that raced with it, or -1. */
int shadow_access(const void* address, size_t bytes, Access access, uint8_t thread, uint32_t events, const Clock& hb);

/* Of a plain access in a thread of the world: called by the compiler's instrumentation. */
void plain_access(const void* address, size_t bytes, bool write);

}  // namespace model
}  // namespace mpk

#endif
