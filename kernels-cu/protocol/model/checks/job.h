/* Whole runs of small hand-made graphs: the CPU target's own loops as threads (cpu/entry.cpp), with the batch step that
 * runs a fixed number of iterations. */
#ifndef MPK_MODEL_JOB_H
#define MPK_MODEL_JOB_H

#include "cpu/worker.h"
#include "model/checks/world.h"

namespace mpk {
namespace model {

/* One task of a job's graph. */
struct JobTask {
  uint32_t worker;       /* static placement */
  uint32_t trigger;      /* an event of this rank */
  int waits;             /* for this event, or -1 */
  uint16_t type;         /* MPK_TASK_TYPE_FIRST_REGISTERED: calls Job::run */
  int32_t arg;
};

/* One rank. */
class Job : public Registered {
 public:
  Job(const char* check, uint32_t workers, uint32_t schedulers, uint32_t iterations) : Registered(check), workers_(workers), schedulers_(schedulers), iterations_(iterations) {}

  void build() override {
    current() = this;
    rank = make_ranks(1, 1024);
    rank->num_workers = workers_;
    rank->num_schedulers = schedulers_;
    rank->placement = schedulers_ == 0 ? MPK_STATIC : MPK_DYNAMIC;
    rank->num_graphs = 1;
    rank->stall_op = 0xFFFFFFFFu;
    graph = rank->graphs = make<mpk_graph>();
    events = make<mpk_event>(8);
    events[0] = {1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0};
    events[1] = {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0};
    events[2] = {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0};
    tasks = make<mpk_task>(16);
    tasks[0].trigger_event = tasks[1].trigger_event = MPK_EVENT_INVALID;
    tasks[1].task_type = MPK_TASK_TYPE_BEGIN_TASK_GRAPH;
    dependencies = make<mpk_dependency>(16);
    graph->num_events = 3;
    graph->num_tasks = 2;
    graph->num_workers = workers_;
    graph->placement = rank->placement;
    graph->tasks = tasks;
    graph->events = events;
    graph->dependencies = dependencies;
    graph->counters = heap<uint64_t>(*rank);
    rank->batch_config = make<mpk_batch_config>();
    rank->batch_config->fixed_iterations = iterations_;
    rank->batch = make<mpk_batch>();
    rank->batch_output = make<mpk_batch_output>();
    label(rank->batch, "batch");
    label(graph->counters, "counters");
    mpk_kernel* kernels = make<mpk_kernel>(MPK_TASK_TYPE_FIRST_REGISTERED + 1);
    kernels[MPK_TASK_TYPE_FIRST_REGISTERED].run = [](const mpk_kernel_args* args) { return current()->run(args); };
    rank->kernels = kernels;
    rank->status = make<mpk_status>(workers_ + schedulers_);
    data = make<uint32_t>(8);
    label(data, "data");
    describe();
    if (rank->placement == MPK_STATIC) {
      uint32_t* first = make<uint32_t>(workers_ + 1);
      uint32_t* list = make<uint32_t>(16);
      uint32_t place = 0;
      for (uint32_t w = 0; w < workers_; ++w) {
        first[w] = place;
        for (uint32_t t = 2; t < graph->num_tasks; ++t)
          if (tasks[t].worker == w) list[place++] = t;
      }
      first[workers_] = place;
      graph->worker_first = first;
      graph->worker_tasks = list;
    } else {
      const uint64_t capacity = 8;
      rank->worker_queues = make_queues(workers_ * schedulers_, capacity, "worker queue");
      rank->scheduler_queues = make_queues(schedulers_, capacity, "scheduler queue");
      graph->launched = make<uint32_t>(8);
    }
    rank->batch_private = make<uint8_t>(mpk_batch_private_bytes(rank->batch_config));
    label(rank->batch_private, "batch state");
    if (mpk_cpu_begin(rank) != MPK_OK) fail("the job does not begin");
    for (uint32_t w = 0; w < workers_; ++w) {
      static const char* const kNames[] = {"worker 0", "worker 1", "worker 2", "worker 3"};
      thread(kNames[w], 0, [this, w] { mpk_cpu_worker(rank, w); });
    }
    for (uint32_t s = 0; s < schedulers_; ++s) {
      static const char* const kNames[] = {"scheduler 0", "scheduler 1"};
      thread(kNames[s], 0, [this, s] { mpk_cpu_scheduler(rank, s); });
    }
    more_threads();
  }

  void finish() override {
    if (rank->control->abort != MPK_OK) return ended_early();
    const uint32_t number = batch_state(rank)->iteration;
    MODEL_CHECK(number == iterations_ + 1, "the run ended in iteration %u", number);
    MODEL_CHECK(rank->control->progress == static_cast<uint64_t>(iterations_) * (graph->num_tasks - 2), "%llu tasks were counted",
                static_cast<unsigned long long>(rank->control->progress));
  }

 protected:
  /* Adds the events and tasks. */
  virtual void describe() = 0;
  /* The kernel of a task. */
  virtual int run(const mpk_kernel_args* args) = 0;
  virtual void more_threads() {}
  virtual void ended_early() { fail("the run was aborted"); }

  uint32_t add_event(uint32_t triggers, uint16_t type = MPK_EVENT_EMPTY) {
    events[graph->num_events] = {triggers, 0, 0, type, 0};
    return graph->num_events++;
  }
  /* Dynamic placement: an event launches a range, so the tasks of one event are added one after the other. */
  void add_task(const JobTask& task) {
    mpk_task& to = tasks[graph->num_tasks];
    to.trigger_event = make_event_id(MPK_EVENT_TAG_LOCAL, 0, task.trigger);
    to.task_type = task.type;
    to.worker = task.worker;
    to.args[0] = task.arg;
    to.first_dependency = graph->num_dependencies;
    if (task.waits >= 0) {
      dependencies[graph->num_dependencies++] = {static_cast<uint32_t>(task.waits), 0};
      to.num_dependencies = 1;
      mpk_event& launcher = events[task.waits];
      if (launcher.first_task == launcher.last_task) launcher.first_task = graph->num_tasks;
      launcher.last_task = graph->num_tasks + 1;
    }
    ++graph->num_tasks;
  }

  mpk_rank* rank = nullptr;
  mpk_graph* graph = nullptr;
  mpk_event* events = nullptr;
  mpk_task* tasks = nullptr;
  mpk_dependency* dependencies = nullptr;
  uint32_t* data = nullptr;
  uint32_t workers_, schedulers_, iterations_;

 private:
  static Job*& current() {
    static Job* job = nullptr;
    return job;
  }
};

}  // namespace model
}  // namespace mpk

#endif
