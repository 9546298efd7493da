/* A tile of 65 to 128 rows, all of the iteration: up to three times 64 rows of the weight times 128 tokens. Memory bandwidth for the
 * weights and L2 bandwidth for the tokens limit such products, so a tile has many rows of the weight, which share the loaded tokens. Each
 * warpgroup has 64 of the tokens and all rows of the weight, so its sums are complete. In a gated product, 8 gates and their ups alternate
 * (MPK_LAYOUT_PAIRED). The tokens lie in column tiles of 16 (MPK_WIDE_NARROW), because a gated tile of 192 rows has 96 columns of the
 * output.
 *
 * A task may have only a part of k. Then its sums are one of several outputs, and a later task adds these up. */
#pragma once

#include "gpu/wide_linear.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight>
struct WideBroad : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  /* The tokens of a warpgroup. */
  static constexpr uint32_t kTokens = 64;
  /* Each has 64 rows of the weight. There are no registers for more. */
  static constexpr uint32_t kChains = 3;
  using Sums = WideSums<1, kTokens>;
  static constexpr uint32_t kTileBytes = 2 * kTokens * kNarrowBytes; /* of a column tile of all tokens; the next one is adjacent */
  static_assert(kPlaceBytes == 4 * kTileBytes, "a place is 128 tokens x 64 k");
  static_assert(kStageBytes == 4 * 8 * kWideBlockBytes, "a stage is 64 rows x 128 k");

  static __device__ __forceinline__ uint32_t chains_of(const TaskSlot& slot) { return wide::params_of(slot).high / 64; }

  /* Where a thread works. */
  struct Warp {
    uint32_t tile, lane;  /* of the warpgroup's four tiles of 16 rows of the weight */
    uint32_t first_token; /* bytes from the start of a column tile to the warpgroup's tokens */
    bool arrives;         /* this thread releases what its warp has read */
  };
  static __device__ __forceinline__ void multiply(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t chains,
                                                  const Warp& warp);
  template <uint32_t Chains>
  static __device__ __forceinline__ void full_steps(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t steps, const Warp& warp);
  static __device__ __forceinline__ void short_step(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t here, uint32_t chains,
                                                    const Warp& warp);
  static __device__ __forceinline__ void multiply_half(Sums& sums, const uint4 (&a)[4], uint32_t tokens);
};

template <uint32_t Weight>
__device__ inline bool WideBroad<Weight>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t chains = chains_of(slot), stages = (blocks.count + 7) / 8 * chains;
  if (loader.prefetches()) {
    loader.skip(stages);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<4, 8> rows(slot, blocks, chains);
  uint64_t from_x = slot.operands[0].addr + blocks.first * kTileBytes;
  const auto weights = [&] { rows.template stream<true>(wide); };
  const auto place = [&] {
    wide.stream_place(from_x, kPlaceBytes);
    from_x += kPlaceBytes;
  };
  return wide.run<true, false>(stages, (blocks.count + 3) / 4, weights, [] {}, place);
}

/* Multiplies `blocks` times 16 k into `sums`. A step has 128 k, or what is left: a stage for each of the chains, with its 64 rows of the
 * weight, and two places with 64 k of the tokens each. */
template <uint32_t Weight>
__device__ __forceinline__ void WideBroad<Weight>::multiply(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t blocks, uint32_t chains,
                                                            const Warp& warp) {
#pragma unroll
  for (uint32_t chain = 0; chain < kChains; ++chain) sums[chain].clear();
  const uint32_t steps = blocks / 8;
  if (chains == 3) full_steps<3>(sums, stages, places, steps, warp);
  else if (chains == 2) full_steps<2>(sums, stages, places, steps, warp);
  else full_steps<1>(sums, stages, places, steps, warp);
  if (blocks % 8 != 0) short_step(sums, stages, places, blocks % 8, chains, warp);
#pragma unroll
  for (uint32_t chain = 0; chain < kChains; ++chain) sums[chain].keep_order();
}

