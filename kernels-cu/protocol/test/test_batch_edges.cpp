/* Edge cases of the batch step: no work, no decision, entries at any moment, the last numbers. */
#include <chrono>
#include <thread>
#include <vector>

#include "batch_step.h"
#include "check.h"
#include "slot_arrays.h"

namespace {

/* A rank with `slots` slots and one request of one token, for which there is no admission entry yet. */
struct OneRequest {
  mpk_request request = {0, 1, 1, 0, {}, 0, 0};
  mpk_admission admissions[4] = {{MPK_ADMIT, 0}};
  uint32_t num_admissions = 0;
  int32_t token = 1, row = 0;
  SlotArrays per_slot;
  mpk_request_output request_output{};
  mpk_event events[3] = {{1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0}, {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0}, {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0}};
  uint64_t counters[3 * MPK_COUNTER_STRIDE] = {};
  uint32_t worker_first[2] = {};
  mpk_batch_config config{};
  mpk_graph graph{};
  mpk_batch batch{};
  mpk_batch_output output{};
  mpk_control control{};
  uint8_t* sym[1] = {reinterpret_cast<uint8_t*>(&control)};
  std::vector<uint64_t> batch_private;
  mpk_rank rank{};

  explicit OneRequest(uint32_t slots) {
    config.max_batch = config.max_samples = slots;
    config.admission_ring = 4;
    config.page_size = config.num_pages = config.pages_per_slot = config.max_rows = config.num_requests = config.generate = 1;
    config.max_seq_len = 4;
    config.page_size = 4;
    config.tokens = &token;
    config.requests = &request;
    config.admissions = admissions;
    config.num_admissions = &num_admissions;
    batch_private.assign(mpk_batch_private_bytes(&config) / 8 + 1, 0);
    graph.num_events = 3;
    graph.rows = graph.active = graph.samples = graph.num_workers = 1;
    graph.events = events;
    graph.counters = counters;
    graph.worker_first = worker_first;
    per_slot.make(&batch, slots, config.pages_per_slot);
    batch.row_token = batch.row_active = batch.row_position = &row;
    output.requests = &request_output;
    rank.abi_version = MPK_ABI_VERSION;
    rank.world = rank.num_workers = rank.num_graphs = rank.oversubscribed = 1;
    rank.deadline_ns = 50000000;
    rank.sym = sym;
    rank.control = &control;
    rank.graphs = &graph;
    rank.batch_config = &config;
    rank.batch = &batch;
    rank.batch_output = &output;
    rank.batch_private = batch_private.data();
  }
};

/* Both parts of a batch step by one thread. */
int step_of(const mpk_rank& rank, bool* steady = nullptr) {
  mpk::PreparedStep prepared = {};
  const mpk::NextToken first = mpk::prepare_step(mpk::platform::OneThread(), &rank, &prepared);
  const int code = mpk::batch_step(mpk::platform::OneThread(), &rank, &prepared, first, 0, nullptr, [] {});
  if (steady != nullptr) *steady = prepared.steady;
  return code;
}

/* Nothing to do: the batch step waits without a deadline until an entry comes, an abort, or the time after which the kernel is
 * to end. The next launch continues with the same state. */
void idle_ends_as_told() {
  OneRequest one(1);
  one.rank.deadline_ns = 20000000; /* shorter than the waits */
  one.config.idle_exit_ns = 100000000;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_OK && one.batch.stop == 1 && one.control.parks == 2, "no end");
  /* Another launch: an entry comes, and later a stop. */
  one.config.idle_exit_ns = 0;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    __atomic_store_n(&one.num_admissions, 1u, __ATOMIC_RELEASE);
    mpk_cpu_wake(&one.num_admissions);
  });
  CHECK(mpk_cpu_begin(&one.rank) == MPK_OK && one.batch.stop == 0 && one.batch.num_rows == 1 && one.control.parks == 4, "no work");
  host.join();
  one.batch.next_token[0] = 7;
  one.admissions[1] = {MPK_STOP, 0};
  int32_t yielded = 0;
  one.output.tokens = mpk::batch_state(&one.rank)->output.tokens = &yielded;
  std::thread stop([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    __atomic_store_n(&one.num_admissions, 2u, __ATOMIC_RELEASE); /* no thread wakes it: it looks by itself */
  });
  CHECK(mpk::next_iteration(&one.rank, nullptr) == MPK_OK && one.batch.stop == 1, "no stop");
  stop.join();
  CHECK(yielded == 7 && one.request_output.finish == MPK_FINISH_LENGTH && one.output.decode_steps + one.output.prefill_iterations == 1, "the token is lost");
  /* An abort. */
  OneRequest other(1);
  std::thread abort([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    mpk_cpu_abort(&other.rank, MPK_ABORT_INTERRUPT);
  });
  CHECK(mpk_cpu_begin(&other.rank) == MPK_ABORT_INTERRUPT, "an endless wait");
  abort.join();
  other.control = {};
  other.rank.abi_version = MPK_ABI_VERSION + 1;
  CHECK(mpk_cpu_begin(&other.rank) == MPK_ABORT_KERNEL, "a foreign ABI is accepted");
}

