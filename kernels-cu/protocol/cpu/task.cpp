/* Running one task on the CPU target. */
#include "cpu/worker.h"

namespace mpk {
namespace cpu {

namespace {

/* Debug: the stall that a test asked for. It ends early if the run is aborted. */
int stall(const mpk_rank* rank) {
  const uint64_t start = platform::clock_ns();
  for (;;) {
    const uint64_t elapsed = platform::clock_ns() - start;
    if (elapsed >= rank->stall_ns) return MPK_OK;
    const int code = abort_code(rank);
    if (code != MPK_OK) return code;
    const uint64_t left = rank->stall_ns - elapsed;
    platform::sleep_ns(left < 1000000 ? left : 1000000);
  }
}

/* Completes the record that run_task has begun. */
void record(const Worker& worker, const Iteration& iteration, uint32_t task_index, uint64_t fetched_ns, uint64_t ready_ns, uint32_t waited_for) {
  mpk_trace_record* entry = trace_next(worker.rank, worker.index);
  entry->fetched_ns = fetched_ns;
  entry->ready_ns = ready_ns;
  entry->done_ns = platform::clock_ns();
  entry->iteration = iteration.number;
  entry->task = task_index;
  entry->graph = static_cast<uint16_t>(iteration.graph_index);
  entry->worker = static_cast<uint16_t>(worker.index);
  entry->waited_for = waited_for;
  entry->page_ns = 0;
  trace_keep(worker.rank, worker.index);
}

}  // namespace

mpk_kernel_args kernel_args(const Worker& worker, const Iteration& iteration, uint32_t task_index) {
  const mpk_graph* graph = iteration.graph;
  const mpk_task* task = &graph->tasks[task_index];
  mpk_kernel_args args;
  args.rank = worker.rank;
  args.graph = graph;
  args.task = task;
  args.inputs = graph->operands + task->first_operand;
  args.outputs = args.inputs + task->num_inputs;
  args.params = task->variant < graph->num_variants ? graph->variants[task->variant].params : nullptr;
  args.batch = worker.rank->batch;
  args.scratch = worker.rank->scratch != nullptr ? worker.rank->scratch[worker.index] : nullptr;
  args.worker = worker.index;
  args.task_index = task_index;
  return args;
}

int run_task(const Worker& worker, const Iteration& iteration, uint32_t task_index, uint64_t fetched_ns, uint32_t waited_for) {
  const mpk_rank* rank = worker.rank;
  const mpk_task* task = &iteration.graph->tasks[task_index];
  if (task->task_type <= MPK_TASK_TYPE_BEGIN_TASK_GRAPH) {
    /* The batch step does the work of begin (the publication triggers its event), and the loop does the work of terminate. */
    count_progress(rank);
    return MPK_OK;
  }
  /* The tiles of an operator make their puts one after the other; then the proxy may send them. The next operator may have nothing to
   * wait for. Otherwise the worker would keep the core while other ranks wait for the puts. */
  if (task->op != worker.op) platform::make_way_for_proxy(rank);
  worker.op = task->op;
  report_state(worker.status, MPK_WORKER_RUNS);
  const uint64_t ready_ns = trace_clock(rank);
  if (is_traced(rank)) trace_next(rank, worker.index)->peer_ns = 0; /* mpk_wait_flagged adds to it */
  if (rank->stall_ns != 0 && worker.index == 0 && task->op == rank->stall_op) {
    const int code = stall(rank);
    if (code != MPK_OK) return code;
  }
  if (task->task_type != MPK_TASK_TYPE_EMPTY) {
    const mpk_kernel_fn run = rank->kernels[task->task_type].run;
    int code = MPK_OK;
    if (run != nullptr) {
      const mpk_kernel_args args = kernel_args(worker, iteration, task_index);
      code = run(&args);
    } else if (task->task_type != MPK_TASK_TYPE_NVSHMEM_SIGNAL) { /* a signal consists only of its trigger */
      code = MPK_ABORT_KERNEL;
    }
    if (code != MPK_OK) return code;
  }
  if (is_traced(rank)) record(worker, iteration, task_index, fetched_ns, ready_ns, waited_for);
  const mpk_event own = is_own_event(rank, task->trigger_event) ? iteration.graph->events[event_id_index(task->trigger_event)] : mpk_event{};
  const int code = trigger_event(rank, iteration, task->trigger_event, own, worker.status);
  if (code == MPK_OK) count_progress(rank); /* after everything else: see publication.h */
  return code;
}

}  // namespace cpu
}  // namespace mpk
