/* Remote scheduler queues. Two workers of a rank push into one ring; the receiver finds each entry once, complete, with what
 * came before it. Then the remote scheduler's own steps: it launches an event once per epoch, when all its triggers are there,
 * although a sender may be an iteration ahead. */
#include "model/checks/world.h"
#include "scheduler_step.h"

namespace {

using namespace mpk;
using namespace mpk::model;

constexpr size_t kCountersAt = 0, kDataAt = 512, kRingsAt = 1024, kHeap = 2048;

/* `world` ranks with rings of `capacity` entries, and one graph with the same events on all. */
struct Rings {
  mpk_rank* ranks;
  mpk_graph* graphs;
  mpk_event* events;

  void build(uint32_t world, uint64_t capacity, bool messages, uint32_t num_events) {
    ranks = make_ranks(world, kHeap);
    graphs = make<mpk_graph>(world);
    events = make<mpk_event>(num_events);
    for (uint32_t r = 0; r < world; ++r) {
      mpk_rank& rank = ranks[r];
      rank.signals = messages ? MPK_SIGNALS_NVSHMEM : MPK_SIGNALS_DIRECT;
      rank.remote_rings = sizeof(mpk_control) + kRingsAt;
      rank.remote_ring_capacity = capacity;
      rank.remote_ring_bytes = sizeof(mpk_remote_ring) + capacity * sizeof(mpk_remote_entry);
      rank.remote_pushed = make<uint64_t>(world);
      rank.num_graphs = 1;
      rank.graphs = &graphs[r];
      rank.num_schedulers = 2;
      rank.placement = MPK_DYNAMIC;
      rank.batch = make<mpk_batch>();
      graphs[r].num_events = num_events;
      graphs[r].events = events;
      graphs[r].counters = reinterpret_cast<uint64_t*>(heap<uint8_t>(rank) + kCountersAt);
      graphs[r].placement = MPK_DYNAMIC;
      graphs[r].launched = make<uint32_t>(num_events);
      label(rank.remote_pushed, "pushed of rank", static_cast<int>(r));
      label(graphs[r].counters, "counters of rank", static_cast<int>(r));
      label(data(r), "data of rank", static_cast<int>(r));
      label(rank.batch, "batch of rank", static_cast<int>(r));
      for (uint32_t s = 0; s < world; ++s) {
        label(ring_of(&rank, s), s == 0 ? "ring (of rank 0) at rank" : s == 1 ? "ring (of rank 1) at rank" : "ring (of rank 2) at rank", static_cast<int>(r));
      }
    }
  }
  uint64_t* data(uint32_t rank) const { return reinterpret_cast<uint64_t*>(heap<uint8_t>(ranks[rank]) + kDataAt); }
};

/* Rounds of one entry from each of two workers, into a ring with room for one round. */
class Pushes : public Registered {
 public:
  Pushes(const char* check, bool messages, uint32_t rounds) : Registered(check), messages_(messages), rounds_(rounds) {}
  void build() override {
    r_.build(2, 2, messages_, 1);
    r_.events[0] = {1, 0, 0, MPK_EVENT_EMPTY, 1}; /* the receiver has finished a round */
    payload_ = make<uint32_t>(2);
    label(payload_, "payload");
    for (uint32_t w = 0; w < 2; ++w) {
      thread(w == 0 ? "worker 0" : "worker 1", 0, [this, w] {
        for (uint32_t round = 1; round <= rounds_; ++round) {
          MODEL_CHECK(event_wait(&r_.ranks[0], &r_.graphs[0], 0, round, 1, nullptr) == MPK_OK, "the wait failed");
          payload_[w] = round * 10 + w;
          MODEL_CHECK(ring_push(&r_.ranks[0], 1, {w, round, 7, 9}, nullptr) == MPK_OK, "the push failed");
        }
      });
    }
    thread("receiver", 1, [this] {
      const mpk_rank* rank = &r_.ranks[1];
      uint64_t head = 0, tail = 0;
      for (uint32_t round = 1; round <= rounds_; ++round) {
        uint32_t seen = 0;
        for (uint32_t i = 0; i < 2; ++i, ++head) {
          if (!wait_until(rank, [&] { return tail > head || (tail = ring_tail(rank, 0)) > head; })) return fail("aborted");
          mpk_remote_entry entry = {};
          MODEL_CHECK(ring_peek(rank, 0, head, tail, &entry) == MPK_OK, "an overrun");
          MODEL_CHECK(entry.event < 2 && entry.iteration == round && entry.graph == 7 && entry.epoch == 9, "round %u: an entry of round %u", round, entry.iteration);
          seen |= 1u << entry.event;
          MODEL_CHECK(payload_[entry.event] == round * 10 + entry.event, "the payload is not there");
        }
        MODEL_CHECK(seen == 3, "an entry came twice");
        trigger_remote(rank, &r_.graphs[1], 0, 0);
      }
    });
  }

