/* The spare warps of the first blocks: the batch step in static placement, the schedulers in dynamic placement,
 * and the relay of the word in which the host asks for an abort. They take no SM from the workers. */
#pragma once

#include "gpu/context.cuh"
#include "inbox.cuh"
#include "scheduler_loop.h"

namespace mpk {
namespace gpu {

/* Passes the host's request for an abort on to all ranks. If the host has it from another rank, that rank stays its origin. */
__device__ inline void relay_host_abort(const mpk_rank* rank) {
  if (rank->host_abort == nullptr) return;
  /* Relaxed: only the requested code matters. */
  const uint64_t word = platform::load<platform::Scope::kSystem>(rank->host_abort, platform::kRelaxed);
  const uint32_t code = static_cast<uint32_t>(word);
  if (code == MPK_OK) return;
  set_abort(rank->control, code, static_cast<uint32_t>(word >> 32));
  abort_broadcast(rank, code);
}

/* Runs until the run ends. It is separate from the other loops because reading host memory takes microseconds. */
__device__ inline void relay_loop(const mpk_rank* rank) {
  while (abort_code(rank) == MPK_OK && !read_publication(rank).stop) {
    relay_host_abort(rank);
    platform::sleep_ns(5000);
  }
}

/* Reports that the end of an iteration did not come. Called if no other loop could say why. */
__device__ __noinline__ void report_end(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  const mpk_graph* graph = &rank->graphs[batch->graph];
  mpk_status* const status = &rank->status[rank->num_workers];
  report(&status->timed_out, 1u);
  report(&status->graph, batch->graph);
  report(&status->iteration, batch->iteration);
  report_wait(status, MPK_WORKER_WAITS_EVENT, own_event_id(rank, graph, MPK_EVENT_END), event_wanted(graph, MPK_EVENT_END, batch->epoch, 0),
              event_count(graph, MPK_EVENT_END));
}

/* Brings what the batch step reads into the L1 cache, by a whole warp at once. The step has dependent loads, most of them in
 * one thread, and an iteration's weights have passed through the caches since it last ran. So each sector that the step must
 * fetch itself costs a round trip to the L2 cache. This is only a hint: the values that the lanes read are not used, and
 * an acquire in the step drops the sectors. The sectors are assigned to lanes once, because the addresses do not change.
 * What does not fit is left out. */
class BatchLines {
 public:
  /* Called by all lanes, after batch_begin has set the state up. */
  __device__ __forceinline__ BatchLines(const mpk_rank* rank, uint32_t lane) : lane_(lane) {
    const mpk_batch_config* config = rank->batch_config;
    const mpk_batch* batch = rank->batch;
    const BatchArrays arrays = batch_arrays(rank);
    add(batch_state(rank), sizeof(BatchState));
    add(config, sizeof(mpk_batch_config));
    add(batch, sizeof(mpk_batch));
    add(rank->graphs, rank->num_graphs * static_cast<uint32_t>(sizeof(mpk_graph)));
    for (uint32_t g = 0; g < rank->num_graphs; ++g) {
      const mpk_graph* graph = &rank->graphs[g];
      add(graph->events + MPK_EVENT_BEGIN, sizeof(mpk_event));
      if (graph->placement == MPK_STATIC) add(graph->worker_first + graph->num_workers, sizeof(uint32_t));
    }
    if (!config->generate) return;
    add(arrays.slots, config->max_batch * static_cast<uint32_t>(sizeof(BatchSlot)));
    add(batch->active_slot, config->max_batch * 4);
    add(batch->active_num_samples, config->max_batch * 4);
    add(batch->next_token, config->max_samples * 4);
    add(config->eos, config->num_eos * 4);
  }

  /* Called by all lanes, after an acquire of the data. */
  __device__ __forceinline__ void fetch() const {
    uint32_t words[kMost];
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i)
      asm volatile("{.reg .pred p; setp.ne.u64 p,%1,0; mov.u32 %0,0; @p ld.global.u32 %0,[%1];}" : "=r"(words[i]) : "l"(lines_[i]) : "memory");
    /* The results must have a use: the compiler gives a register that nothing reads to the next load too, which then
     * waits. */
    uint32_t any = 0;
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) any |= words[i];
    asm volatile("" ::"r"(any));
  }

 private:
  static constexpr uint32_t kSector = 32, kMost = 6;

  __device__ __forceinline__ void add(const void* from, uint32_t bytes) {
    const uint64_t address = reinterpret_cast<uint64_t>(from), first = address / kSector * kSector;
    const uint32_t sectors = from == nullptr || bytes == 0 ? 0 : static_cast<uint32_t>((address + bytes - first + kSector - 1) / kSector);
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) {
      const uint32_t at = i * 32 + lane_ - count_;
      if (at < sectors) lines_[i] = first + static_cast<uint64_t>(at) * kSector;
    }
    count_ += sectors;
  }

  uint32_t lane_, count_ = 0;
  uint64_t lines_[kMost] = {};
};

