/* The proxy between nodes (frames.h, cpu/proxy.cpp). Puts of a rank's workers arrive at the other rank in the order in which the
 * workers know of each other's puts, lap after lap of the ring. The same holds for what a rank's proxy hands to its GPU. */
#include "frames.h"
#include "kernel_wait.h"
#include "model/checks/world.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Two ranks whose only connection is the first rank's proxy. */
struct Link {
  mpk_rank* ranks;
  mpk_proxy* proxy;

  void build(uint64_t capacity) {
    ranks = make_ranks(2, 256);
    uint8_t** bases = make<uint8_t*>(2); /* as rank 0 sees them */
    bases[0] = ranks[0].sym[0];
    proxy = make<mpk_proxy>();
    proxy->capacity = capacity;
    proxy->head = make<uint64_t>();
    proxy->written = make<uint32_t>(capacity / MPK_FRAME_ALIGN);
    proxy->bytes = reinterpret_cast<uint8_t*>(make<uint64_t>(capacity / 8));
    ranks[0].sym = bases;
    ranks[0].proxy = proxy;
    label(&proxy->reserved, "reserved");
    label(&proxy->seen, "seen");
    label(proxy->head, "head");
    label(proxy->written, "written");
    label(proxy->bytes, "frames");
    label(heap<uint64_t>(ranks[1]), "the heap of rank 1");
  }

  /* Rank 0's proxy and rank 1's proxy: carries `frames` frames as they arrive. */
  void carry(uint32_t frames) {
    uint8_t* const message = reinterpret_cast<uint8_t*>(make_message());
    uint8_t* const base = reinterpret_cast<uint8_t*>(ranks[1].control);
    for (uint32_t come = 0; come < frames; ++come) {
      if (!wait_until(&ranks[1], [&] { return mpk_proxy_next(proxy) == 1; })) return fail("aborted");
      /* One frame at a time. */
      const uint64_t bytes = mpk_proxy_take(proxy, message, MPK_FRAME_ALIGN);
      MODEL_CHECK(bytes != 0 && bytes <= MPK_FRAME_ALIGN, "%llu bytes", static_cast<unsigned long long>(bytes));
      MODEL_CHECK(mpk_proxy_apply(base, sizeof(mpk_control) + 256, message, bytes) == MPK_OK, "no frame");
    }
  }

  uint64_t* make_message() { return message; }
  uint64_t* message;
};

/* A worker puts a word and signals. With two workers, the first one puts, and the second one signals once it knows of
 * the put. The ring has room for `capacity` bytes. */
class Puts : public Registered {
 public:
  Puts(const char* check, uint64_t capacity, uint32_t workers, uint32_t rounds, uint32_t turns = 0) : Registered(check), capacity_(capacity), workers_(workers), rounds_(rounds) {
    options.turns = turns;
  }
  void build() override {
    link_.build(capacity_);
    link_.message = make<uint64_t>(MPK_FRAME_ALIGN / 8);
    told_ = make<uint64_t>();
    label(told_, "told");
    mpk_rank* const sender = &link_.ranks[0];
    uint64_t* const data = heap<uint64_t>(*sender);
    uint64_t* const counter = data + 8;
    thread("worker 0", 0, [=, this] {
      for (uint32_t round = 0; round < rounds_; ++round) {
        const uint64_t value = 100 + round;
        MODEL_CHECK(platform::proxy_rows(sender, 1, data + round, 8, &value, 8, 1, 8), "no way");
        if (workers_ == 1) MODEL_CHECK(platform::proxy_add(sender, 1, counter, 1), "no way");
        else platform::store<platform::Scope::kDevice>(told_, uint64_t{round + 1}, platform::kRelease);
      }
    });
    if (workers_ == 2) {
      thread("worker 1", 0, [=, this] {
        for (uint32_t round = 0; round < rounds_; ++round) {
          if (!wait_until(sender, [&] { return platform::load<platform::Scope::kDevice>(told_, platform::kAcquire) > round; })) return fail("aborted");
          MODEL_CHECK(platform::proxy_add(sender, 1, counter, 1), "no way");
        }
      });
    }
    thread("proxies", kHost, [=, this] { link_.carry(2 * rounds_); });
    thread("reader", 1, [=, this] {
      const mpk_rank* const rank = &link_.ranks[1];
      const uint64_t* const here = heap<uint64_t>(*rank);
      for (uint32_t round = 0; round < rounds_; ++round) {
        if (!wait_until(rank, [&] { return platform::load<platform::Scope::kSystem>(here + 8, platform::kAcquire) > round; })) return fail("aborted");
        MODEL_CHECK(here[round] == 100 + round, "the data of round %u is not there", round);
      }
    });
  }

 private:
  Link link_;
  uint64_t capacity_;
  uint32_t workers_, rounds_;
  uint64_t* told_;
};

