/* Stages that the fetch warp fills after the loader has lent it the ring. They serve tasks whose rows have a different
 * order in shared memory than in global memory, because bulk copies cannot reorder them. Each lane copies 16 bytes at a
 * time (cp.async).
 *
 * The copied data is an input of the task, so its compute warps say when the copies may start (`begin`). The copies arrive at a
 * stage's full barrier by themselves, while this warp fills the next stages. Products read stages through the async proxy, so the
 * compute threads need a fence between the barrier and the products (`see_copies`). In the other direction, the stage's empty barrier
 * is enough. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if __CUDA_ARCH__ >= 900

/* Used by all lanes of the fetch warp. */
class WarpLoader {
 public:
  /* By compute threads, after the full barriers of stages: lets products read the copies. */
  static __device__ __forceinline__ void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  /* By one compute thread: all that the warp reads next is ready. Release: pairs with wait_begun. */
  static __device__ __forceinline__ void begin() { store_release(shared_state().bring_begun, peek(shared_state().bring_begun) + 1); }

  __device__ __forceinline__ WarpLoader() : stages_(shared_address(stage_at(0))), state_(shared_address(&shared_state())), lane_(threadIdx.x % 32) {}

  /* Waits until the loader has lent the ring. Returns false if the compute warps have left. */
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
  /* No copy may be in flight when the block ends. */
  static __device__ __forceinline__ void stop() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  /* Waits until the compute warps have called `begin` more often than this warp has called `brought`. Returns false if they have left. */
  __device__ __forceinline__ bool wait_begun() { return wait_for(shared_state().bring_begun, peek(shared_state().brought)); }
  __device__ __forceinline__ void brought() {
    __syncwarp();
    if (lane_ == 0) poke(shared_state().brought, peek(shared_state().brought) + 1);
    __syncwarp();
  }

  /* Waits until the next stage is free. Returns false if the compute warps have left. The caller then starts copies to `address` and
   * calls `copies_begun`. */
  __device__ __forceinline__ bool wait_free() {
    const uint32_t empty = state_ + offsetof(Shared, stage_empty) + place_.index * 8, parity = place_.parity ^ 1;
    while (!__all_sync(0xFFFFFFFFu, mbarrier_test(empty, parity))) {
      if (has_left()) return false;
    }
    return true;
  }
  __device__ __forceinline__ uint32_t address() const { return stages_ + place_.index * kStageBytes; }
  /* The stage's phase needs one arrival of lane 0, and one of each lane after all copies that the lane has started. */
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
