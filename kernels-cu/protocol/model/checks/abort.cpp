/* The abort: every kind of wait ends if any rank fails or a deadline passes, and the first cause stays, with its
 * origin. */
#include "kernel_wait.h"
#include "model/checks/job.h"
#include "ring.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Checks that a rank's abort word never has a code with another code's origin. */
void check_cause(const mpk_rank* rank, uint32_t codes[2]) {
  const uint64_t word = platform::load<platform::Scope::kSystem>(reinterpret_cast<const uint64_t*>(rank->control), platform::kRelaxed);
  const uint32_t code = static_cast<uint32_t>(word), origin = static_cast<uint32_t>(word >> 32);
  MODEL_CHECK(code != MPK_OK && origin < 2 && code == codes[origin], "code %u of rank %u", code, origin);
}

/* Two ranks fail at the same time, for different reasons, while others wait for something that never comes. */
class Waiters : public Registered {
 public:
  /* `first`, `second`: kinds of wait, on rank 1. */
  Waiters(const char* check, uint32_t first, uint32_t second) : Registered(check), kinds_{first, second} { options.aborts = true; }
  void build() override {
    ranks_ = make_ranks(2, 1024);
    mpk_rank& rank = ranks_[1];
    rank.status = make<mpk_status>(4);
    rank.remote_rings = sizeof(mpk_control) + 256;
    rank.remote_ring_capacity = 1;
    rank.remote_ring_bytes = 128;
    rank.remote_pushed = make<uint64_t>(2);
    rank.remote_pushed[0] = kRingPushLock; /* held by a thread that never returns */
    graph_ = make<mpk_graph>();
    events_ = make<mpk_event>();
    events_[0] = {1, 0, 0, MPK_EVENT_EMPTY, 1};
    graph_->events = events_;
    graph_->counters = heap<uint64_t>(rank);
    queue_ = make<mpk_queue>();
    queue_->slots = make<uint64_t>(1);
    queue_->slots[0] = 7;
    queue_->tail = 1; /* full */
    task_ = make<mpk_task>();
    task_->flag_count = 1;
    batch_ = make<mpk_batch>();
    batch_->epoch = 1;
    thread("fails on rank 0", 0, [this] { leave(0, MPK_ABORT_KERNEL); });
    thread("fails on rank 1", 1, [this] { leave(1, MPK_ABORT_INTERRUPT); });
    for (uint32_t i = 0; i < 2; ++i) {
      thread(i == 0 ? "waiter 0" : "waiter 1", 1, [this, i] {
        const int code = wait(kinds_[i]);
        MODEL_CHECK(code == MPK_ABORT_KERNEL || code == MPK_ABORT_INTERRUPT, "the wait ended with %d", code);
        MODEL_CHECK(abort_code(&ranks_[1]) == code, "the first cause did not stay");
        check_cause(&ranks_[1], codes_);
      });
    }
  }
  void finish() override {
    for (uint32_t r = 0; r < 2; ++r) check_cause(&ranks_[r], codes_);
  }

 private:
  void leave(uint32_t r, uint32_t code) {
    abort_broadcast(&ranks_[r], code);
    abort_out_of_reach(&ranks_[r]);
  }
  int wait(uint32_t kind) {
    const mpk_rank* rank = &ranks_[1];
    mpk_kernel_args args = {};
    switch (kind) {
      case 0: return event_wait(rank, graph_, 0, 1, 0, rank->status);
      case 1: return queue_push(rank, queue_, 3, rank->status);
      case 2: return ring_push(rank, 0, {0, 1, 0, 1}, rank->status);
      default:
        args.rank = rank;
        args.task = task_;
        args.batch = batch_;
        return mpk_wait_flagged(&args, heap<uint64_t>(*rank) + 16, 1);
    }
  }
  uint32_t kinds_[2];
  uint32_t codes_[2] = {MPK_ABORT_KERNEL, MPK_ABORT_INTERRUPT};
  mpk_rank* ranks_ = nullptr;
  mpk_graph* graph_ = nullptr;
  mpk_event* events_ = nullptr;
  mpk_queue* queue_ = nullptr;
  mpk_task* task_ = nullptr;
  mpk_batch* batch_ = nullptr;
};

