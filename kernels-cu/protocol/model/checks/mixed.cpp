/* Graphs of both placements in one run: the batch step switches from one to the other and back. Prompts run in a graph of two rows,
 * single tokens in a graph of one row. Kernels read the batch, and data that only the other placement's iterations write, so work
 * of an iteration that has ended would be a data race. */
#include "model/checks/server.h"

namespace {

using namespace mpk;
using namespace mpk::model;

constexpr uint32_t kNewTokens = 2;

/* Workers and a scheduler. All entries are there from the start: requests, one after the other in one slot, and the
 * stop. */
class Mixed : public Registered {
 public:
  Mixed(const char* check, bool dynamic_decode, uint32_t workers, uint32_t requests)
      : Registered(check), dynamic_decode_(dynamic_decode), workers_(workers), requests_(requests) {}

  void build() override {
    current() = this;
    mpk_rank* rank = make_ranks(1, 1024);
    s_.build(rank, 4, 4, kNewTokens);
    rank->placement = MPK_MIXED;
    rank->num_workers = workers_;
    rank->num_schedulers = 1;
    rank->status = make<mpk_status>(workers_ + 1);
    rank->worker_queues = make_queues(workers_, 8, "worker queue");
    rank->scheduler_queues = make_queues(1, 8, "scheduler queue");
    mpk_kernel* kernels = make<mpk_kernel>(MPK_TASK_TYPE_FIRST_REGISTERED + 1);
    kernels[MPK_TASK_TYPE_FIRST_REGISTERED].run = [](const mpk_kernel_args* args) { return current()->run(args); };
    rank->kernels = kernels;
    data_ = make<uint32_t>();
    label(data_, "data");
    for (uint32_t g = 0; g < 2; ++g) describe(&s_.graphs[g], (g == 0) == dynamic_decode_, g);
    enter_requests();
    s_.set_private();
    if (mpk_cpu_begin(rank) != MPK_OK) fail("the run does not begin");
    for (uint32_t w = 0; w < workers_; ++w) thread(w == 0 ? "worker 0" : "worker 1", 0, [this, w] { mpk_cpu_worker(s_.rank, w); });
    thread("scheduler", 0, [this] { mpk_cpu_scheduler(s_.rank, 0); });
  }

  void finish() override {
    if (s_.rank->control->abort != MPK_OK) return fail("the run was aborted");
    for (uint32_t r = 0; r < requests_; ++r) {
      int32_t token = first_of(r) + static_cast<int32_t>(kPrompt) - 1;
      MODEL_CHECK(s_.output->requests[r].finish == MPK_FINISH_LENGTH, "request %u has not ended", r);
      for (uint32_t i = 0; i < kNewTokens; ++i) {
        token = Server::token_after(token, static_cast<int32_t>(kPrompt - 1 + i));
        MODEL_CHECK(s_.output->tokens[r * kNewTokens + i] == token, "token %u of request %u is %d", i, r, s_.output->tokens[r * kNewTokens + i]);
      }
    }
    for (uint32_t g = 0; g < 2; ++g) {
      const uint64_t runs = s_.graphs[g].counters[MPK_EVENT_BEGIN * MPK_COUNTER_STRIDE];
      MODEL_CHECK(runs == requests_, "graph %u ran %llu times", g, static_cast<unsigned long long>(runs));
    }
  }

