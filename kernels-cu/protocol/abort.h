/* The abort word: a rank that fails tells every rank, and every wait checks it. */
#ifndef MPK_PROTOCOL_ABORT_H
#define MPK_PROTOCOL_ABORT_H

#include "platform/platform.h"

namespace mpk {

static_assert(offsetof(mpk_control, abort) == 0 && offsetof(mpk_control, abort_rank) == 4,
              "abort and abort_rank are exchanged as one 64-bit word");

/* The abort code in force at this rank; MPK_OK if there is none. Relaxed, pairs with the exchange in
 * set_abort: it publishes no data, it only makes loops end. */
MPK_DEVICE int abort_code(const mpk_rank* rank) {
  return static_cast<int>(platform::load<platform::Scope::kSystem>(&rank->control->abort, platform::kRelaxed));
}

/* Sets one rank's abort word unless it is set: the first cause stays. One exchange writes code and origin, so no thread
 * sees a code without its origin. */
MPK_DEVICE void set_abort(mpk_control* control, uint32_t code, uint32_t origin) {
  uint64_t* word = reinterpret_cast<uint64_t*>(control);
  const uint64_t desired = (static_cast<uint64_t>(origin) << 32) | code;
  /* Relaxed: see abort_code. */
  uint64_t seen = platform::load<platform::Scope::kSystem>(word, platform::kRelaxed);
  while (static_cast<uint32_t>(seen) == MPK_OK) {
    if (platform::compare_exchange<platform::Scope::kSystem>(word, &seen, desired, platform::kRelaxed)) return;
  }
}

/* Sets the abort word here and at every rank whose memory this one reaches. Never waits. */
MPK_DEVICE void abort_broadcast(const mpk_rank* rank, uint32_t code) {
  set_abort(rank->control, code, rank->rank);
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    if (pe != rank->rank && rank->sym[pe] != nullptr) set_abort(reinterpret_cast<mpk_control*>(rank->sym[pe]), code, rank->rank);
  }
}

/* After an abort: tells the ranks that only a transport reaches. Over a dead link the transport may never return. So one
 * thread of a rank calls this, as its last act, and only the end of the kernel waits for it. */
MPK_DEVICE void abort_out_of_reach(const mpk_rank* rank) {
  /* The word contains the origin that this rank knows, so several calls send the same word. Relaxed: see abort_code. */
  const uint64_t word = platform::load<platform::Scope::kSystem>(reinterpret_cast<const uint64_t*>(rank->control), platform::kRelaxed);
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    /* A put cannot compare first, so the last cause stays. */
    if (pe != rank->rank && rank->sym[pe] == nullptr) platform::put_word(rank, pe, reinterpret_cast<uint64_t*>(rank->control), word);
  }
}

}  // namespace mpk

#endif
