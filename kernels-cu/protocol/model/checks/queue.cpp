/* The queue of ids: entries arrive once and in order, with what their producer wrote before. None is lost when the queue is
 * full and its slots are reused. */
#include "model/checks/world.h"
#include "queue.h"

namespace {

using namespace mpk;
using namespace mpk::model;

struct Queue {
  mpk_rank* rank;
  mpk_queue* queue;
  uint32_t* payload; /* by id: plain memory that arrives with the entry */

  void build(uint64_t capacity, uint32_t ids) {
    rank = make_ranks(1, 0);
    queue = make<mpk_queue>();
    queue->slots = make<uint64_t>(capacity);
    queue->mask = capacity - 1;
    payload = make<uint32_t>(ids);
    label(&queue->tail, "tail");
    label(&queue->head, "head");
    label(&queue->slots, "queue");
    label(queue->slots, "slots");
    label(payload, "payload");
  }

  /* Takes `count` entries. The ids of one producer (id / 8) arrive in order. */
  void consume(uint32_t count) {
    uint32_t next[4] = {};
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t id = 0;
      if (!wait_until(rank, [&] { return queue_pop(queue, &id); })) return fail("aborted");
      MODEL_CHECK(id / 8 < 4 && id % 8 == next[id / 8], "entry %llu came in place of %u", static_cast<unsigned long long>(id), next[id / 8]);
      ++next[id / 8];
      MODEL_CHECK(payload[id] == id + 100, "the payload of %llu is not there", static_cast<unsigned long long>(id));
    }
  }
};

/* Two producers, one consumer. With one slot, each push waits for the pop before it. */
class Producers : public Registered {
 public:
  Producers(const char* check, uint64_t capacity, uint32_t first, uint32_t second, uint32_t turns) : Registered(check), capacity_(capacity), counts_{first, second} {
    options.turns = turns;
  }
  void build() override {
    q_.build(capacity_, 16);
    for (uint32_t p = 0; p < 2; ++p) {
      if (counts_[p] != 0) thread(p == 0 ? "producer 0" : "producer 1", 0, [this, p] { produce(p); });
    }
    thread("consumer", 0, [this] { q_.consume(counts_[0] + counts_[1]); });
  }
  void finish() override {
    for (uint64_t i = 0; i < capacity_; ++i) MODEL_CHECK(q_.queue->slots[i] == 0, "a slot is left behind");
  }

 private:
  void produce(uint32_t p) {
    for (uint32_t i = 0; i < counts_[p]; ++i) {
      const uint32_t id = p * 8 + i;
      q_.payload[id] = id + 100;
      MODEL_CHECK(queue_push(q_.rank, q_.queue, id, nullptr) == MPK_OK, "the push failed");
    }
  }
  Queue q_;
  uint64_t capacity_;
  uint32_t counts_[2];
};

Producers two_room("queue: 2 producers, 2 entries each, room for 2", 2, 2, long_run() ? 3 : 2, 0);
Producers two_tight("queue: 2 producers, 1 entry each, room for 1", 1, 1, 1, 1);
Producers one_laps("queue: 1 producer, 3 laps of 1 slot, waits", 1, long_run() ? 5 : 3, 0, 1);

/* As schedulers push: one producer, which does other work while the queue is full. */
class Single : public Registered {
 public:
  Single(const char* check, uint64_t capacity, uint32_t count) : Registered(check), capacity_(capacity), count_(count) {}
  void build() override {
    q_.build(capacity_, count_);
    thread("producer", 0, [this] {
      for (uint32_t id = 0; id < count_; ++id) {
        q_.payload[id] = id + 100;
        if (!wait_until(q_.rank, [&] { return queue_try_push_single(q_.queue, id); })) return fail("aborted");
      }
    });
    thread("consumer", 0, [this] { q_.consume(count_); });
  }
  void finish() override {
    for (uint64_t i = 0; i < capacity_; ++i) MODEL_CHECK(q_.queue->slots[i] == 0, "a slot is left behind");
  }

 private:
  Queue q_;
  uint64_t capacity_;
  uint32_t count_;
};

Single single_tight("queue: single producer, 3 laps of 1 slot", 1, 3);
Single single_room("queue: single producer, 5 entries, room for 2", 2, 5);

}  // namespace
