/* The spare warps of the first blocks: the batch step in static placement, the schedulers in dynamic placement,
 * and the relay of the word in which the host asks for an abort. They take no SM from the workers. */
#pragma once

#include "batch_loop.h"
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

/* Brings what a batch step that is not steady reads into the L1 cache, by a whole warp at once. The step has dependent loads, most of
 * them in one thread, and an iteration's weights have passed through the caches since it last ran. So each sector that the step must
 * fetch itself costs a round trip to the L2 cache. This is only a hint: the values that the lanes read are not used, and
 * an acquire in the step drops the sectors. What does not fit is left out. */
class BatchLines {
 public:
  /* Called by all lanes, like `fetch`. */
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

/* Static placement: the batch steps of the rank. */
__device__ inline int run_batch_steps(const mpk_rank* rank, uint32_t lane, bool relay) {
  return batch_loop(
      platform::Team(), rank, &shared_state().step, [] { poke(shared_state().published, peek(shared_state().published) + 1); },
      [rank, relay] {
        if (relay) relay_host_abort(rank);
      },
      [rank, lane] { BatchLines(rank, lane).fetch(); });
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
  Scheduler self = {rank, index, &rank->status[rank->num_workers + index], &shared_state().step};
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
    else if (rank->placement == MPK_STATIC && block == 0) code = run_batch_steps(rank, lane, !own_relay);
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