Puts one_worker("proxy: 1 worker, 2 puts with signals, room for 1 frame", MPK_FRAME_ALIGN, 1, 2, 1);
Puts two_workers("proxy: 2 workers, 1 signals for the other, room for 2", 2 * MPK_FRAME_ALIGN, 2, 1);

/* Two workers reuse each other's room: the second learns from the first that the proxy has read. */
class Room : public Registered {
 public:
  explicit Room(const char* check) : Registered(check) {}
  void build() override {
    link_.build(2 * MPK_FRAME_ALIGN);
    link_.message = make<uint64_t>(MPK_FRAME_ALIGN / 8);
    mpk_rank* const sender = &link_.ranks[0];
    uint64_t* const data = heap<uint64_t>(*sender);
    for (uint32_t w = 0; w < 2; ++w) {
      thread(w == 0 ? "worker 0" : "worker 1", 0, [=] {
        const uint64_t value = 100 + w;
        for (uint32_t i = 0; i < 2; ++i) MODEL_CHECK(platform::proxy_rows(sender, 1, data + w, 8, &value, 8, 1, 8), "no way");
      });
    }
    thread("proxies", kHost, [=, this] { link_.carry(4); });
  }
  void finish() override {
    const uint64_t* const here = heap<uint64_t>(link_.ranks[1]);
    MODEL_CHECK(here[0] == 100 && here[1] == 101, "a put is lost");
  }

 private:
  Link link_;
};

Room room("proxy: 2 workers, 2 puts each, room for 2");

/* A reader that has seen a word reads it as plain memory, and sees what its writer put before. */
class Words : public Registered {
 public:
  explicit Words(const char* check) : Registered(check) {}
  void build() override {
    link_.build(2 * MPK_FRAME_ALIGN);
    link_.message = make<uint64_t>(MPK_FRAME_ALIGN / 8);
    mpk_rank* const sender = &link_.ranks[0];
    uint64_t* const data = heap<uint64_t>(*sender);
    thread("worker", 0, [=] {
      const uint64_t value = 7, word = (uint64_t{5} << 32) | 9;
      MODEL_CHECK(platform::proxy_rows(sender, 1, data, 8, &value, 8, 1, 8), "no way");
      MODEL_CHECK(platform::proxy_words(sender, 1, data + 1, &word, 1), "no way");
    });
    thread("proxies", kHost, [=, this] { link_.carry(2); });
    thread("reader", 1, [=, this] {
      const mpk_rank* const rank = &link_.ranks[1];
      const uint64_t* const here = heap<uint64_t>(*rank);
      if (!wait_until(rank, [&] { return mpk_flagged_arrived(mpk_flagged_load(here + 1), 5); })) return fail("aborted");
      MODEL_CHECK(here[0] == 7 && static_cast<uint32_t>(here[1]) == 9, "what came before the word is not there");
    });
  }

 private:
  Link link_;
};

Words words("proxy: a put, then a flagged word");

/* The inbox of a GPU: its reader, which takes frames as mpk_inbox_take does, and its rank's proxy. */
class Inbox : public Registered {
 public:
  explicit Inbox(const char* check) : Registered(check) { options.turns = 1; }
  void build() override {
    rank_ = make_ranks(1, 64);
    inbox_ = make<mpk_inbox>();
    inbox_->capacity = MPK_FRAME_ALIGN; /* room for one frame */
    bytes_ = make<uint64_t>(MPK_FRAME_ALIGN / 8);
    ring_ = make<uint64_t>(inbox_->capacity / 8);
    frame_ = make<uint64_t>(MPK_FRAME_ALIGN / 8);
    inbox_->bytes = reinterpret_cast<uint8_t*>(ring_);
    label(&inbox_->tail, "tail");
    label(&inbox_->head, "inbox head");
    thread("proxy", kHost, [this] {
      for (uint64_t i = 0; i < 2; ++i) {
        mpk_frame frame = {};
        frame.bytes = sizeof(frame);
        frame.kind = MPK_FRAME_ADD;
        frame.value = i + 1;
        frame.offset = 8;
        copy(bytes_, &frame, sizeof(frame));
        if (!wait_until(rank_, [&] { return mpk_inbox_put(inbox_, 64, reinterpret_cast<uint8_t*>(bytes_), sizeof(frame)) == MPK_OK; })) return fail("aborted");
      }
    });
    thread("reader", 0, [this] {
      for (uint64_t i = 0; i < 2; ++i) {
        if (!wait_until(rank_, [&] { return mpk_inbox_take(inbox_, reinterpret_cast<uint8_t*>(frame_)) != 0; })) return fail("aborted");
        MODEL_CHECK(reinterpret_cast<const mpk_frame*>(frame_)->value == i + 1, "another frame");
      }
    });
  }

 private:
  mpk_rank* rank_;
  mpk_inbox* inbox_;
  uint64_t *bytes_, *ring_, *frame_;
};

Inbox inbox("proxy: two frames through the inbox");

}  // namespace