 private:
  /* A single token: one task samples it. Prompts: the first task writes; the last one waits for that, reads it and
   * samples. */
  void describe(mpk_graph* graph, bool dynamic, uint32_t prompts) {
    const uint32_t last = 2 + prompts;
    mpk_task* tasks = make<mpk_task>(4);
    mpk_event* events = make<mpk_event>(4);
    events[0] = {1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0};
    events[1] = {1, dynamic ? 2u : 0u, dynamic ? 3u : 0u, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0};
    events[2] = {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0};
    events[3] = {1, dynamic ? 3u : 0u, dynamic ? 4u : 0u, static_cast<uint16_t>(dynamic ? MPK_EVENT_LAUNCH_TASKS : MPK_EVENT_EMPTY), 0};
    tasks[1].task_type = MPK_TASK_TYPE_BEGIN_TASK_GRAPH;
    tasks[0].trigger_event = tasks[1].trigger_event = MPK_EVENT_INVALID;
    for (uint32_t t = 2; t <= last; ++t) {
      tasks[t].task_type = MPK_TASK_TYPE_FIRST_REGISTERED;
      tasks[t].args[0] = t == last;
      tasks[t].trigger_event = make_event_id(MPK_EVENT_TAG_LOCAL, 0, t == last ? MPK_EVENT_END : 3u);
    }
    mpk_dependency* dependencies = make<mpk_dependency>(2);
    dependencies[0] = {MPK_EVENT_BEGIN, 0};
    dependencies[1] = {3, 0};
    tasks[2].num_dependencies = dynamic;
    if (prompts != 0) {
      tasks[last].first_dependency = 1;
      tasks[last].num_dependencies = 1;
    }
    graph->placement = dynamic ? MPK_DYNAMIC : MPK_STATIC;
    graph->num_tasks = last + 1;
    graph->num_dependencies = 2;
    graph->num_workers = workers_;
    graph->tasks = tasks;
    graph->events = events;
    graph->dependencies = dependencies;
    graph->launched = make<uint32_t>(4);
    if (dynamic) return;
    /* The last task belongs to the last worker. */
    uint32_t* first = make<uint32_t>(workers_ + 1);
    uint32_t* list = make<uint32_t>(2);
    for (uint32_t t = 2; t <= last; ++t) list[t - 2] = t;
    for (uint32_t w = 1; w < workers_; ++w) first[w] = prompts;
    first[workers_] = prompts + 1;
    graph->worker_first = first;
    graph->worker_tasks = list;
  }

  static int32_t first_of(uint32_t request) { return static_cast<int32_t>(request) * 50 + 7; }

  void enter_requests() {
    mpk_batch_config* config = s_.config;
    config->num_requests = requests_;
    config->tokens = make<int32_t>(requests_ * kPrompt);
    config->requests = s_.requests = make<mpk_request>(requests_);
    s_.output->requests = make<mpk_request_output>(requests_);
    s_.output->tokens = make<int32_t>(requests_ * kNewTokens);
    for (uint32_t r = 0; r < requests_; ++r) {
      for (uint32_t i = 0; i < kPrompt; ++i) config->tokens[r * kPrompt + i] = first_of(r) + static_cast<int32_t>(i);
      mpk_request& request = s_.requests[r];
      request.first_token = r * kPrompt;
      request.num_prompt_tokens = kPrompt;
      request.max_new_tokens = kNewTokens;
      request.first_output = r * kNewTokens;
      s_.admissions[r] = mpk_admission{MPK_ADMIT, r};
    }
    s_.admissions[requests_] = mpk_admission{MPK_STOP, 0};
    *s_.num_admissions = requests_ + 1;
  }

  int run(const mpk_kernel_args* args) {
    const uint32_t iteration = args->batch->iteration;
    if (args->task->args[0] == 0) {
      *data_ = iteration;
      return MPK_OK;
    }
    /* What the last prompt iteration wrote is still there in the next iteration. */
    const uint32_t written = args->batch->graph == 1 ? iteration : iteration - 1;
    MODEL_CHECK(*data_ == written, "iteration %u: the value is %u", iteration, *data_);
    s_.sample();
    return MPK_OK;
  }
  static Mixed*& current() {
    static Mixed* mixed = nullptr;
    return mixed;
  }
  bool dynamic_decode_;
  uint32_t workers_, requests_;
  Server s_;
  uint32_t* data_ = nullptr;
};

Mixed to_dynamic("mixed: static prompts, dynamic decode, and back", true, 1, 2);
Mixed to_static("mixed: dynamic prompts, static decode, and back", false, 1, 2);
Mixed two_to_dynamic("mixed: static prompts, 2 workers", true, 2, long_run() ? 3 : 2);
Mixed two_to_static("mixed: dynamic prompts, 2 workers", false, 2, long_run() ? 3 : 2);

}  // namespace
