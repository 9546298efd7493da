/* Remote scheduler queues: the receiver's symmetric memory has one ring for each sending rank. A push is one
 * put-with-signal (the entry, then the tail). The sender never loads from the receiver, so it cannot see the
 * receiver's head. The capacity proves that no entry is overwritten.
 *
 * Capacity. Every iteration must exchange data between all ranks, so that a sender is at most one iteration ahead. With
 * two ranks, the receiver cannot complete an iteration without taking its peer's entries in order, so a ring holds at
 * most 2 iterations. With more ranks, another sender's entries may complete events meanwhile, and between two looks at
 * one ring, parts of 3 iterations may accumulate. Twice an iteration's remote triggers of *all* senders is enough for
 * both (with three ranks or more, that is at least 4 iterations of one sender). The receiver still checks, and ends the
 * run with MPK_ABORT_QUEUE if the bound does not hold. */
#ifndef MPK_PROTOCOL_RING_H
#define MPK_PROTOCOL_RING_H

#include "wait.h"

namespace mpk {

constexpr uint64_t kRingPushLock = 1ull << 63;

/* This rank's copy of the ring of `sender`. A sender passes the copy of its own ring, for put_with_signal to
 * address it at the peer. */
MPK_DEVICE mpk_remote_ring* ring_of(const mpk_rank* rank, uint32_t sender) {
  return reinterpret_cast<mpk_remote_ring*>(rank->sym[rank->rank] + rank->remote_rings +
                                            static_cast<uint64_t>(sender) * rank->remote_ring_bytes);
}

MPK_DEVICE mpk_remote_entry* ring_entry(const mpk_rank* rank, mpk_remote_ring* ring, uint64_t position) {
  return reinterpret_cast<mpk_remote_entry*>(ring + 1) + position % rank->remote_ring_capacity;
}

/* Pushes to rank `receiver`, which may be this rank. The workers of a rank act as one producer: they take
 * turns, so the tail never passes an entry that is not there yet. Returns MPK_OK or an abort code. */
MPK_DEVICE int ring_push(const mpk_rank* rank, uint32_t receiver, const mpk_remote_entry& entry, mpk_status* status) {
  uint64_t* pushed = &rank->remote_pushed[receiver];
  uint64_t position = platform::load<platform::Scope::kDevice>(pushed, platform::kRelaxed);
  Wait wait(rank, status);
  for (;;) {
    position &= ~kRingPushLock;
    /* Acquire: pairs with the release at the end of the previous push, so that its tail comes before ours. */
    if (platform::compare_exchange<platform::Scope::kDevice>(pushed, &position, position | kRingPushLock, platform::kAcquire)) break;
    if ((position & kRingPushLock) == 0) continue;
    const int code = wait.poll(position);
    if (code != MPK_OK) return code;
    position = platform::load<platform::Scope::kDevice>(pushed, platform::kRelaxed);
  }
  mpk_remote_ring* ring = ring_of(rank, rank->rank);
  /* The signal's release pairs with the tail's acquire in ring_tail. */
  const bool reached = platform::put_with_signal(rank, receiver, ring_entry(rank, ring, position), &entry, sizeof(entry), &ring->tail, 1);
  /* Release: the next producer of this rank pushes after this one. */
  platform::store<platform::Scope::kDevice>(pushed, position + 1, platform::kRelease);
  return reached ? MPK_OK : MPK_ABORT_PEER;
}

/* Receiver: number of entries that `sender` has pushed so far. Acquire: pairs with the signal of
 * ring_push; all entries below the tail are visible, and so is what their senders did before. */
MPK_DEVICE uint64_t ring_tail(const mpk_rank* rank, uint32_t sender) {
  return platform::load<platform::Scope::kSystem>(&ring_of(rank, sender)->tail, platform::kAcquire);
}

/* Receiver: copies the entry at `head`, the next one to take; `tail` > `head`. Returns MPK_ABORT_QUEUE
 * if the sender has lapped the ring, so that the entry may have been overwritten. */
MPK_DEVICE int ring_peek(const mpk_rank* rank, uint32_t sender, uint64_t head, uint64_t tail, mpk_remote_entry* entry) {
  if (tail - head > rank->remote_ring_capacity) return MPK_ABORT_QUEUE;
  *entry = *ring_entry(rank, ring_of(rank, sender), head);
  return MPK_OK;
}

}  // namespace mpk

#endif
