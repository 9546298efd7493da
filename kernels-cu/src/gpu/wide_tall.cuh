/* A tile that has all rows of the iteration: up to 64 rows of the weight times N tokens, or two or three times 64 rows that share the
 * loaded tokens. Memory bandwidth for the weights limits such products. The two warpgroups share the k of a step, and add up their sums
 * when they store them (wide_shared.cuh). In a gated product, 8 gates and their ups alternate (MPK_LAYOUT_PAIRED). The tokens lie in
 * column tiles of N rows x 16 (MPK_WIDE_NARROW).
 *
 * A task may have only a part of k. Then its sums are one of several outputs, and a later task adds these up. */
#pragma once

#include "gpu/wide_shared.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Steps of 128 k in a full place. */
template <uint32_t N>
constexpr uint32_t kPlaceSteps = kPlaceBytes / (N * 256);

/* Multiplies `blocks` times 16 k into `sums`. A step has 128 k: a stage with 64 rows of the weight, and N tokens. Warpgroup 0 takes the
 * first 64 k, warpgroup 1 the others. So each warpgroup has a part of every sum. A place has the tokens of kPlaceSteps steps, because one
 * thread starts all copies: with a place for each step, batches of 32 took 2.6 % longer (8B, two H200).
 * `high`: with 2 or 3, the tile has as many times 64 rows of the weight. So many stages share the step's tokens, and each third of
 * `sums` has 64 rows. With 1, the tile has 64 rows, each stage is a step, and each third has the sums of every third step; the thirds are
 * added at the end. */
template <uint32_t Weight, uint32_t Chains, uint32_t N>
__device__ __forceinline__ void tall_multiply(WideSums<Chains, N>& sums, StageRing& stages, PlaceRing& places, uint32_t blocks,
                                             uint32_t high, uint32_t warp, uint32_t lane, bool arrives) {
  sums.clear();
  const bool tall = Chains != 1 && high > 1;
  const uint32_t first = warp / 4 * 4, tile = warp % 4;
  constexpr uint32_t kNext = N * kNarrowBytes / 16; /* from one column tile to the next, in units of a descriptor */
  uint4 a[4];
  uint32_t tokens = 0, of_place = 0, in_place = 0; /* address of the step's tokens; barrier of their place; steps of it from here on */
#pragma unroll 1
  for (uint32_t left = blocks; left != 0;) {
#pragma unroll
    for (uint32_t third = 0; third < Chains; ++third) {
      if (third != 0 && left == 0) break;
      if (third > 1 && high == 2) break;
      const uint32_t here = min(left, 8u);
      stages.wait();
      const uint32_t of_stage = stages.empty_barrier();
      load_blocks(a, stages.address() + (tile * here + first) * kWideBlockBytes + lane * 16, here > first ? here - first : 0);
      stages.next();
      if ((third == 0 || Chains == 1 || !tall) && in_place == 0) {
        places.wait();
        tokens = places.address();
        of_place = places.empty_barrier();
        places.next();
        in_place = kPlaceSteps<N>;
      }
      /* In a short step the second half of the tokens is not filled, and not read. */
      const uint64_t b = narrow_descriptor(tokens + (here > 4 ? first * (N * kNarrowBytes) : 0));
      wgmma_fence();
#pragma unroll
      for (uint32_t block = 0; block < 4; ++block) wgmma<Weight>(sums.of[third], a[block], b + block * kNext);
      wgmma_commit();
      if (arrives) mbarrier_arrive(of_stage);
      wgmma_wait<0>();
      const bool last = third == Chains - 1 || !tall || third + 1 == high;
      if (last) {
        left -= here;
        tokens += N * 256;
        if ((--in_place == 0 || left == 0) && arrives) mbarrier_arrive(of_place);
      }
    }
  }
  sums.keep_order();
  if constexpr (Chains > 1) {
    if (tall) return;
#pragma unroll
    for (uint32_t i = 0; i < N / 2; ++i)
#pragma unroll
      for (uint32_t third = 1; third < Chains; ++third) sums.of[0][i] += sums.of[third][i];
  }
}

template <uint32_t Weight, uint32_t N>
struct WideTall : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  /* Each has 64 rows of the weight. There are no registers for more. */
  static constexpr uint32_t kChains = 3;
  static_assert(kPlaceSteps<N> > 0, "places of N tokens x 128 k");

  /* How many times 64 rows of the weight a tile has, at most. */
  static __device__ __forceinline__ uint32_t high_of(const TaskSlot& slot) { return (wide::params_of(slot).high + 63) / 64; }
};

template <uint32_t Weight, uint32_t N>
__device__ inline bool WideTall<Weight, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t high = high_of(slot), stages = (blocks.count + 7) / 8 * high;
  if (loader.prefetches()) {
    loader.skip(stages);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<4, 8> rows(slot, blocks, high);
  /* Column tiles have just the N rows, so those of a step are adjacent. */
  constexpr uint32_t kTileBytes = N * kNarrowBytes;
  uint64_t from_x = slot.operands[0].addr + blocks.first * kTileBytes;
  uint32_t left = blocks.count;
  const auto weights = [&] { rows.template stream<true>(wide); };
  constexpr uint32_t kPlaceBlocks = kPlaceSteps<N> * 8;
  const auto place = [&] {
    const uint32_t here = min(left, kPlaceBlocks);
    wide.stream_place(from_x, (here + 3) / 4 * (4 * kTileBytes));
    from_x += kPlaceBlocks * kTileBytes;
    left -= here;
  };
  return wide.run<true, false>(stages, (blocks.count + kPlaceBlocks - 1) / kPlaceBlocks, weights, [] {}, place);
}

template <uint32_t Weight, uint32_t N>
__device__ inline int WideTall<Weight, N>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes these after the barrier in wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count;
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  WideSums<kChains, N> sums;
  tall_multiply<Weight>(sums, stages, places, blocks, high_of(*context.slot), context.warp, context.lane, kEveryLaneArrives || context.lane == 0);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  SharedSums<Weight, N> shared_sums(context, tokens);
#pragma unroll
  for (uint32_t third = 0; third < kChains; ++third) {
    if (third >= high_of(*context.slot)) break;
    shared_sums.store(sums.of[third], third);
  }
  return MPK_OK;
}

#endif

}  // namespace gpu
}  // namespace mpk
