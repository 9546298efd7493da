// Pushing flagged words (MPK_F32_FLAGGED) to every rank.
#pragma once

#include "mpk/abi.h"

#include <cstring>

// For a rank whose memory stores cannot reach. Compiled once, because this header is included at every instruction
// level.
extern "C" bool mpk_push_words(const mpk_rank* rank, uint32_t pe, uint64_t* words, const uint64_t* values, uint32_t count);

// Puts `bytes` bytes and then adds to a signal, at any other rank. For measurements.
extern "C" bool mpk_put_with_signal(const mpk_rank* rank, uint32_t pe, void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value);

namespace mpk {

// Stores `values` at `address` of this rank's symmetric heap and at the same offset on every other rank, each
// with the tag of the write in the upper half of its word. A word carries its own flag, so its store needs no
// order with others. False if a rank is out of reach.
static inline bool push_flagged(const mpk_kernel_args* args, uint64_t address, const float* values, uint32_t n) {
  constexpr uint32_t kMost = 256;
  const mpk_rank* rank = args->rank;
  const uint64_t offset = address - reinterpret_cast<uint64_t>(rank->sym[rank->rank]);
  const uint64_t tag = static_cast<uint64_t>(MPK_FLAG_TAG(*args->task, args->batch->epoch)) << 32;
  bool reached = true;
  for (uint32_t first = 0; first < n; first += kMost) {
    const uint32_t count = n - first < kMost ? n - first : kMost;
    uint64_t values_with_tag[kMost];
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + first + i, 4);
      values_with_tag[i] = tag | bits;
    }
    for (uint32_t pe = 0; pe < rank->world; ++pe) {
      if (rank->sym[pe] == nullptr) {
        reached = mpk_push_words(rank, pe, reinterpret_cast<uint64_t*>(address) + first, values_with_tag, count) && reached;
        continue;
      }
      uint64_t* words = reinterpret_cast<uint64_t*>(rank->sym[pe] + offset) + first;
      for (uint32_t i = 0; i < count; ++i) __atomic_store_n(words + i, values_with_tag[i], __ATOMIC_RELAXED);
    }
  }
  return reached;
}

} // namespace mpk