/* By one thread: waits until the published iteration and all its tasks are done. */
__device__ inline int await_end(const mpk_rank* rank, bool relay) {
  const mpk_batch* batch = rank->batch;
  const mpk_graph* graph = &rank->graphs[batch->graph];
  const mpk_event end = graph->events[MPK_EVENT_END];
  const uint64_t wanted = event_wanted(end, batch->epoch), expected = batch_state(rank)->expected;
  Wait wait(rank, nullptr, follower_deadline_ns(rank));
  for (uint32_t polls = 1;; ++polls) {
    /* As in claim_batch_step. A task's count comes after its trigger, so if no peer triggers the end event, it is
     * ready by then. */
    const uint64_t done = platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kAcquire);
    if (done >= expected && (!end.remote_triggers || event_count(graph, MPK_EVENT_END, end) >= wanted)) return MPK_OK;
    if (relay && polls % 64 == 0) relay_host_abort(rank);
    if (polls % 16 != 0) continue;
    const int code = wait.poll(done);
    if (code == MPK_OK) continue;
    if (wait.timed_out()) report_end(rank); /* if the run ended for another reason, another wait's report says more */
    return code;
  }
}

/* Static placement: runs the first batch step, and one after each iteration. The first lane leads. It knows what it has
 * published and how many tasks must be done before the next step, so it polls one word. */
__device__ inline int batch_loop(const mpk_rank* rank, uint32_t lane, bool relay) {
  const platform::Team team{};
  const BatchLines lines(rank, lane);
  for (;;) {
    lines.fetch();
    int code = next_iteration(team, rank, nullptr, [] { poke(shared_state().published, peek(shared_state().published) + 1); });
    bool goes_on = code == MPK_OK;
    if (lane == 0 && goes_on) {
      goes_on = !rank->batch->stop;
      if (goes_on) code = await_end(rank, relay);
    }
    code = team.from_leader(code);
    if (team.from_leader(static_cast<int>(goes_on)) == 0 || code != MPK_OK) return code;
  }
}

/* Mixed placement: makes scheduler 0 end the iterations of static graphs (end_iteration), because no event tells a scheduler of
 * their end. An acquired publication says that the batch belongs to its iteration. If its graph is static, only this thread ends the
 * iteration, so the batch can be read. If it is dynamic, only the publication's word is read. */
__device__ inline void look_for_static_end(Scheduler* scheduler) {
  const mpk_rank* rank = scheduler->rank;
  if (scheduler->index != 0 || scheduler->ending != 0) return;
  const Publication now = read_publication(rank);
  if (now.iteration == 0 || now.stop) return;
  const mpk_graph* graph = &rank->graphs[now.graph];
  if (graph->placement != MPK_STATIC) return;
  if (event_count(graph, MPK_EVENT_END) >= event_wanted(graph, MPK_EVENT_END, rank->batch->epoch, 0)) scheduler->ending = now.iteration;
}

/* Called by all lanes of a scheduler's warp. */
__device__ inline int schedule(const mpk_rank* rank, uint32_t index, bool relay, uint64_t* heads) {
  Scheduler self = {rank, index, &rank->status[rank->num_workers + index]};
  self.begins = index == 0;
  const auto at_poll = [rank, relay] {
    if (relay) relay_host_abort(rank);
  };
  const bool local = index < num_local_schedulers(rank);
  /* One loop serves both kinds: the batch step is inlined into each loop, and it is the largest part of the kernel's
   * protocol code. */
  const auto step = [&](Found* found) {
    if constexpr (platform::kMixedPlacement) look_for_static_end(&self);
    return local ? local_scheduler_step(&self, found) : remote_scheduler_step(&self, heads, found);
  };
  const int code = scheduler_loop(platform::Team(), &self, step, at_poll);
  if (code == MPK_OK && platform::Team().member() == 0) report_state(self.status, MPK_WORKER_LEFT);
  return code;
}

/* The spare warp of each block. In a scheduler's warp all lanes take part, in other warps only the first one. `heads` are [world] words
 * of shared memory, set to 0. */
__device__ inline void spare_loop(const mpk_rank* rank, uint32_t block, uint32_t lane, uint64_t* heads) {
  const uint32_t busy = rank->num_schedulers != 0 ? rank->num_schedulers : 1;
  const bool own_relay = busy < rank->num_workers; /* this block has no other use for its spare warp */
  int code = MPK_OK;
  if (block == 0) {
    if (lane == 0) code = batch_begin(rank);
    code = __shfl_sync(0xFFFFFFFFu, code, 0);
  }
  if (code == MPK_OK) {
    if (rank->placement != MPK_STATIC && block < rank->num_schedulers) code = schedule(rank, block, block == 0 && !own_relay, heads);
    else if (rank->placement == MPK_STATIC && block == 0) code = batch_loop(rank, lane, !own_relay);
#if MPK_HOST_PROXY
    /* The host checks that this block exists (check_host_limits in cuda/machine.rs). */
    else if (block == busy + 1) inbox_loop(rank, lane);
#endif
    else if (lane != 0) return;
    else if (block == busy) relay_loop(rank);
  }
  if (lane != 0) return;
  if (code != MPK_OK) abort_broadcast(rank, static_cast<uint32_t>(code));
  if (block == (own_relay ? busy : 0) && abort_code(rank) != MPK_OK) abort_out_of_reach(rank);
}

}  // namespace gpu
}  // namespace mpk
