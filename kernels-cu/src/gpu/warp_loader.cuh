/* Stages that the prefetch warp fills while the loader has lent it the ring: of a task whose rows need another order in shared
 * memory than in global memory, which bulk copies of one thread do not give. Each lane copies 16 bytes at a time (cp.async).
 *
 * What is copied is the task's input, so its compute warps say when the copies may begin (`begin`). A stage's full barrier hears of
 * the copies when they have arrived, without this warp: it has the ring's next stages to fill. Products read stages through the async
 * proxy, so between the barrier and the products the compute threads need a fence (`see_copies`). In the other direction the stage's
 * empty barrier does it. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if __CUDA_ARCH__ >= 900

/* All lanes of the prefetch warp. */
class WarpLoader {
 public:
  /* Compute threads: the copies of stages whose barriers they have seen are there for products. */
  static __device__ __forceinline__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  /* One compute thread: what the warp reads is there, once more. Release: pairs with wait_begun. */
  static __device__ __forceinline__ void begin() { store_release(shared_state().bring_begun, peek(shared_state().bring_begun) + 1); }

  __device__ __forceinline__ WarpLoader() : stages_(shared_address(stage_at(0))), state_(shared_address(&shared_state())), lane_(threadIdx.x % 32) {}

  /* Until the loader has lent the ring. False: the compute warps have left. */
  __device__ __forceinline__ bool borrow() {
    if (!wait_for(shared_state().lent_count, peek(shared_state().returned_count))) return false;
    place_ = peek(shared_state().lent);
    return true;
  }
  __device__ __forceinline__ void give_back() {
    stop();
    if (lane_ != 0) return;
    poke(shared_state().lent, place_);
    store_release(shared_state().returned_count, peek(shared_state().lent_count));
  }
  /* No copy may be under way when the block ends. */
  static __device__ __forceinline__ void stop() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  /* Until the compute warps have called `begin` once more than `brought` was. False: they have left. */
  __device__ __forceinline__ bool wait_begun() { return wait_for(shared_state().bring_begun, peek(shared_state().brought)); }
  __device__ __forceinline__ void brought() {
    __syncwarp();
    if (lane_ == 0) poke(shared_state().brought, peek(shared_state().brought) + 1);
    __syncwarp();
  }

  /* Until the next stage is free. False: the compute warps have left. After the copies to its address `copies_begun`. */
  __device__ __forceinline__ bool wait_free() {
    const uint32_t empty = state_ + offsetof(Shared, stage_empty) + place_.index * 8, parity = place_.parity ^ 1;
    while (!__all_sync(0xFFFFFFFFu, mbarrier_test(empty, parity))) {
      if (has_left()) return false;
    }
    return true;
  }
  __device__ __forceinline__ uint32_t address() const { return stages_ + place_.index * kStageBytes; }
  /* The barrier counts one arrival, and each lane's copies, this one's and earlier ones, in addition. */
  __device__ __forceinline__ void copies_begun() {
    const uint32_t full = state_ + offsetof(Shared, stage_full) + place_.index * 8;
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(full) : "memory");
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(full);
    place_.next<kStages>();
  }

 private:
  static __device__ __forceinline__ bool has_left() { return __any_sync(0xFFFFFFFFu, peek(shared_state().left) != 0); }
  static __device__ __forceinline__ bool wait_for(const uint32_t& word, uint32_t before) {
    while (__any_sync(0xFFFFFFFFu, load_acquire(word) == before)) {
      if (has_left()) return false;
    }
    return true;
  }

  const uint32_t stages_, state_; /* shared addresses */
  const uint32_t lane_;
  RingPlace place_ = {0, 0};
};

#endif

}  // namespace gpu
}  // namespace mpk