/* While the products of 64 k run, the next weights are loaded. ptxas pauses after each product if the number of chains is known only at run
 * time, or if weights in registers are changed in a branch. So there is a loop for each number of chains, and short steps are apart. */
template <uint32_t Weight>
template <uint32_t Chains>
__device__ __forceinline__ void WideBroad<Weight>::full_steps(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t steps,
                                                              const Warp& warp) {
#pragma unroll 1
  for (; steps != 0; --steps) {
    uint4 a[2][4];
    uint32_t tokens[2]; /* addresses of the warpgroup's tokens in the step's places */
#pragma unroll
    for (uint32_t chain = 0; chain < Chains; ++chain) {
      stages.wait();
      const uint32_t from = stages.address() + warp.tile * 8 * kWideBlockBytes + warp.lane * 16;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        wgmma_wait<1>(); /* the products before last have read these registers */
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) a[half][block] = load_shared16(from + (half * 4 + block) * kWideBlockBytes);
        if (chain == 0) {
          places.wait();
          tokens[half] = places.address() + warp.first_token;
          places.next();
        }
        multiply_half(sums[chain], a[half], tokens[half]);
      }
      if (warp.arrives) mbarrier_arrive(stages.empty_barrier()); /* the weights are in registers, because the products have begun */
      stages.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      if (warp.arrives) mbarrier_arrive(places.empty_barrier(tokens[half]));
  }
}

/* The last step: `here` blocks, fewer than 8. The places of the others are not filled. */
template <uint32_t Weight>
__device__ __forceinline__ void WideBroad<Weight>::short_step(Sums (&sums)[kChains], StageRing& stages, PlaceRing& places, uint32_t here, uint32_t chains,
                                                              const Warp& warp) {
  uint4 a[4];
  uint32_t tokens[2] = {};
#pragma unroll
  for (uint32_t chain = 0; chain < kChains; ++chain) {
    if (chain >= chains) break;
    stages.wait();
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (half == 1 && here <= 4) break;
      load_blocks(a, stages.address() + (warp.tile * here + half * 4) * kWideBlockBytes + warp.lane * 16, here - half * 4);
      if (chain == 0) {
        places.wait();
        tokens[half] = places.address() + warp.first_token;
        places.next();
      }
      multiply_half(sums[chain], a, tokens[half]);
      wgmma_wait<0>();
      if (warp.arrives && chain + 1 == chains) mbarrier_arrive(places.empty_barrier(tokens[half]));
    }
    if (warp.arrives) mbarrier_arrive(stages.empty_barrier());
    stages.next();
  }
}

/* Starts the products of 64 k. */
template <uint32_t Weight>
__device__ __forceinline__ void WideBroad<Weight>::multiply_half(Sums& sums, const uint4 (&a)[4], uint32_t tokens) {
  constexpr uint32_t kNext = kTileBytes / 16; /* from one column tile to the next, in units of a descriptor */
  const uint64_t b = narrow_descriptor(tokens);
  wgmma_fence();
#pragma unroll
  for (uint32_t block = 0; block < 4; ++block) wgmma<Weight>(sums.of[0], a[block], b + block * kNext);
  wgmma_commit();
}

template <uint32_t Weight>
__device__ inline int WideBroad<Weight>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes these after the barrier in wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count, chains = chains_of(*context.slot);
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  Sums sums[kChains];
  const Warp warp = {context.warp % 4, context.lane, context.warp / 4 * (kTokens * kNarrowBytes), kEveryLaneArrives || context.lane == 0};
  multiply(sums, stages, places, blocks, chains, warp);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
#pragma unroll
  for (uint32_t chain = 0; chain < kChains; ++chain) {
    if (chain >= chains) break;
    WideStore<Weight, 1, kTokens, MPK_WIDE_NARROW>::store(context, sums[chain], tokens, context.warp / 4 * kTokens, chain * 4 + context.warp % 4);
  }
  return MPK_OK;
}

#endif

}  // namespace gpu
}  // namespace mpk