/* A rank other than 0 waits for the decision after an iteration, for its deadline at most, and never takes a later
 * decision. */
void missing_decision_is_bounded() {
  OneRequest one(1);
  uint8_t* sym[2] = {nullptr, reinterpret_cast<uint8_t*>(&one.control)};
  one.rank.rank = 1;
  one.rank.world = 2;
  one.rank.sym = sym;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DEADLINE && one.control.abort == MPK_ABORT_DEADLINE, "an endless wait");
  one.control = {};
  one.control.decisions[1] = 5ull << 32;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DIVERGED, "a decision is skipped");
  /* An entry that this rank's host has not counted: the rank waits for it, for the deadline at most. */
  one.control = {};
  one.control.decisions[1] = (1ull << 32) | 1;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DEADLINE, "an entry that never comes");
}

/* Entries may come at any moment of a batch step, and their count may wrap. */
void entries_come_at_any_time() {
  for (uint32_t trial = 0; trial < 100; ++trial) {
    OneRequest one(4096);
    one.rank.deadline_ns = 10000000000ull;
    CHECK(mpk::batch_begin(&one.rank) == MPK_OK, "begin");
    mpk::batch_state(&one.rank)->iteration = 5;
    const uint32_t before = trial % 2 ? MPK_ENTRY_COUNT_MASK : 0;
    mpk::batch_state(&one.rank)->next_admission = before;
    one.admissions[before % 4] = {MPK_ADMIT, 0};
    __atomic_store_n(&one.num_admissions, before, __ATOMIC_RELEASE);
    std::thread step([&] { CHECK(step_of(one.rank) == MPK_OK, "the batch step"); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 + trial * 7));
    __atomic_store_n(&one.num_admissions, (before + 1) & MPK_ENTRY_COUNT_MASK, __ATOMIC_RELEASE);
    mpk_cpu_wake(&one.num_admissions);
    step.join();
    CHECK(mpk::batch_state(&one.rank)->iteration == 6 && one.batch.num_rows == 1, "trial %u: iteration %u, %u rows", trial,
          mpk::batch_state(&one.rank)->iteration, one.batch.num_rows);
  }
}

/* The last iteration, and the last epoch of a graph: one more ends the run with its own error. */
void numbers_do_not_wrap() {
  OneRequest one(1);
  one.config.generate = 0;
  one.config.fixed_iterations = UINT32_MAX;
  CHECK(mpk::batch_begin(&one.rank) == MPK_OK, "begin");
  mpk::batch_state(&one.rank)->iteration = MPK_LAST_ITERATION - 1;
  CHECK(step_of(one.rank) == MPK_OK && one.batch.iteration == MPK_LAST_ITERATION && one.batch.epoch == 1, "the last iteration");
  CHECK(step_of(one.rank) == MPK_ABORT_ITERATIONS, "an iteration after the last");
  mpk::batch_state(&one.rank)->iteration = 7;
  one.counters[MPK_EVENT_BEGIN * MPK_COUNTER_STRIDE] = MPK_LAST_ITERATION - 1;
  CHECK(step_of(one.rank) == MPK_OK && one.batch.epoch == MPK_LAST_ITERATION, "the last epoch");
  one.counters[MPK_EVENT_BEGIN * MPK_COUNTER_STRIDE] = MPK_LAST_ITERATION;
  CHECK(step_of(one.rank) == MPK_ABORT_ITERATIONS, "an epoch after the last");
  one.config.fixed_iterations = MPK_LAST_ITERATION;
  mpk::batch_state(&one.rank)->iteration = MPK_LAST_ITERATION;
  CHECK(step_of(one.rank) == MPK_OK && one.batch.stop == 1, "a stop after the last iteration");
}

/* Ranks compare hashes of their state. So a steady step has another hash where only a token differs. */
void hash_depends_on_tokens() {
  uint64_t hashes[2];
  for (int32_t token : {0, 1}) {
    OneRequest one(1);
    one.request.max_new_tokens = 3;
    one.num_admissions = 1;
    CHECK(mpk_cpu_begin(&one.rank) == MPK_OK && one.batch.num_rows == 1, "begin");
    one.batch.next_token[0] = token;
    bool steady = false;
    CHECK(step_of(one.rank, &steady) == MPK_OK && steady, "the step is not steady");
    hashes[token] = one.batch.hash;
  }
  CHECK(hashes[0] != hashes[1], "the hash does not depend on the token");
}

}  // namespace

int main() {
  idle_ends_as_told();
  missing_decision_is_bounded();
  entries_come_at_any_time();
  numbers_do_not_wrap();
  hash_depends_on_tokens();
  std::printf("batch step at its edges: ok\n");
}
