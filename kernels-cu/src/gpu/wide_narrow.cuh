/* A tile that has all of at most 32 rows of the iteration, and 32 or 96 rows of the weight. It is for products with few columns for each
 * worker.
 *
 * The tensor cores multiply 64 rows at a time, in about the same time for 16 to 64 tokens. So one product has 16 k of 32 rows in its
 * upper half, and the next 16 k of the same rows in its lower half. Its tokens are those of both k, one after the other: two column tiles,
 * which are adjacent. Half of its sums belong together, the upper ones of the first k and the lower ones of the other k; the rest is not
 * used.
 *
 * A stage has 256 k, so it is as full as a stage of 64 rows, and brings 16 KB with two copies. A step takes 0.25 us, whatever it brings
 * (docs/scaling.md). With 128 k and 8 KB, all workers together took weights just as fast as memory delivers them, so stages that had come
 * before the events saved next to nothing. The two warpgroups share the k of a stage. So four warps have a part of every sum
 * (wide_shared.cuh). With 96 rows, three stages share the tokens. */
#pragma once

#include "gpu/wide_shared.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight, uint32_t N>
struct WideNarrow : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  static constexpr uint32_t kTiles = 2, kBlocks = 16; /* of a stage: tiles of 16 rows, blocks of 16 k */
  static_assert(kStageBytes == kTiles * kBlocks * kWideBlockBytes, "a stage is 32 rows x 256 k");
  static constexpr uint32_t kMost = 3; /* times 32 rows of the weight. There are no registers for more. */
  static constexpr uint32_t kTokenBytes = N * kNarrowBytes;              /* of a block of k */
  static constexpr uint32_t kPlaceBlocks = kPlaceBytes / kTokenBytes;    /* of k in a full place */
  static_assert(kPlaceBlocks % kBlocks == 0 && kPlaceBlocks > 0, "a place has the tokens of whole stages");
  using Sums = WideSums<kMost, 2 * N>;

  /* How many times 32 rows of the weight a tile has. */
  static __device__ __forceinline__ uint32_t high_of(const TaskSlot& slot) { return (wide::params_of(slot).high + 31) / 32; }
  static __device__ __forceinline__ void multiply(Sums& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t high, uint32_t warp,
                                                  uint32_t lane, bool arrives);
};

template <uint32_t Weight, uint32_t N>
__device__ inline bool WideNarrow<Weight, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t high = high_of(slot), stages = (blocks.count + kBlocks - 1) / kBlocks * high;
  if (loader.prefetches()) {
    loader.skip(stages);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<kTiles, kBlocks> rows(slot, blocks, high);
  uint64_t from_x = slot.operands[0].addr + blocks.first * kTokenBytes;
  uint32_t left = blocks.count;
  const auto weights = [&] { rows.template stream<true>(wide); };
  const auto place = [&] {
    const uint32_t here = min(left, kPlaceBlocks);
    wide.stream_place(from_x, (here + 3) / 4 * (4 * kTokenBytes));
    from_x += kPlaceBlocks * kTokenBytes;
    left -= here;
  };
  return wide.run<true, false>(stages, (blocks.count + kPlaceBlocks - 1) / kPlaceBlocks, weights, [] {}, place);
}

/* Multiplies `blocks` times 16 k into `sums`, one part for each 32 rows. Of a stage, warpgroup 0 takes the first 8 blocks and warpgroup 1
 * the others. Its first two warps take the even blocks, and the other two the odd ones. */
template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideNarrow<Weight, N>::multiply(Sums& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t high,
                                                                uint32_t warp, uint32_t lane, bool arrives) {
  sums.clear();
  const uint32_t begin = warp / 4 * 8, first = begin + warp / 2 % 2, tile = warp % 2;
  uint4 a[4];
  uint32_t tokens = 0, of_place = 0, in_place = 0; /* address of the step's tokens; barrier of their place; blocks of it from here on */
#pragma unroll 1
  for (uint32_t left = blocks; left != 0;) {
    const uint32_t here = min(left, kBlocks);
#pragma unroll
    for (uint32_t part = 0; part < kMost; ++part) {
      if (part >= high) break;
      stages.wait();
      const uint32_t of_stage = stages.empty_barrier(), from = stages.address() + (tile * here + first) * kWideBlockBytes + lane * 16;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) a[i] = load_shared16(from + i * (2 * kWideBlockBytes));
      if (here < kBlocks) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          if (first + i * 2 >= here) a[i] = uint4{0, 0, 0, 0};
      }
      stages.next();
      if (part == 0 && in_place == 0) {
        places.wait();
        tokens = places.address();
        of_place = places.empty_barrier();
        places.next();
        in_place = kPlaceBlocks;
      }
      wgmma_fence();
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        /* A short step has no tokens for its last blocks. Their weights are 0, so they take its first tokens. */
        const uint32_t block = begin + i * 2;
        wgmma<Weight>(sums.of[part], a[i], narrow_descriptor(tokens + (block < here ? block : 0) * kTokenBytes));
      }
      wgmma_commit();
      if (arrives) mbarrier_arrive(of_stage);
      wgmma_wait<0>();
    }
    left -= here;
    tokens += kBlocks * kTokenBytes;
    in_place -= kBlocks;
    if ((in_place == 0 || left == 0) && arrives) mbarrier_arrive(of_place);
  }
  sums.keep_order();
}

template <uint32_t Weight, uint32_t N>
__device__ inline int WideNarrow<Weight, N>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes these after the barrier in wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count, high = high_of(*context.slot);
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  Sums sums;
  multiply(sums, stages, places, blocks, high, context.warp, context.lane, kEveryLaneArrives || context.lane == 0);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  SharedSums<Weight, N, 4> shared_sums(context, tokens);
#pragma unroll
  for (uint32_t part = 0; part < kMost; ++part) {
    if (part >= high) break;
    shared_sums.store(sums.of[part], part);
  }
  return MPK_OK;
}

#endif

}  // namespace gpu
}  // namespace mpk
