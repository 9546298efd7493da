/* Small worlds: ranks with just what a check needs. Everything is in the checker's
 * memory. */
#ifndef MPK_MODEL_WORLD_H
#define MPK_MODEL_WORLD_H

#include <stdlib.h>

#include "event.h"
#include "platform/platform.h"

namespace mpk {
namespace model {

/* MPK_MODEL_LONG: larger sizes, which take longer than the seconds that CI has. */
inline bool long_run() {
  static const bool value = getenv("MPK_MODEL_LONG") != nullptr;
  return value;
}

/* A check that registers itself. */
class Registered : public Check {
 public:
  explicit Registered(const char* check) : Check(check) { checks().push_back(this); }
};

/* `world` ranks, each with `heap_bytes` of symmetric heap after its control block. */
inline mpk_rank* make_ranks(uint32_t world, size_t heap_bytes) {
  mpk_rank* ranks = make<mpk_rank>(world);
  uint8_t** bases = make<uint8_t*>(world);
  for (uint32_t r = 0; r < world; ++r) {
    bases[r] = reinterpret_cast<uint8_t*>(make<uint64_t>((sizeof(mpk_control) + heap_bytes) / 8));
    whole_word(bases[r]); /* abort and abort_rank */
    mpk_rank& rank = ranks[r];
    rank.abi_version = MPK_ABI_VERSION;
    rank.rank = r;
    rank.world = world;
    rank.deadline_ns = 1000;
    rank.sym = bases;
    rank.control = reinterpret_cast<mpk_control*>(bases[r]);
    rank.signals = MPK_SIGNALS_DIRECT;
    label(bases[r], "abort of rank", static_cast<int>(r));
    label(&rank.control->progress, "progress of rank", static_cast<int>(r));
    label(&rank.control->iteration, "publication of rank", static_cast<int>(r));
    label(&rank.control->running, "running of rank", static_cast<int>(r));
  }
  return ranks;
}

/* The memory after the control block. */
template <typename T>
T* heap(const mpk_rank& rank) {
  return reinterpret_cast<T*>(rank.control + 1);
}

/* Queues with one producer each, or with all workers as producers. */
inline mpk_queue* make_queues(uint32_t count, uint64_t capacity, const char* text) {
  mpk_queue* queues = make<mpk_queue>(count);
  for (uint32_t q = 0; q < count; ++q) {
    queues[q].slots = make<uint64_t>(capacity);
    queues[q].mask = capacity - 1;
    label(&queues[q], text, static_cast<int>(q));
    label(queues[q].slots, text, static_cast<int>(q));
  }
  return queues;
}

/* Waits as all loops of the protocol do; false if the rank is aborted. */
template <typename Test>
bool wait_until(const mpk_rank* rank, const Test& test) {
  Wait wait(rank, nullptr);
  while (!test())
    if (wait.poll(0) != MPK_OK) return false;
  return true;
}

}  // namespace model
}  // namespace mpk

#endif
