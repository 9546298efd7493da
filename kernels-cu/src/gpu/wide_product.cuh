/* The main loop of a wide product: weights through the ring of stages, activations through the ring of places, sums in
 * registers. A step is 64 k: `Mt` stages, each 128 rows of the weight (16 for each compute warp, so a warpgroup supplies 64
 * rows), and `Nt` places, each N tokens. */
#pragma once

#include "gpu/barrier.cuh"
#include "gpu/loads.cuh"
#include "gpu/wide_mma.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The compute warps' end of a ring: `Count` buffers of `Bytes`, with a barrier each that says full and one that says empty. */
template <uint32_t Count, uint32_t Bytes>
struct WideRing {
  uint32_t base, full, empty; /* shared addresses */
  uint32_t index, parity;

  /* What has been asked for comes, whatever happens elsewhere: the wait needs no way out. */
  __device__ __forceinline__ void wait() const {
    while (!mbarrier_test(full + index * 8, parity)) {}
  }
  __device__ __forceinline__ uint32_t address() const { return base + index * Bytes; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return empty + index * 8; }
  __device__ __forceinline__ void next() {
    if (++index == Count) {
      index = 0;
      parity ^= 1;
    }
  }
};

/* Bytes of a place, and of 16 rows x 16 k of the weight. */
constexpr uint32_t kWidePlaceBytes = 128 * 64 * 2;
constexpr uint32_t kWideBlockBytes = 16 * 16 * 2;

template <uint32_t Weight, uint32_t Mt, uint32_t Nt, uint32_t N>
struct WideProduct {
  float sum[Mt][Nt][N / 2];

  /* `steps` of 64 k, then `tail` blocks of 16 k. `arrives`: this thread frees what its warp has read. */
  template <class Stages, class Places>
  __device__ __forceinline__ void multiply(Stages& stages, Places& places, uint32_t steps, uint32_t tail, uint32_t warp, uint32_t lane, bool arrives) {
#pragma unroll
    for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
        for (uint32_t i = 0; i < N / 2; ++i) sum[m][t][i] = 0.0f;
    keep_order();
    const uint32_t own = warp * (4 * kWideBlockBytes) + lane * 16;
    uint4 a[2][Mt][2];
    uint32_t read[Nt]; /* barriers of the places that the step before has read */
    uint32_t at[Mt], of_stage[Mt];
    uint64_t b[Nt];
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m) {
        stages.wait();
        at[m] = stages.address() + own;
        of_stage[m] = stages.empty_barrier();
        stages.next();
      }
      uint32_t of_place[Nt];
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t) {
        places.wait();
        b[t] = wide_descriptor(places.address());
        of_place[t] = places.empty_barrier();
        places.next();
      }
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
        for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) a[half][m][i] = load_shared16(at[m] + (half * 2 + i) * kWideBlockBytes);
        wgmma_fence();
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
          for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
            for (uint32_t t = 0; t < Nt; ++t) wgmma<Weight>(sum[m][t], a[half][m][i], b[t] + (half * 2 + i) * 2);
        wgmma_commit();
        /* The warp's weights are in registers: all lanes were at the products. */
        if (half == 1) {
#pragma unroll
          for (uint32_t m = 0; m < Mt; ++m)
            if (arrives) mbarrier_arrive(of_stage[m]);
        }
        wgmma_wait<1>();
        if (half == 0 && step != 0) {
#pragma unroll
          for (uint32_t t = 0; t < Nt; ++t)
            if (arrives) mbarrier_arrive(read[t]);
        }
      }
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t) read[t] = of_place[t];
    }
    wgmma_wait<0>();
    keep_order();
    if (steps != 0) {
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t)
        if (arrives) mbarrier_arrive(read[t]);
    }
    if (tail == 0) return;
#pragma unroll
    for (uint32_t m = 0; m < Mt; ++m) {
      stages.wait();
      at[m] = stages.address() + warp * (tail * kWideBlockBytes) + lane * 16;
      of_stage[m] = stages.empty_barrier();
      stages.next();
    }
#pragma unroll
    for (uint32_t t = 0; t < Nt; ++t) {
      places.wait();
      b[t] = wide_descriptor(places.address());
      read[t] = places.empty_barrier();
      places.next();
    }
#pragma unroll 1
    for (uint32_t block = 0; block < tail; ++block) {
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m) a[0][m][0] = load_shared16(at[m] + block * kWideBlockBytes);
      wgmma_fence();
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
        for (uint32_t t = 0; t < Nt; ++t) wgmma<Weight>(sum[m][t], a[0][m][0], b[t] + block * 2);
      wgmma_commit();
      wgmma_wait<0>();
      keep_order();
    }
    __syncwarp();
    if (arrives) {
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m) mbarrier_arrive(of_stage[m]);
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t) mbarrier_arrive(read[t]);
    }
  }

 private:
  /* What is computed with the sums stays on its side of this: the compiler does not know that products run on behind the
   * statement that begins them. */
  __device__ __forceinline__ void keep_order() {
#pragma unroll
    for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
      for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
        for (uint32_t i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sum[m][t][i])::"memory");
  }
};

#endif

}  // namespace gpu
}  // namespace mpk
