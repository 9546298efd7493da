/* A queue of 64-bit ids in this rank's memory: many producers, one consumer, fixed capacity.
 *
 * Slot i holds id + 1, or 0 while it is empty. A producer takes a ticket, and writes its slot only when
 * the consumer's head is less than a lap behind. So no entry is ever overwritten, and no two tickets
 * share a slot. */
#ifndef MPK_PROTOCOL_QUEUE_H
#define MPK_PROTOCOL_QUEUE_H

#include "wait.h"

namespace mpk {

/* Waits while the queue is full (bounded). Returns MPK_OK or an abort code. After an abort code the queue
 * is unusable, and so is the run. */
MPK_DEVICE int queue_push(const mpk_rank* rank, mpk_queue* queue, uint64_t id, mpk_status* status) {
  uint64_t* const slots = queue->slots; /* read before the acquire: on a GPU, a read after it would miss the L1 cache */
  const uint64_t mask = queue->mask;
  /* Relaxed: the ticket orders nothing; the slot's release does. */
  const uint64_t ticket = platform::fetch_add<platform::Scope::kDevice>(&queue->tail, uint64_t{1}, platform::kRelaxed);
  /* Acquire: pairs with the head's release in queue_take. The slot was emptied before that release. */
  uint64_t head = platform::load<platform::Scope::kDevice>(&queue->head, platform::kAcquire);
  if (ticket - head > mask) {
    Wait wait(rank, status);
    do {
      const int code = wait.poll(head);
      if (code != MPK_OK) return code;
      head = platform::load<platform::Scope::kDevice>(&queue->head, platform::kAcquire); /* as above */
    } while (ticket - head > mask);
  }
  /* Release: pairs with the slot's acquire in queue_peek; it hands over everything that led to this
   * entry. */
  platform::store<platform::Scope::kDevice>(&slots[ticket & mask], id + 1, platform::kRelease);
  return MPK_OK;
}

/* For a queue whose only producer is the caller: does nothing and returns false if the queue is full. */
MPK_DEVICE bool queue_try_push_single(mpk_queue* queue, uint64_t id) {
  uint64_t* const slots = queue->slots; /* as in queue_push */
  const uint64_t mask = queue->mask;
  const uint64_t ticket = platform::load<platform::Scope::kThread>(&queue->tail, platform::kRelaxed); /* only the producer uses it */
  /* Acquire: pairs with the head's release in queue_take. */
  const uint64_t head = platform::load<platform::Scope::kDevice>(&queue->head, platform::kAcquire);
  if (ticket - head > mask) return false;
  platform::store<platform::Scope::kThread>(&queue->tail, ticket + 1, platform::kRelaxed); /* only the producer uses it */
  /* Release: pairs with the slot's acquire in queue_peek. */
  platform::store<platform::Scope::kDevice>(&slots[ticket & mask], id + 1, platform::kRelease);
  return true;
}

/* Consumer only: the next entry. False if there is none yet. */
MPK_DEVICE bool queue_peek(const mpk_queue* queue, uint64_t* id) {
  const uint64_t head = platform::load<platform::Scope::kThread>(&queue->head, platform::kRelaxed); /* only the consumer uses it */
  /* Acquire: pairs with the producer's release of the slot. */
  const uint64_t value = platform::load<platform::Scope::kDevice>(&queue->slots[head & queue->mask], platform::kAcquire);
  *id = value - 1;
  return value != 0;
}

/* Consumer only, after queue_peek has found an entry: frees its slot. */
MPK_DEVICE void queue_take(mpk_queue* queue) {
  const uint64_t head = platform::load<platform::Scope::kThread>(&queue->head, platform::kRelaxed); /* only the consumer uses it */
  /* Relaxed, then release: the head hands the emptied slot to the producer of the next lap. */
  platform::store<platform::Scope::kDevice>(&queue->slots[head & queue->mask], uint64_t{0}, platform::kRelaxed);
  platform::store<platform::Scope::kDevice>(&queue->head, head + 1, platform::kRelease);
}

/* Consumer only: peek, then take. */
MPK_DEVICE bool queue_pop(mpk_queue* queue, uint64_t* id) {
  if (!queue_peek(queue, id)) return false;
  queue_take(queue);
  return true;
}

}  // namespace mpk

#endif
