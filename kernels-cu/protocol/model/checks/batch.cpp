/* The batch step at work. The host gets results while the run goes on, and reuses entries of the request table. All
 * ranks apply the same entries of the admission ring in the same batch step, although their hosts' writes become
 * visible in any order. */
#include <vector>

#include "batch_loop.h"
#include "model/checks/server.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Two workers and the host. The decode graph has no task for worker 0, so it may still be handing out results when the next
 * batch step is due. */
class Serving : public Registered {
 public:
  Serving(const char* check, uint32_t num_requests, uint32_t ring) : Registered(check), num_requests_(num_requests), ring_(ring) {}
  void build() override {
    current() = this;
    mpk_rank* rank = make_ranks(1, 1024);
    s_.build(rank, 4, ring_, 2);
    s_.set_private();
    mpk_kernel* kernels = make<mpk_kernel>(MPK_TASK_TYPE_FIRST_REGISTERED + 1);
    kernels[MPK_TASK_TYPE_FIRST_REGISTERED].run = [](const mpk_kernel_args* args) { return current()->run(args); };
    rank->kernels = kernels;
    data_ = make<uint32_t>();
    label(data_, "data");
    /* Decode: worker 1 samples. Prefill: worker 0 writes; worker 1 waits for that, reads it and samples. */
    for (uint32_t g = 0; g < 2; ++g) {
      mpk_task* tasks = make<mpk_task>(4);
      mpk_dependency* dependencies = make<mpk_dependency>();
      uint32_t* first = make<uint32_t>(3);
      uint32_t* list = make<uint32_t>(2);
      tasks[1].task_type = MPK_TASK_TYPE_BEGIN_TASK_GRAPH;
      const uint32_t last = 2 + g;
      for (uint32_t t = 2; t <= last; ++t) {
        tasks[t].task_type = MPK_TASK_TYPE_FIRST_REGISTERED;
        tasks[t].args[0] = t == last;
        tasks[t].trigger_event = make_event_id(MPK_EVENT_TAG_LOCAL, 0, t == last ? MPK_EVENT_END : 3u);
        list[t - 2] = t;
      }
      dependencies[0] = {3, 0};
      tasks[last].num_dependencies = static_cast<uint16_t>(g);
      first[1] = g;
      first[2] = g + 1;
      s_.graphs[g].num_tasks = last + 1;
      s_.graphs[g].tasks = tasks;
      s_.graphs[g].dependencies = dependencies;
      s_.graphs[g].worker_first = first;
      s_.graphs[g].worker_tasks = list;
    }
    /* As on a GPU, the first batch step runs while the other workers already wait. */
    thread("worker 0", 0, [this] {
      MODEL_CHECK(mpk_cpu_begin(s_.rank) == MPK_OK, "the run does not begin");
      mpk_cpu_worker(s_.rank, 0);
    });
    thread("worker 1", 0, [this] { mpk_cpu_worker(s_.rank, 1); });
    thread("host", kHost, [this] { host(); });
  }

 private:
  int run(const mpk_kernel_args* args) {
    if (args->task->args[0] == 0) {
      *data_ = args->batch->iteration;
      return MPK_OK;
    }
    if (args->batch->graph == 1) MODEL_CHECK(*data_ == args->batch->iteration, "iteration %u: the value is %u", args->batch->iteration, *data_);
    s_.sample();
    return MPK_OK;
  }
  void host() {
    for (uint32_t i = 1; i <= num_requests_; ++i) {
      const int32_t number = static_cast<int32_t>(i) * 7;
      s_.write_request(number);
      if (i == num_requests_ && ring_ > 1) s_.write_entry(MPK_STOP);
      s_.count();
      if (i == 1 && ring_ > 1) {
        /* Streamed: read the first token as soon as it is counted. */
        uint32_t tokens = 0;
        if (!wait_until(s_.rank, [&] {
              tokens = platform::load<platform::Scope::kSystem>(&s_.output->requests[0].num_tokens, platform::kAcquire);
              return tokens != 0;
            }))
          return fail("aborted");
        MODEL_CHECK(tokens <= 2 && s_.output->tokens[tokens - 1] != 0, "a token is not there");
      }
      if (ring_ == 1) {
        /* Wait until the entry of the ring is free. */
        if (!s_.await(&s_.output->entries_taken, s_.written)) return fail("aborted");
        if (i == num_requests_) {
          s_.write_entry(MPK_STOP);
          s_.count();
        }
      }
      /* The end shows in the request's finish, or in the number of finished requests; then its table entry is free. */
      if (ring_ > 1 ? !s_.await(&s_.output->requests[0].finish, uint32_t{MPK_FINISH_LENGTH}) : !s_.await(&s_.output->finished, uint64_t{i})) return fail("aborted");
      s_.check_result(number);
    }
  }
  static Serving*& current() {
    static Serving* serving = nullptr;
    return serving;
  }
  uint32_t num_requests_, ring_;
  Server s_;
  uint32_t* data_ = nullptr;
};

Serving one_request("batch: 1 request, streamed", 1, 2);
Serving reused("batch: 2 requests through 1 entry of each table", 2, 1);

/* A thread that runs nothing but batch steps, and prepares each of them while a worker runs the task. A preparation that writes what the
 * task reads, or reads what it writes, is a data race. */
