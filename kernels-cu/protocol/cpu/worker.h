/* A worker of the CPU target: one thread that does everything that several warps do on a GPU. */
#ifndef MPK_PROTOCOL_CPU_WORKER_H
#define MPK_PROTOCOL_CPU_WORKER_H

#include "missing.h"
#include "scheduler_step.h"

namespace mpk {
namespace cpu {

struct Worker {
  const mpk_rank* rank;
  uint32_t index;
  mpk_status* status;
  mutable uint32_t op = 0; /* operator of the last task that it ran */
};

/* Runs one task whose dependencies are all met, then triggers its event. For the timeline: when the worker began to wait for it,
 * and what it waited for (mpk_trace_record). Returns MPK_OK or an abort code. */
int run_task(const Worker& worker, const Iteration& iteration, uint32_t task_index, uint64_t fetched_ns, uint32_t waited_for);

/* The arguments of a task's kernel. */
mpk_kernel_args kernel_args(const Worker& worker, const Iteration& iteration, uint32_t task_index);

/* The two compositions; the second also serves mixed placement. They return when the run has stopped (MPK_OK), or with the abort
 * code. */
int run_static(const Worker& worker);
int run_dynamic(const Worker& worker);

/* Mixed placement, for a worker without a task in hand: runs its list of the current iteration, if that is of a static graph and comes
 * after `*seen`. `worked`: it had a list. Returns MPK_OK or an abort code. */
int run_static_between(const Worker& worker, uint32_t* seen, bool* worked);

/* Waiting threads sleep for tens of microseconds. Linux's default timer slack of 50 us would more than double that. */
void shorten_timer_slack();

}  // namespace cpu
}  // namespace mpk

#endif
