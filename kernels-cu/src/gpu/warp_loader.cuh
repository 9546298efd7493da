/* Stages that the fetch warp fills after the loader has lent it the ring. They serve tasks whose large inputs are written in the same
 * iteration, and found by looking into tables, for which all lanes are needed.
 *
 * The copied data is an input of the task, so its compute warps say when the copies may start (`begin`). Others have written it with
 * ordinary stores; the fence in `wait_begun` orders the bulk copies after them. In the other direction, the stage's empty barrier is
 * enough. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if __CUDA_ARCH__ >= 900

/* Used by all lanes of the fetch warp. */
class WarpLoader {
 public:
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
  /* No copy may be in flight when the block ends. Copies end by themselves, so these waits need no way out. */
  __device__ __forceinline__ void stop() {
    RingPlace at = place_;
#pragma unroll 1
    for (; begun_ != 0; --begun_) {
      if (at.index == 0) {
        at.index = kStages;
        at.parity ^= 1;
      }
      --at.index;
      while (!mbarrier_test(full(at), at.parity)) {}
    }
  }

  /* Waits until the compute warps have called `begin` more often than this warp has called `brought`. Returns false if they have left. */
  __device__ __forceinline__ bool wait_begun() {
    if (!wait_for(shared_state().bring_begun, peek(shared_state().brought))) return false;
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }
  __device__ __forceinline__ void brought() {
    __syncwarp();
    if (lane_ == 0) poke(shared_state().brought, peek(shared_state().brought) + 1);
    __syncwarp();
  }

  /* Waits until the next stages are free. Returns false if the compute warps have left. The caller may then write to them, calls
   * `begin_copies`, and starts copies from any lanes. */
  __device__ __forceinline__ bool wait_free(uint32_t stages) {
    RingPlace at = place_;
#pragma unroll 1
    for (; stages != 0; --stages) {
      const uint32_t empty = state_ + offsetof(Shared, stage_empty) + at.index * 8, parity = at.parity ^ 1;
      while (!__all_sync(0xFFFFFFFFu, mbarrier_test(empty, parity))) {
        if (has_left()) return false;
      }
      at.next<kStages>();
    }
    return true;
  }
  /* Lanes have written to a stage: products, and later copies to it, come after. */
  static __device__ __forceinline__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  __device__ __forceinline__ uint32_t index() const { return place_.index; }
  __device__ __forceinline__ uint32_t address() const { return stages_ + place_.index * kStageBytes; }
  /* Moves on by `stages`, and returns the barrier of the last of them, on which `bytes` of copies to all of them must complete. What the
   * lanes have written to them is complete. */
  __device__ __forceinline__ uint32_t begin_copies(uint32_t stages, uint32_t bytes) {
    __syncwarp();
    uint32_t barrier = 0;
#pragma unroll 1
    for (; stages != 0; --stages) {
      barrier = full(place_);
      if (lane_ == 0) mbarrier_arrive_expect(barrier, stages == 1 ? bytes : 0);
      place_.next<kStages>();
      begun_ = begun_ < kStages ? begun_ + 1 : kStages;
    }
    __syncwarp();
    return barrier;
  }

 private:
  __device__ __forceinline__ uint32_t full(const RingPlace& place) const { return state_ + offsetof(Shared, stage_full) + place.index * 8; }
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
  uint32_t begun_ = 0; /* stages that have been filled, at most all */
};

#endif

}  // namespace gpu
}  // namespace mpk
