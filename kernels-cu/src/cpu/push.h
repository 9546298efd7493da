// Pushing flagged words (MPK_F32_FLAGGED) to every rank.
#pragma once

#include "mpk/abi.h"

#include <cstring>

namespace mpk {

// Stores `values` at `address` of this rank's symmetric heap, and at the same offset at every other rank, each
// with the tag of the write in the upper half of its word. A word carries its own flag, so its store needs no
// order with others.
static inline void push_flagged(const mpk_kernel_args* args, uint64_t address, const float* values, uint32_t n) {
  const mpk_rank* rank = args->rank;
  const uint64_t offset = address - reinterpret_cast<uint64_t>(rank->sym[rank->rank]);
  const uint64_t tag = static_cast<uint64_t>(MPK_FLAG_TAG(*args->task, args->batch->epoch)) << 32;
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    uint64_t* words = reinterpret_cast<uint64_t*>(rank->sym[pe] + offset);
    for (uint32_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, 4);
      __atomic_store_n(words + i, tag | bits, __ATOMIC_RELAXED);
    }
  }
}

} // namespace mpk
