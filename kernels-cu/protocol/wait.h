/* The bounded wait: the only way in which the protocol waits.
 *
 * A loop tests what it waits for and, while the test fails, calls `Wait::poll` with the value that it saw. The wait
 * ends if the rank is aborted, or if neither that value nor the rank's progress changes for a deadline. In the
 * second case it records in mpk_status what it waited for, and aborts this rank. No deadline runs while the rank is
 * parked. A loop that leaves with the code calls abort_broadcast. */
#ifndef MPK_PROTOCOL_WAIT_H
#define MPK_PROTOCOL_WAIT_H

#include "abort.h"

namespace mpk {

/* Records a loop's state for the host's report. Relaxed: the host reads it at any time and derives no order
 * from it; after the threads have ended it is exact. */
template <typename T>
MPK_DEVICE void report(T* field, T value) {
  platform::store<platform::Scope::kSystem>(field, value, platform::kRelaxed);
}

MPK_DEVICE void report_state(mpk_status* status, uint32_t state) {
  if (status != nullptr) report(&status->state, state);
}

MPK_DEVICE void report_wait(mpk_status* status, uint32_t state, uint64_t event, uint64_t wanted, uint64_t seen) {
  if (status == nullptr) return;
  report(&status->event, event);
  report(&status->wanted, wanted);
  report(&status->seen, seen);
  report(&status->state, state);
}

/* The loop runs this task now: the first 16 bytes of its status. */
MPK_DEVICE void report_task(mpk_status* status, uint32_t graph, uint32_t task, uint32_t iteration) {
  static_assert(offsetof(mpk_status, state) == 0 && offsetof(mpk_status, graph) == 4 && offsetof(mpk_status, task) == 8 &&
                    offsetof(mpk_status, iteration) == 12 && sizeof(mpk_status) % 16 == 0,
                "stored together");
  platform::store_four(&status->state, MPK_WORKER_RUNS, graph, task, iteration);
}

/* A sleeping thread checks the abort word at least this often. */
constexpr uint64_t kLongestParkNs = 20000000;

class Wait {
 public:
  /* `status` may be NULL, for a caller that is neither a worker nor a scheduler. */
  MPK_DEVICE Wait(const mpk_rank* rank, mpk_status* status, uint64_t deadline_ns)
      : rank_(rank), status_(status), deadline_ns_(deadline_ns), backoff_(rank) {}
  MPK_DEVICE Wait(const mpk_rank* rank, mpk_status* status) : Wait(rank, status, rank->deadline_ns) {}

  /* The value has arrived: the next poll starts a new wait. */
  MPK_DEVICE void reset() {
    if (since_ns_ != 0) {
      since_ns_ = 0;
      backoff_.reset();
    }
    polls_ = 0;
  }

  /* MPK_OK: test again. Otherwise the caller must leave with this abort code. */
  MPK_DEVICE int poll(uint64_t seen) {
    const int code = abort_code(rank_);
    if (code != MPK_OK) {
      report_seen(seen);
      return code;
    }
    const bool look = backoff_.step();
    if (!look && polls_++ != 0) return MPK_OK;
    ++polls_;
    const uint64_t now = platform::clock_ns();
    /* Relaxed: it only matters whether they change; pairs with count_progress and with Parked. Both only grow, so
     * their sum changes if one does. */
    const uint32_t parks = platform::load<platform::Scope::kDevice>(&rank_->control->parks, platform::kRelaxed);
    const uint64_t progress = platform::load<platform::Scope::kDevice>(&rank_->control->progress, platform::kRelaxed) + parks;
    if (since_ns_ == 0 || seen != seen_ || progress != progress_) {
      since_ns_ = now;
      seen_ = seen;
      progress_ = progress;
      return MPK_OK;
    }
    if (parks % 2 != 0) {
      /* The rank has nothing to run, for an unknown time: the deadline's clock stands still. */
      since_ns_ = now;
      platform::park(&rank_->control->parks, parks, kLongestParkNs);
      return MPK_OK;
    }
    if (now - since_ns_ < deadline_ns_) return MPK_OK;
    since_ns_ = kTimedOut;
    report_seen(seen);
    if (status_ != nullptr) report(&status_->timed_out, 1u);
    /* Only this rank is aborted here; the loop that leaves with the code tells the others. That takes NVSHMEM calls,
     * which would make the compiler spill registers if they were in the middle of a task's code. */
    set_abort(rank_->control, MPK_ABORT_DEADLINE, rank_->rank);
    return abort_code(rank_);
  }

  /* Whether the last poll found that the deadline had passed. */
  MPK_DEVICE bool timed_out() const { return since_ns_ == kTimedOut; }

 private:
  MPK_DEVICE void report_seen(uint64_t seen) {
    if (status_ != nullptr) report(&status_->seen, seen);
  }

  static constexpr uint64_t kTimedOut = ~uint64_t{0};

  const mpk_rank* rank_;
  mpk_status* status_;
  uint64_t deadline_ns_;
  uint64_t since_ns_ = 0, seen_ = 0, progress_ = 0;
  uint32_t polls_ = 0;
  platform::Backoff backoff_;
};

/* Used by the thread that runs the batch step. While the object lives, the rank has nothing to run, and all of its waits
 * continue without a deadline. */
class Parked {
 public:
  MPK_DEVICE explicit Parked(const mpk_rank* rank) : word_(&rank->control->parks) { add(); }
  MPK_DEVICE ~Parked() {
    add();
    platform::wake(word_);
  }
  Parked(const Parked&) = delete;
  Parked& operator=(const Parked&) = delete;

 private:
  /* Relaxed: pairs with Wait::poll, which derives no order from it. There is one writer, the thread that runs the
   * batch step. */
  MPK_DEVICE void add() {
    const uint32_t parks = platform::load<platform::Scope::kDevice>(word_, platform::kRelaxed);
    platform::store<platform::Scope::kDevice>(word_, parks + 1, platform::kRelaxed);
  }
  uint32_t* word_;
};

/* One turn of that thread's wait: sleeps for a bounded time, until `word` differs from `seen`. MPK_OK: look again. Otherwise the
 * caller must leave with this abort code. */
MPK_DEVICE int park(const mpk_rank* rank, const uint32_t* word, uint32_t seen, uint64_t longest_ns = kLongestParkNs) {
  const int code = abort_code(rank);
  if (code != MPK_OK) return code;
  if (rank->host_abort != nullptr) {
    /* Possibly no other thread of the block checks it now. Relaxed: only the requested code matters. */
    const uint32_t wish = static_cast<uint32_t>(platform::load<platform::Scope::kSystem>(rank->host_abort, platform::kRelaxed));
    if (wish != MPK_OK) return static_cast<int>(wish);
  }
  platform::park(word, seen, longest_ns);
  return MPK_OK;
}

/* Counts one more finished task of this rank; its worker does nothing more for it. Release: pairs with
 * claim_batch_step. */
MPK_DEVICE void count_progress(const mpk_rank* rank) {
  platform::fetch_add<platform::Scope::kDevice>(&rank->control->progress, uint64_t{1}, platform::kRelease);
}

/* Waits that only follow from another thread's wait get a longer deadline, so that the thread which knows
 * the cause (event and counts) reports it. */
MPK_DEVICE uint64_t follower_deadline_ns(const mpk_rank* rank) { return rank->deadline_ns + rank->deadline_ns / 4; }

}  // namespace mpk

#endif
