/* Events: a thread that finds one ready sees what all its triggering threads had written, in this epoch and in later
 * ones. */
#include "model/checks/world.h"
#include "trigger.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Static polling on one rank. Two producers write and trigger `full`; the consumer waits, reads, and triggers `free`.
 * From the second epoch on, producers wait for the `free` of the epoch before. */
class Polling : public Registered {
 public:
  Polling(const char* check, uint32_t epochs, bool remote, bool system) : Registered(check), epochs_(epochs), remote_(remote), system_(system) {}
  void build() override {
    rank_ = make_ranks(remote_ ? 2 : 1, 1024);
    events_ = make<mpk_event>(2);
    events_[0] = {2, 0, 0, MPK_EVENT_EMPTY, static_cast<uint16_t>(system_)};
    events_[1] = {1, 0, 0, MPK_EVENT_EMPTY, static_cast<uint16_t>(system_)};
    data_ = make<uint32_t>(2);
    label(data_, "data");
    /* With two ranks: producers on rank 1, the consumer on rank 0. */
    for (uint32_t r = 0; r < (remote_ ? 2u : 1u); ++r) {
      graph_[r] = make<mpk_graph>();
      graph_[r]->num_events = 2;
      graph_[r]->events = events_;
      graph_[r]->counters = heap<uint64_t>(rank_[r]);
      label(event_counter(graph_[r], 0), "full of rank", static_cast<int>(r));
      label(event_counter(graph_[r], 1), "free of rank", static_cast<int>(r));
    }
    for (uint32_t p = 0; p < 2; ++p) thread(p == 0 ? "producer 0" : "producer 1", remote_, [this, p] { produce(p); });
    thread("consumer", 0, [this] { consume(); });
  }

 private:
  void trigger(uint32_t self, uint32_t owner, uint32_t event) {
    if (remote_) MODEL_CHECK(trigger_remote(&rank_[self], graph_[self], owner, event), "out of reach");
    else trigger_local(graph_[0], event, events_[event]);
  }
  void produce(uint32_t p) {
    const uint32_t self = remote_;
    for (uint32_t epoch = 1; epoch <= epochs_; ++epoch) {
      MODEL_CHECK(event_wait(&rank_[self], graph_[self], 1, epoch, 1, nullptr) == MPK_OK, "the wait failed");
      data_[p] = epoch * 10 + p;
      trigger(self, 0, 0);
    }
  }
  void consume() {
    for (uint32_t epoch = 1; epoch <= epochs_; ++epoch) {
      MODEL_CHECK(event_wait(&rank_[0], graph_[0], 0, epoch, 0, nullptr) == MPK_OK, "the wait failed");
      for (uint32_t p = 0; p < 2; ++p) MODEL_CHECK(data_[p] == epoch * 10 + p, "epoch %u: data of producer %u is %u", epoch, p, data_[p]);
      trigger(0, remote_, 1);
    }
  }
  uint32_t epochs_;
  bool remote_, system_;
  mpk_rank* rank_ = nullptr;
  mpk_graph* graph_[2] = {};
  mpk_event* events_ = nullptr;
  uint32_t* data_ = nullptr;
};

Polling one_rank("event: 2 triggers, buffers free an epoch later", 3, false, false);
Polling alone("event: one rank alone with remote triggers", 3, false, true);
Polling two_ranks("event: the same between ranks", long_run() ? 6 : 3, true, true);

/* Events triggered by messages: a put, then a signal, in flight together with others. The source is free once the
 * owner has said that the event was ready, not before. */
class Messages : public Registered {
 public:
  explicit Messages(const char* check) : Registered(check) {}
  void build() override {
    rank_ = make_ranks(2, 1024);
    for (uint32_t r = 0; r < 2; ++r) rank_[r].signals = MPK_SIGNALS_NVSHMEM;
    events_ = make<mpk_event>(2);
    events_[0] = {1, 0, 0, MPK_EVENT_EMPTY, 1}; /* of rank 1: the data has arrived */
    events_[1] = {1, 0, 0, MPK_EVENT_EMPTY, 1}; /* of rank 0: the source is free */
    for (uint32_t r = 0; r < 2; ++r) {
      graph_[r] = make<mpk_graph>();
      graph_[r]->num_events = 2;
      graph_[r]->events = events_;
      graph_[r]->counters = heap<uint64_t>(rank_[r]);
      buffer_[r] = heap<uint64_t>(rank_[r]) + 64;
      label(event_counter(graph_[r], 0), "arrived of rank", static_cast<int>(r));
      label(event_counter(graph_[r], 1), "freed of rank", static_cast<int>(r));
      label(buffer_[r], "buffer of rank", static_cast<int>(r));
    }
    source_ = make<uint64_t>();
    label(source_, "source");
    thread("sender", 0, [this] {
      for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
        MODEL_CHECK(event_wait(&rank_[0], graph_[0], 1, static_cast<uint32_t>(epoch), 1, nullptr) == MPK_OK, "the wait failed");
        *source_ = 10 * epoch;
        platform::put(&rank_[0], 1, buffer_[0], source_, 8);
        trigger_remote(&rank_[0], graph_[0], 1, 0);
      }
    });
    thread("receiver", 1, [this] {
      for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
        MODEL_CHECK(event_wait(&rank_[1], graph_[1], 0, static_cast<uint32_t>(epoch), 0, nullptr) == MPK_OK, "the wait failed");
        MODEL_CHECK(*buffer_[1] == 10 * epoch, "epoch %llu: %llu", static_cast<unsigned long long>(epoch), static_cast<unsigned long long>(*buffer_[1]));
        trigger_remote(&rank_[1], graph_[1], 0, 1);
      }
    });
  }

 private:
  mpk_rank* rank_ = nullptr;
  mpk_graph* graph_[2] = {};
  mpk_event* events_ = nullptr;
  uint64_t* buffer_[2] = {};
  uint64_t* source_ = nullptr;
};

Messages messages("event: puts and signals as messages");

}  // namespace
