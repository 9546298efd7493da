/* The entry points of the CPU target (end of mpk/abi.h). */
#include "cpu/worker.h"
#include "scheduler_loop.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

namespace mpk {
namespace cpu {

void shorten_timer_slack() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);
#endif
}

namespace {

/* Handles the loop's result: a normal end, or an abort that every rank must learn of. */
void leave(const mpk_rank* rank, mpk_status* status, int code) {
  if (code == MPK_OK) {
    report_state(status, MPK_WORKER_LEFT);
  } else {
    abort_broadcast(rank, static_cast<uint32_t>(code)); /* the first cause stays; the status says what this loop waited for */
    abort_out_of_reach(rank);
  }
}

int run_local_scheduler(Scheduler* scheduler) {
  return scheduler_loop(platform::Team(), scheduler, [=](Found* found) { return local_scheduler_step(scheduler, found); }, [] {});
}

int run_remote_scheduler(Scheduler* scheduler) {
  uint64_t* heads = static_cast<uint64_t*>(calloc(scheduler->rank->world, sizeof(uint64_t)));
  if (heads == nullptr) return MPK_ABORT_KERNEL;
  const int code = scheduler_loop(platform::Team(), scheduler, [=](Found* found) { return remote_scheduler_step(scheduler, heads, found); }, [] {});
  free(heads);
  return code;
}

}  // namespace
}  // namespace cpu
}  // namespace mpk

extern "C" {

uint64_t mpk_batch_private_bytes(const mpk_batch_config* config) { return mpk::batch_state_bytes(config); }

void mpk_cpu_wake(uint32_t* word) { mpk::platform::wake(word); }
void mpk_cpu_ring(uint32_t* word) { mpk::platform::ring(word); }
void mpk_cpu_sleep(const uint32_t* word, uint32_t seen, uint64_t ns) { mpk::platform::park(word, seen, ns); }

int mpk_cpu_begin(mpk_rank* rank) {
  int code = MPK_ABORT_KERNEL;
  const bool schedulers_fit = rank->placement == MPK_STATIC || (rank->num_schedulers > 0 && mpk::num_local_schedulers(rank) > 0);
  if (rank->abi_version == MPK_ABI_VERSION && rank->num_workers > 0 && schedulers_fit) code = mpk::batch_begin(rank);
  if (code != MPK_OK) {
    mpk::abort_broadcast(rank, static_cast<uint32_t>(code));
    return code;
  }
  return mpk::next_iteration(rank, nullptr);
}

void mpk_cpu_worker(mpk_rank* rank, uint32_t worker) {
  /* Relaxed: only the host reads it. */
  mpk::platform::fetch_add<mpk::platform::Scope::kSystem>(&rank->control->running, 1u, mpk::platform::kRelaxed);
  mpk::cpu::shorten_timer_slack();
  const mpk::cpu::Worker self = {rank, worker, &rank->status[worker]};
  mpk::cpu::leave(rank, self.status, rank->placement == MPK_STATIC ? mpk::cpu::run_static(self) : mpk::cpu::run_dynamic(self));
  /* Release: a host that reads 0 with acquire sees all results. */
  mpk::platform::fetch_add<mpk::platform::Scope::kSystem>(&rank->control->running, ~0u, mpk::platform::kRelease);
}

void mpk_cpu_scheduler(mpk_rank* rank, uint32_t scheduler) {
  if (rank->placement == MPK_STATIC) return;
  mpk::cpu::shorten_timer_slack();
  mpk::PreparedStep step = {};
  mpk::Scheduler self = {rank, scheduler, &rank->status[rank->num_workers + scheduler], &step};
  const bool local = scheduler < mpk::num_local_schedulers(rank);
  mpk::cpu::leave(rank, self.status, local ? mpk::cpu::run_local_scheduler(&self) : mpk::cpu::run_remote_scheduler(&self));
}

void mpk_cpu_abort(mpk_rank* rank, uint32_t code) {
  mpk::abort_broadcast(rank, code);
  mpk::abort_out_of_reach(rank);
}

}  // extern "C"
