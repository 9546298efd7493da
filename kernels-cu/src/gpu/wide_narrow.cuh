/* A tile that has all of at most 32 rows of the iteration, and 32 rows of the weight. It is for products with few columns for each worker.
 *
 * The tensor cores multiply 64 rows at a time, in about the same time for 16 to 64 tokens. So one product has 16 k of the 32 rows in its
 * upper half, and 16 other k of the same rows in its lower half. Its tokens are those of both k, one after the other: two column tiles, which
 * are adjacent. Half of its sums belong together, the upper ones of the first k and the lower ones of the other k; the rest is not used.
 *
 * A stage has 256 k, so it is as full as a stage of 64 rows, and brings 16 KB with two copies. A step takes 0.25 us, whatever it brings
 * (docs/scaling.md). With 128 k and 8 KB, all workers together took weights just as fast as memory delivers them, so stages that had come
 * before the events saved next to nothing. The two warpgroups share the k of a stage. So four warps have a part of every sum
 * (wide_shared.cuh). */
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
  static constexpr uint32_t kPairBytes = 2 * N * kNarrowBytes;                       /* of two column tiles of the tokens: 4 blocks */
  static constexpr uint32_t kPlaceBlocks = kPlaceBytes / kPairBytes * 4;             /* of k in a full place */
  static_assert(kPlaceBlocks % kBlocks == 0 && kPlaceBlocks > 0, "a place has the tokens of whole stages");
  using Sums = WideSums<1, 2 * N>;

  static __device__ __forceinline__ void multiply(Sums& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t warp, uint32_t lane,
                                                  bool arrives);
};

template <uint32_t Weight, uint32_t N>
__device__ inline bool WideNarrow<Weight, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t stages = (blocks.count + kBlocks - 1) / kBlocks;
  if (loader.prefetches()) {
    loader.skip(stages);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<kTiles, kBlocks> rows(slot, blocks);
  uint64_t from_x = slot.operands[0].addr + blocks.first / 4 * kPairBytes;
  uint32_t left = blocks.count;
  const auto weights = [&] { rows.template stream<true>(wide); };
  const auto place = [&] {
    const uint32_t here = min(left, kPlaceBlocks);
    wide.stream_place(from_x, (here + 3) / 4 * kPairBytes);
    from_x += kPlaceBlocks / 4 * kPairBytes;
    left -= here;
  };
  return wide.run<true, false>(stages, (blocks.count + kPlaceBlocks - 1) / kPlaceBlocks, weights, [] {}, place);
}

/* Multiplies `blocks` times 16 k into `sums`. Of each stage, warpgroup 0 takes the first 8 blocks and warpgroup 1 the others. Of four
 * blocks, which are a pair of column tiles, its first two warps take the first two, and the other warps the last two. */
template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideNarrow<Weight, N>::multiply(Sums& sums, StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t warp,
                                                                uint32_t lane, bool arrives) {
  sums.clear();
  const uint32_t pair = warp / 4 * 2, first = pair * 4 + warp / 2 % 2 * 2, tile = warp % 2;
  uint4 a[4];
  uint32_t tokens = 0, of_place = 0, in_place = 0; /* address of the stage's tokens; barrier of their place; blocks of it from here on */
#pragma unroll 1
  for (uint32_t left = blocks; left != 0;) {
    const uint32_t here = min(left, kBlocks);
    stages.wait();
    const uint32_t of_stage = stages.empty_barrier(), from = stages.address() + (tile * here + first) * kWideBlockBytes + lane * 16;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) a[i] = load_shared16(from + (i / 2 * 4 + i % 2) * kWideBlockBytes);
    if (here < kBlocks) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        if (first + i / 2 * 4 + i % 2 >= here) a[i] = uint4{0, 0, 0, 0};
    }
    stages.next();
    if (in_place == 0) {
      places.wait();
      tokens = places.address();
      of_place = places.empty_barrier();
      places.next();
      in_place = kPlaceBlocks;
    }
    /* In a short stage, later pairs of column tiles are not filled. Their weights are 0, so they take the first pair. */
    uint64_t b[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) b[i] = narrow_descriptor(tokens + ((pair + i) * 4 < here ? (pair + i) * kPairBytes : 0));
    wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) wgmma<Weight>(sums.of[0], a[i], b[i / 2] + i % 2 * 2);
    wgmma_commit();
    if (arrives) mbarrier_arrive(of_stage);
    wgmma_wait<0>();
    left -= here;
    tokens += kBlocks / 4 * kPairBytes;
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
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count;
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  Sums sums;
  multiply(sums, stages, places, blocks, context.warp, context.lane, kEveryLaneArrives || context.lane == 0);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  SharedSums<Weight, N, 4>(context, tokens).store(sums.of[0], 0);
  return MPK_OK;
}

#endif

}  // namespace gpu
}  // namespace mpk