 private:
  bool messages_;
  uint32_t rounds_;
  Rings r_;
  uint32_t* payload_ = nullptr;
};

Pushes pushes("ring: 2 workers push, 2 laps", false, long_run() ? 3 : 2);
Pushes pushes_messages("ring: 2 workers push, as messages", true, 1);
Pushes pushes_messages_laps("ring: 2 workers push, 2 laps, as messages", true, 2);

/* Rank 1's remote scheduler, its worker, and a worker of each other rank. Event 3 takes a trigger from each rank. Ranks stay
 * within one iteration of each other, because rank 1 also sends in each iteration, except if `unbounded`. */
class Scheduling : public Registered {
 public:
  Scheduling(const char* check, uint32_t world, uint32_t iterations, bool messages, bool unbounded = false)
      : Registered(check), world_(world), iterations_(iterations), messages_(messages), unbounded_(unbounded) {
    if (unbounded) options.must_fail = "data race"; /* a counter mixes triggers of two epochs */
  }
  void build() override {
    r_.build(world_, 2 * world_, messages_, 5);
    r_.events[0] = {1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0};
    r_.events[1] = {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0};
    r_.events[2] = {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0};
    r_.events[3] = {world_, 2, 3, MPK_EVENT_LAUNCH_TASKS, 1};
    r_.events[4] = {1, 0, 0, MPK_EVENT_EMPTY, 1}; /* rank 1 has done its part of an iteration */
    source_ = make<uint64_t>(world_ * iterations_);
    label(source_, "source");
    begin(1); /* before all threads */
    for (uint32_t r = 0; r < world_; ++r) {
      static const char* const kNames[] = {"worker of rank 0", "worker of rank 1", "worker of rank 2"};
      thread(kNames[r], r, [this, r] { work(r); });
    }
    thread("scheduler of rank 1", 1, [this] { schedule(); });
  }

 private:
  void begin(uint32_t iteration) {
    mpk_batch* batch = r_.ranks[1].batch;
    batch->iteration = batch->epoch = iteration;
    batch->graph = 0;
    publish(&r_.ranks[1]);
  }
  void work(uint32_t r) {
    const mpk_rank* rank = &r_.ranks[r];
    for (uint32_t i = 1; i <= iterations_; ++i) {
      if (r == 1 && !wait_until(rank, [&] { return read_publication(rank).iteration == i; })) return fail("aborted");
      if (r != 1 && !unbounded_) MODEL_CHECK(event_wait(rank, &r_.graphs[r], 4, i, 1, nullptr) == MPK_OK, "the wait failed");
      uint64_t* source = source_ + r * iterations_ + i - 1;
      *source = i * 10 + r;
      platform::put(rank, 1, r_.data(r) + (i - 1) * world_ + r, source, 8);
      const Iteration iteration = {&r_.graphs[r], 0, i, i};
      const uint64_t id = make_event_id(MPK_EVENT_TAG_NVSHMEM, 1, 3);
      MODEL_CHECK(trigger_event(rank, iteration, id, r_.events[3], nullptr) == MPK_OK, "the trigger failed");
      for (uint32_t pe = 0; r == 1 && pe < world_; ++pe)
        if (pe != 1 && iterations_ > 1) trigger_remote(rank, &r_.graphs[r], pe, 4);
    }
  }
  void schedule() {
    const mpk_rank* rank = &r_.ranks[1];
    Scheduler scheduler = {rank, 1, nullptr};
    uint64_t heads[4] = {};
    for (uint32_t i = 1; i <= iterations_; ++i) {
      Found found;
      if (!wait_until(rank, [&] {
            do {
              found = Found();
              MODEL_CHECK(remote_scheduler_step(&scheduler, heads, &found) == MPK_OK, "a step failed");
            } while (found.worked && found.launch.first == found.launch.last);
            return found.launch.first != found.launch.last;
          }))
        return fail("aborted");
      MODEL_CHECK(found.launch.iteration == i && found.launch.first == 2 && found.launch.last == 3, "launched in iteration %u, not %u", found.launch.iteration, i);
      for (uint32_t r = 0; r < world_; ++r) {
        const uint64_t value = r_.data(1)[(i - 1) * world_ + r];
        MODEL_CHECK(value == i * 10 + r, "iteration %u: data of rank %u", i, r);
      }
      if (i < iterations_) begin(i + 1);
    }
    /* All entries of this rank's iterations have been taken; nothing is launched again. */
    Found found;
    uint64_t taken = 0;
    for (uint32_t s = 0; s < world_; ++s) taken += heads[s];
    if (!wait_until(rank, [&] {
          found = Found();
          MODEL_CHECK(remote_scheduler_step(&scheduler, heads, &found) == MPK_OK, "a step failed");
          MODEL_CHECK(found.launch.first == found.launch.last, "launched twice");
          taken = 0;
          for (uint32_t s = 0; s < world_; ++s) taken += heads[s];
          return taken == iterations_ * world_;
        }))
      return fail("aborted");
  }
  uint32_t world_, iterations_;
  bool messages_, unbounded_;
  Rings r_;
  uint64_t* source_ = nullptr;
};

Scheduling scheduling("remote scheduler: 2 ranks, 3 iterations", 2, 3, false);
Scheduling scheduling_unbounded("remote scheduler: a sender 2 iterations ahead", 2, 2, false, true);
Scheduling scheduling_three("remote scheduler: 3 ranks", 3, long_run() ? 2 : 1, false);
Scheduling scheduling_messages("remote scheduler: 2 ranks, as messages", 2, 1, true);

}  // namespace
