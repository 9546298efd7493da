/* The main loops of wide products: weights through the ring of stages, activations through the ring of places, sums in
 * registers. */
#pragma once

#include "gpu/barrier.cuh"
#include "gpu/loads.cuh"
#include "gpu/shared.cuh"
#include "gpu/wide_mma.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The compute warps' end of a ring of `Count` buffers of `Bytes`. Each buffer has a barrier for full and one for empty. */
template <uint32_t Count, uint32_t Bytes>
struct WideRing {
  uint32_t base, full, empty; /* shared addresses */
  uint32_t index, parity;

  /* A copy that was started always completes, so this wait needs no exit. */
  __device__ __forceinline__ void wait() const {
    while (!mbarrier_test(full + index * 8, parity)) {}
  }
  __device__ __forceinline__ uint32_t address() const { return base + index * Bytes; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return empty + index * 8; }
  /* The same of the buffer with this address in it. */
  __device__ __forceinline__ uint32_t empty_barrier(uint32_t inside) const { return empty + (inside - base) / Bytes * 8; }
  __device__ __forceinline__ void next() {
    if (++index == Count) {
      index = 0;
      parity ^= 1;
    }
  }
};

/* The rings, starting at the task's first buffer. */
struct StageRing : WideRing<kStages, kStageBytes> {
  __device__ __forceinline__ explicit StageRing(const RingPlace& at)
      : WideRing{shared_address(stage_at(0)), shared_address(shared_state().stage_full), shared_address(shared_state().stage_empty), at.index, at.parity} {}
};
struct PlaceRing : WideRing<kPlaces, kPlaceBytes> {
  __device__ __forceinline__ explicit PlaceRing(const RingPlace& at)
      : WideRing{shared_address(work_area()), shared_address(shared_state().place_full), shared_address(shared_state().place_empty), at.index, at.parity} {}
};

/* Bytes of 16 rows x 16 k of the weight. */
constexpr uint32_t kWideBlockBytes = 16 * 16 * 2;
/* Bytes of a row of a narrow column tile of 16 (MPK_WIDE_NARROW), which is a block of k. */
constexpr uint32_t kNarrowBytes = MPK_WIDE_NARROW * 2;

/* A warpgroup's sums: 64 rows of the weight times `Nt` times N tokens. */
template <uint32_t Nt, uint32_t N>
struct WideSums {
  float of[Nt][N / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
      for (uint32_t i = 0; i < N / 2; ++i) of[t][i] = 0.0f;
    keep_order();
  }
  /* Keeps the compiler from moving uses of the sums across this point. It does not know that products still run after the
   * statement that starts them. */
  __device__ __forceinline__ void keep_order() {
#pragma unroll
    for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
      for (uint32_t i = 0; i < N / 2; ++i) asm volatile("" : "+f"(of[t][i])::"memory");
  }
};

/* Loads four blocks of 16 k of a warp's 16 rows. Blocks from `valid` on become zeros, so a short step needs no loop of its own. This
 * is a branch because only a product's last step is short: with a select for each word, a prompt of 480 tokens took 14.28 ms instead
 * of 13.95 (8B, H200). */
__device__ __forceinline__ void load_blocks(uint4 (&a)[4], uint32_t address, uint32_t valid) {
#pragma unroll
  for (uint32_t block = 0; block < 4; ++block) a[block] = load_shared16(address + block * kWideBlockBytes);
  if (valid < 4) {
#pragma unroll
    for (uint32_t block = 0; block < 4; ++block)
      if (block >= valid) a[block] = uint4{0, 0, 0, 0};
  }
}

/* The products of a step are one group. A warpgroup waits for them before it loads the next step's weights; meanwhile the other
 * warpgroup uses the tensor cores. With one group per block of 16 k, a prompt of 2,048 tokens took 57.5 ms instead of 55.4 (8B, H200). */

/* Multiplies `blocks` times 16 k into `sums`. A step has 64 k, or what is left: a stage (128 rows of the weight, 16 for each warp), a
 * place with the first N tokens and, if `Nt` is 2, a stage with the other tokens. So both rings hold at least four steps. The tokens'
 * columns are padded with zeros. `arrives`: this thread releases what its warp has read. */
template <uint32_t Weight, uint32_t Used, uint32_t Nt, uint32_t N>
__device__ __forceinline__ void wide_multiply(WideSums<Nt, N>& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t warp, uint32_t lane,
                                              bool arrives) {
  sums.clear();
  uint4 a[4];
#pragma unroll 1
  for (uint32_t left = blocks; left != 0;) {
    const uint32_t here = min(left, 4u);
    stages.wait();
    const uint32_t of_stage = stages.empty_barrier();
    load_blocks(a, stages.address() + warp * (here * kWideBlockBytes) + lane * 16, here);
    stages.next();
    uint64_t b[Used];
    uint32_t of_tokens[Used];
    places.wait();
    b[0] = wide_descriptor(places.address());
    of_tokens[0] = places.empty_barrier();
    places.next();
    if constexpr (Used == 2) {
      stages.wait();
      b[1] = wide_descriptor(stages.address());
      of_tokens[1] = stages.empty_barrier();
      stages.next();
    }
    wgmma_fence();
#pragma unroll
    for (uint32_t block = 0; block < 4; ++block)
#pragma unroll
      for (uint32_t t = 0; t < Used; ++t) wgmma<Weight>(sums.of[t], a[block], b[t] + block * 2);
    wgmma_commit();
    /* The warp's weights are in registers, because all lanes have reached the products. */
    if (arrives) mbarrier_arrive(of_stage);
    wgmma_wait<0>();
#pragma unroll
    for (uint32_t t = 0; t < Used; ++t)
      if (arrives) mbarrier_arrive(of_tokens[t]);
    left -= here;
  }
  sums.keep_order();
}

/* The same for few tokens. A step has 128 k: a stage with 64 rows of the weight, and a place with the tokens. Warpgroup 0 takes the
 * first 64 k, warpgroup 1 the others. So each warpgroup has a part of every sum. */
template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void few_multiply(WideSums<1, N>& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t warp, uint32_t lane,
                                             bool arrives) {
  sums.clear();
  const uint32_t first = warp / 4 * 4, tile = warp % 4;
  uint4 a[4];
#pragma unroll 1
  for (uint32_t left = blocks; left != 0;) {
    const uint32_t here = min(left, 8u);
    stages.wait();
    const uint32_t of_stage = stages.empty_barrier();
    load_blocks(a, stages.address() + (tile * here + first) * kWideBlockBytes + lane * 16, here > first ? here - first : 0);
    stages.next();
    places.wait();
    /* In a short step the second half of the place is not filled, and not read. */
    const uint64_t b = wide_descriptor(places.address() + (here > 4 ? first / 4 * (N * 128) : 0));
    const uint32_t of_place = places.empty_barrier();
    places.next();
    wgmma_fence();
#pragma unroll
    for (uint32_t block = 0; block < 4; ++block) wgmma<Weight>(sums.of[0], a[block], b + block * 2);
    wgmma_commit();
    if (arrives) mbarrier_arrive(of_stage);
    wgmma_wait<0>();
    if (arrives) mbarrier_arrive(of_place);
    left -= here;
  }
  sums.keep_order();
}

#endif

}  // namespace gpu
}  // namespace mpk