class Ahead : public Registered {
 public:
  explicit Ahead(const char* check, uint32_t new_tokens) : Registered(check), new_tokens_(new_tokens) {}
  void build() override {
    mpk_rank* rank = make_ranks(1, 1024);
    s_.build(rank, 3, 2, new_tokens_);
    s_.set_private();
    for (uint32_t g = 0; g < 2; ++g) {
      uint32_t* first = make<uint32_t>(3);
      first[1] = first[2] = 1; /* number of tasks in the lists */
      s_.graphs[g].worker_first = first;
    }
    s_.write_request(7);
    s_.write_entry(MPK_STOP);
    *s_.num_admissions = s_.written;
    thread("batch steps", 0, [this] {
      MODEL_CHECK(batch_begin(s_.rank) == MPK_OK, "the run does not begin");
      PreparedStep prepared = {};
      MODEL_CHECK(batch_loop(platform::OneThread(), s_.rank, &prepared, [] {}, [] {}, [] {}) == MPK_OK, "the run fails");
    });
    thread("worker", 0, [this] { work(); });
  }
  void finish() override { s_.check_result(7); }

 private:
  void work() {
    for (uint32_t iteration = 1;; ++iteration) {
      Publication now = {};
      if (!wait_until(s_.rank, [&] {
            now = read_publication(s_.rank);
            return now.iteration == iteration;
          }))
        return fail("aborted");
      if (now.stop) return;
      const mpk_graph* graph = &s_.rank->graphs[now.graph];
      MODEL_CHECK(s_.rank->batch->epoch == (now.graph == 0 ? iteration - 1 : 1), "iteration %u: epoch %u", iteration, s_.rank->batch->epoch);
      const mpk_batch* batch = s_.rank->batch;
      MODEL_CHECK(batch->active_context[0] + batch->active_num_rows[0] == batch->row_position[batch->num_rows - 1] + 1, "iteration %u: context %d", iteration, batch->active_context[0]);
      s_.sample();
      trigger_local(graph, MPK_EVENT_END, graph->events[MPK_EVENT_END]);
      count_progress(s_.rank);
    }
  }
  uint32_t new_tokens_;
  Server s_;
};

Ahead ahead("batch: prepared while a task runs", long_run() ? kMostNewTokens : 4);

/* Two ranks with their hosts. Rank 0's host counts an entry last. Ranks exchange data in each iteration. */
class Admission : public Registered {
 public:
  /* `steps`: what the hosts add in each step: an admission, a stop, both, or a cancellation of nothing, which leaves
   * no work. */
  enum Step { kAdmit, kStop, kBoth, kNothing };
  Admission(const char* check, std::vector<Step> steps, uint32_t new_tokens) : Registered(check), steps_(std::move(steps)), new_tokens_(new_tokens) {}
  void build() override {
    mpk_rank* ranks = make_ranks(2, 1024);
    for (uint32_t r = 0; r < 2; ++r) {
      s_[r].build(&ranks[r], 4, 4, new_tokens_);
      s_[r].set_private();
    }
    confirmed_ = make<uint32_t>();
    label(confirmed_, "confirmed");
    hashes_ = make<uint64_t>(2);
    for (uint32_t r = 0; r < 2; ++r) thread(r == 0 ? "rank 0" : "rank 1", r, [this, r] { run(r); });
    thread("host 1", kHost + 1, [this] { host(1); });
    thread("host 0", kHost, [this] { host(0); });
  }
  void finish() override { MODEL_CHECK(hashes_[0] == hashes_[1], "the ranks' batches differ"); }

 private:
  void run(uint32_t r) {
    const mpk_rank* rank = s_[r].rank;
    MODEL_CHECK(batch_begin(rank) == MPK_OK, "the run does not begin");
    PreparedStep prepared = {};
    NextToken first = prepare_step(platform::OneThread(), rank, &prepared);
    for (uint32_t iteration = 1;; ++iteration) {
      const int code = next_iteration(platform::OneThread(), rank, &prepared, first, nullptr, [] {}, [] {});
      MODEL_CHECK(code == MPK_OK, "rank %u, iteration %u: the batch step ends with %d", r, iteration, code);
      if (rank->batch->stop) break;
      /* The decision may be there or not. */
      first = prepare_step(platform::OneThread(), rank, &prepared);
      const mpk_graph* graph = &rank->graphs[rank->batch->graph];
      trigger_remote(rank, graph, 1 - r, 3);
      MODEL_CHECK(event_wait(rank, graph, 3, rank->batch->epoch, 0, nullptr) == MPK_OK, "the exchange failed");
      s_[r].sample();
    }
    hashes_[r] = batch_state(rank)->hash;
  }
  void host(uint32_t r) {
    for (uint32_t step = 0; step < steps_.size(); ++step) {
      if (steps_[step] == kAdmit || steps_[step] == kBoth) s_[r].write_request(7);
      if (steps_[step] == kStop || steps_[step] == kBoth) s_[r].write_entry(MPK_STOP);
      if (steps_[step] == kNothing) s_[r].write_entry(MPK_CANCEL);
      if (r == 0) {
        /* Stands for a message between the hosts. */
        if (!wait_until(s_[0].rank, [&] {
              return platform::load<platform::Scope::kSystem>(confirmed_, platform::kAcquire) > step;
            }))
          return fail("aborted");
        s_[0].count();
      } else {
        s_[1].count();
        platform::store<platform::Scope::kSystem>(confirmed_, step + 1, platform::kRelease);
      }
    }
  }
  std::vector<Step> steps_;
  uint32_t new_tokens_;
  Server s_[2];
  uint32_t* confirmed_ = nullptr;
  uint64_t* hashes_ = nullptr;
};

Admission together("batch: 2 ranks, entries come together", {Admission::kBoth}, 3);
Admission apart("batch: 2 ranks, entries come one by one", {Admission::kAdmit, Admission::kStop}, long_run() ? kMostNewTokens : 3);
Admission without_work("batch: 2 ranks, an entry that brings no work", {Admission::kNothing, Admission::kBoth}, 1);

}  // namespace
