/* Iterations: publication, their end, the batch step by exactly one thread, and the end of the run. The CPU target's own
 * loops run graphs of two and three tasks. Kernels read the batch, so a batch step that runs too early is a data race. */
#include "model/checks/job.h"

namespace {

using namespace mpk;
using namespace mpk::model;

/* Task 0 writes, task 1 waits for it and reads. */
int work(const mpk_kernel_args* args, uint32_t* data) {
  const mpk_batch* batch = args->batch;
  const int32_t which = args->task->args[0];
  if (which == 0) {
    data[0] = batch->iteration * 100 + batch->epoch;
  } else if (which == 1) {
    MODEL_CHECK(data[0] == batch->iteration * 100 + batch->epoch, "iteration %u: the value is %u", batch->iteration, data[0]);
  } else {
    data[which] = batch->iteration;
  }
  return MPK_OK;
}

/* Static placement: two workers with a task each, or all tasks on the last worker. */
class Static : public Job {
 public:
  Static(const char* check, uint32_t workers, uint32_t iterations, bool spread) : Job(check, workers, 0, iterations), spread_(spread) {}

 protected:
  void describe() override {
    const uint32_t written = add_event(1);
    add_task({spread_ ? 0 : workers_ - 1, written, -1, MPK_TASK_TYPE_FIRST_REGISTERED, 0});
    add_task({workers_ - 1, MPK_EVENT_END, static_cast<int>(written), MPK_TASK_TYPE_FIRST_REGISTERED, 1});
    if (spread_ && workers_ > 2) {
      events[MPK_EVENT_END].num_triggers = 2;
      add_task({1, MPK_EVENT_END, -1, MPK_TASK_TYPE_FIRST_REGISTERED, 2});
    }
  }
  int run(const mpk_kernel_args* args) override { return work(args, data); }
  bool spread_;
};

Static two("iteration: static, 2 workers", 2, long_run() ? 5 : 3, true);
Static three("iteration: static, 3 workers", 3, long_run() ? 2 : 1, true);
Static idle("iteration: static, 2 workers, 1 without work", 2, 3, false);

/* A task that triggers nothing: only its count keeps the batch constant. */
class Untriggered : public Job {
 public:
  Untriggered(const char* check, uint32_t schedulers) : Job(check, 2, schedulers, 2) {}

 protected:
  void describe() override {
    if (schedulers_ == 0) {
      add_task({0, MPK_EVENT_END, -1, MPK_TASK_TYPE_FIRST_REGISTERED, 2});
      add_task({1, MPK_EVENT_END, -1, MPK_TASK_TYPE_FIRST_REGISTERED, 3});
    } else {
      add_task({0, MPK_EVENT_END, MPK_EVENT_BEGIN, MPK_TASK_TYPE_FIRST_REGISTERED, 2});
      add_task({0, MPK_EVENT_END, MPK_EVENT_BEGIN, MPK_TASK_TYPE_FIRST_REGISTERED, 3});
    }
    tasks[3].trigger_event = MPK_EVENT_INVALID;
  }
  int run(const mpk_kernel_args* args) override { return work(args, data); }
};

Untriggered untriggered("iteration: static, a task without a trigger", 0);
Untriggered untriggered_dynamic("iteration: dynamic, a task without a trigger", 1);

/* Dynamic placement: the scheduler queues the tasks and runs the batch step; task 0 ends the workers. */
class Dynamic : public Job {
 public:
  Dynamic(const char* check, uint32_t workers, uint32_t schedulers, uint32_t iterations) : Job(check, workers, schedulers, iterations) {}

 protected:
  void describe() override {
    const uint32_t written = add_event(1, MPK_EVENT_LAUNCH_TASKS);
    add_task({0, written, MPK_EVENT_BEGIN, MPK_TASK_TYPE_FIRST_REGISTERED, 0});
    add_task({0, MPK_EVENT_END, static_cast<int>(written), MPK_TASK_TYPE_FIRST_REGISTERED, 1});
  }
  int run(const mpk_kernel_args* args) override { return work(args, data); }
};

Dynamic dynamic_one("iteration: dynamic, 1 worker, 3 iterations", 1, 1, 3);
Dynamic dynamic_two("iteration: dynamic, 2 workers", 2, 1, long_run() ? 3 : 2);
Dynamic dynamic_schedulers("iteration: dynamic, 2 schedulers, 2 iterations", 1, 2, 2);

}  // namespace