Waiters event_and_queue("abort: of an event's wait and a full queue's", 0, 1);
Waiters ring_and_flags("abort: of a ring's wait and flagged words'", 2, 3);

/* Deadlines: two threads of rank 0 and one of rank 1 each wait for an event. Rank 0's event comes, rank 1's does not. A
 * thread whose deadline passes tells all ranks. */
class Deadlines : public Registered {
 public:
  explicit Deadlines(const char* check) : Registered(check) { options.aborts = options.timeouts = true; }
  void build() override {
    ranks_ = make_ranks(2, 64);
    graphs_ = make<mpk_graph>(2);
    events_ = make<mpk_event>();
    events_[0] = {1, 0, 0, MPK_EVENT_EMPTY, 1};
    for (uint32_t r = 0; r < 2; ++r) {
      graphs_[r].events = events_;
      graphs_[r].counters = heap<uint64_t>(ranks_[r]);
      label(graphs_[r].counters, "counter of rank", static_cast<int>(r));
    }
    for (uint32_t i = 0; i < 3; ++i) {
      const uint32_t r = i / 2;
      thread(i == 0 ? "waiter 0 of rank 0" : i == 1 ? "waiter 1 of rank 0" : "waiter of rank 1", r, [this, r] {
        const int code = event_wait(&ranks_[r], &graphs_[r], 0, 1, 0, nullptr);
        if (code == MPK_OK) {
          MODEL_CHECK(r == 0, "an event that did not happen");
          return;
        }
        MODEL_CHECK(code == MPK_ABORT_DEADLINE, "the wait ended with %d", code);
        abort_broadcast(&ranks_[r], static_cast<uint32_t>(code));
      });
    }
    thread("trigger", 1, [this] { trigger_remote(&ranks_[1], &graphs_[1], 0, 0); });
  }
  /* Time passes until the first deadline has been reported. */
  bool may_wait() override { return ranks_[0].control->abort == MPK_OK && ranks_[1].control->abort == MPK_OK; }
  void finish() override {
    for (uint32_t r = 0; r < 2; ++r) MODEL_CHECK(ranks_[r].control->abort == MPK_ABORT_DEADLINE, "rank %u has not been told", r);
  }

 private:
  mpk_rank* ranks_ = nullptr;
  mpk_graph* graphs_ = nullptr;
  mpk_event* events_ = nullptr;
};

Deadlines deadlines("abort: deadlines at any time");

/* A task fails in one execution or another: all loops of the rank leave. */
class Failing : public Job {
 public:
  Failing(const char* check, uint32_t workers, uint32_t schedulers) : Job(check, workers, schedulers, 1) { options.aborts = true; }

 protected:
  void describe() override {
    const bool dynamic = schedulers_ != 0;
    const uint32_t done = add_event(1, dynamic ? MPK_EVENT_LAUNCH_TASKS : MPK_EVENT_EMPTY);
    add_task({0, done, dynamic ? static_cast<int>(MPK_EVENT_BEGIN) : -1, MPK_TASK_TYPE_FIRST_REGISTERED, 0});
    add_task({workers_ - 1, MPK_EVENT_END, static_cast<int>(done), MPK_TASK_TYPE_FIRST_REGISTERED, 1});
  }
  int run(const mpk_kernel_args* args) override {
    if (args->task->args[0] == 0) return choose(2) == 0 ? MPK_OK : MPK_ABORT_KERNEL;
    return MPK_OK;
  }
  void ended_early() override { MODEL_CHECK(rank->control->abort == MPK_ABORT_KERNEL, "code %u", rank->control->abort); }
};

Failing failing_static("abort: a task fails, static, 2 workers", 2, 0);
Failing failing_dynamic("abort: a task fails, dynamic, 2 workers", 2, 1);

}  // namespace
