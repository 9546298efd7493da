/* A tile of a product of few rows: 64 rows of the weight times N tokens. Memory bandwidth for the weights limits such products.
 * The two warpgroups share the k of a stage (few_multiply), and add up their sums when they store them (wide_shared.cuh). In a gated
 * product, 8 gates and their ups alternate (MPK_LAYOUT_PAIRED).
 *
 * A task may have only a part of k. Then its sums are one of several outputs, and a later task adds these up. */
#pragma once

#include "gpu/wide_shared.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight, uint32_t N>
struct WideFew : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  static_assert(kPlaceBytes >= 2 * N * 128, "places of N tokens x 128 k");
};

template <uint32_t Weight, uint32_t N>
__device__ inline bool WideFew<Weight, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t steps = (blocks.count + 7) / 8;
  if (loader.prefetches()) {
    loader.skip(steps);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<4, 8> rows(slot, blocks);
  const mpk_operand& x = slot.operands[0];
  const uint64_t x_step = static_cast<uint64_t>(x.strides[1]) * 2;
  uint64_t from_x = x.addr + blocks.first / 4 * x_step;
  uint32_t left = blocks.count;
  const auto weights = [&] { rows.template stream<true>(wide); };
  const auto place = [&] {
    wide.stream_place<2>(from_x, N * 128, left > 4 ? 2 : 1, x_step);
    from_x += 2 * x_step;
    left -= min(left, 8u);
  };
  return wide.run<true, false>(steps, steps, weights, [] {}, place);
}

template <uint32_t Weight, uint32_t N>
__device__ inline int WideFew<Weight, N>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes these after the barrier in wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count;
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  WideSums<1, N> sums;
  few_multiply<Weight>(sums, stages, places, blocks, context.warp, context.lane, kEveryLaneArrives || context.lane == 0);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  SharedSums<Weight, N>(context, tokens).store(sums.of[0], 0);
  return MPK_OK;
}

#endif

}  // namespace gpu
}  // namespace mpk
