/* Flagged words: each carries its tag. One-shot exchanges between ranks with relaxed pushes and polls and two alternating
 * buffers; and the loads and stores of kernel_wait.h, after which words are read as plain memory. */
#include "kernel_wait.h"
#include "model/checks/world.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Each rank pushes a word to every rank, then reads the words of all, `rounds` times. A buffer is reused two allreduces
 * later; only the words themselves say that this is safe. */
class Exchange : public Registered {
 public:
  Exchange(const char* check, uint32_t world, uint32_t rounds, uint32_t buffers, bool messages)
      : Registered(check), world_(world), rounds_(rounds), buffers_(buffers), messages_(messages) {
    if (buffers < 2) options.must_fail = "deadlock"; /* a word is lost */
    options.causal_writes = messages; /* puts to one word are not ordered otherwise */
  }
  void build() override {
    ranks_ = make_ranks(world_, 2 * 8 * 8);
    for (uint32_t r = 0; r < world_; ++r) {
      ranks_[r].signals = messages_ ? MPK_SIGNALS_NVSHMEM : MPK_SIGNALS_DIRECT;
      label(heap<uint64_t>(ranks_[r]), "words of rank", static_cast<int>(r));
      static const char* const kNames[] = {"rank 0", "rank 1", "rank 2"};
      thread(kNames[r], r, [this, r] { exchange(r); });
    }
  }

 private:
  static uint64_t word_of(uint32_t tag, uint32_t rank) { return static_cast<uint64_t>(tag) << 32 | (tag * 16 + rank); }
  void exchange(uint32_t self) {
    for (uint32_t tag = 1; tag <= rounds_; ++tag) {
      uint64_t* words = heap<uint64_t>(ranks_[self]) + tag % buffers_ * 8;
      for (uint32_t pe = 0; pe < world_; ++pe) platform::put_word(&ranks_[self], pe, words + self, word_of(tag, self));
      for (uint32_t from = 0; from < world_; ++from) {
        uint64_t word = 0;
        if (!wait_until(&ranks_[self], [&] {
              word = platform::load<platform::Scope::kSystem>(words + from, platform::kRelaxed);
              return mpk_flagged_arrived(word, tag);
            }))
          return fail("aborted");
        MODEL_CHECK(word == word_of(tag, from), "rank %u, round %u: value of rank %u", self, tag, from);
      }
    }
  }
  uint32_t world_, rounds_, buffers_;
  bool messages_;
  mpk_rank* ranks_ = nullptr;
};

Exchange direct("flagged: 2 ranks, 4 rounds through 2 buffers", 2, 4, 2, false);
Exchange three("flagged: 3 ranks, 3 rounds through 2 buffers", 3, 3, 2, false);
Exchange as_messages("flagged: 2 ranks, 3 rounds, as messages", 2, 3, 2, true);
Exchange one_buffer("flagged: 2 ranks, 2 rounds through 1 buffer", 2, 2, 1, false);

/* mpk_flagged_store and mpk_wait_flagged, as the CPU target's kernels use them. */
class Kernel : public Registered {
 public:
  explicit Kernel(const char* check) : Registered(check) {}
  void build() override {
    rank_ = make_ranks(2, 64);
    rank_->status = make<mpk_status>();
    task_ = make<mpk_task>();
    task_->flag_count = 1;
    batch_ = make<mpk_batch>();
    batch_->epoch = 1;
    words_ = heap<uint64_t>(rank_[0]);
    label(words_, "words");
    thread("writer", 1, [this] {
      for (uint32_t i = 0; i < 2; ++i) mpk_flagged_store(words_ + i, static_cast<float>(i + 1), 1);
    });
    thread("reader", 0, [this] {
      mpk_kernel_args args = {};
      args.rank = rank_;
      args.task = task_;
      args.batch = batch_;
      MODEL_CHECK(mpk_wait_flagged(&args, words_, 2) == MPK_OK, "the wait failed");
      for (uint32_t i = 0; i < 2; ++i) {
        const float value = mpk_flagged_value(words_[i]); /* a plain access */
        MODEL_CHECK(value == static_cast<float>(i + 1), "word %u", i);
      }
    });
  }

 private:
  mpk_rank* rank_ = nullptr;
  mpk_task* task_ = nullptr;
  mpk_batch* batch_ = nullptr;
  uint64_t* words_ = nullptr;
};

Kernel kernel("flagged: read as plain memory after the wait");

}  // namespace
