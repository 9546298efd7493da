/* Teams of warps, so that several samples of a task are processed side by side. */
#pragma once

#include "gpu/task.cuh"

namespace mpk {
namespace gpu {

/* The warps that process a sample together. The compute warps form one, two or four teams of equal size. */
class Team {
 public:
  /* 1 << kMostShift teams at most, so that a team has two warps at least. */
  static constexpr uint32_t kMostShift = 2, kMost = 1u << kMostShift;

  uint32_t index;  /* of the team */
  uint32_t warp;   /* of the warp in its team */
  uint32_t thread; /* of the thread in its team */

  /* 1 << `shift` teams. */
  __device__ __forceinline__ explicit Team(const Context& context, uint32_t shift = 0) : shift_(shift) {
    index = context.thread >> log_threads();
    thread = context.thread & (threads() - 1);
    warp = thread / 32;
  }

  __device__ __forceinline__ uint32_t count() const { return 1u << shift_; }
  __device__ __forceinline__ uint32_t shift() const { return shift_; }
  /* Of each team. */
  __device__ __forceinline__ uint32_t warps() const { return kComputeWarps >> shift_; }
  __device__ __forceinline__ uint32_t threads() const { return kComputeThreads >> shift_; }
  __device__ __forceinline__ uint32_t log_threads() const { return 8 - shift_; }
  /* The team's first warp among the compute warps. */
  __device__ __forceinline__ uint32_t first_warp() const { return index * warps(); }

  /* What the warp of the team with this lane's number has written to `room`, which has an entry for each compute warp; other lanes get `none`. */
  template <typename T>
  __device__ __forceinline__ T of_warps(const T* room, uint32_t lane, const T& none) const {
    return lane < warps() ? room[first_warp() + lane] : none;
  }

  /* Barrier of the team's threads; orders their memory accesses. */
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0,%1;" ::"r"(kFirstBarrier + index), "r"(threads()) : "memory"); }

 private:
  static constexpr uint32_t kFirstBarrier = 8; /* wide_linear.cuh and wide_shared.cuh have those below */
  static_assert(kComputeThreads == 256, "log_threads");
  uint32_t shift_;
};

/* log2 of the number of teams for `samples` samples of `columns` numbers each, if there is room for `room` numbers. */
__device__ __forceinline__ uint32_t teams_shift(uint32_t samples, uint32_t columns, uint32_t room) {
  uint32_t shift = 0;
#pragma unroll
  for (uint32_t next = 1; next <= Team::kMostShift; ++next)
    if (samples > 1u << shift && columns << next <= room) shift = next;
  return shift;
}

}  // namespace gpu
}  // namespace mpk
