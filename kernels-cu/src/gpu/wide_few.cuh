/* A tile of a product of few rows: 64 rows of the weight times N tokens. Memory bandwidth for the weights limits such products.
 * The two warpgroups share the k of a stage (few_multiply), and their sums are added in shared memory, 16 tokens at a time. In a
 * gated product, 8 gates and their ups alternate (MPK_LAYOUT_PAIRED).
 *
 * A task may have only a part of k. Then its sums are one of several outputs, and a later task adds these up. */
#pragma once

#include "gpu/wide_linear.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight, uint32_t N>
struct WideFew : TaskCode {
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  static_assert(kPlaceBytes >= 2 * N * 128, "places of N tokens x 128 k");
  static_assert(kComputeWarps * kTurnBytes >= 2 * 16 * 64 * 4, "both warpgroups' sums of 16 tokens");

  static __device__ __forceinline__ int store(Context& context, const WideSums<1, N>& sums, uint32_t tokens);
  static __device__ __forceinline__ void store_four(const Context& context, uint32_t token, uint32_t column, const float4& sum);
  static __device__ __forceinline__ void store_gated_pair(const Context& context, uint32_t token, uint32_t column, const float2& gate, const float2& up);
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
  return store(context, sums, tokens);
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ int WideFew<Weight, N>::store(Context& context, const WideSums<1, N>& sums, uint32_t tokens) {
  const bool gated = wide::params_of(*context.slot).gated != 0;
  const uint32_t lane = context.lane, area = shared_address(work_area()) + kPlaces * kPlaceBytes;
  const uint32_t first = wide::first_place(context, gated), second = wide::second_place(context, gated);
  /* For each warpgroup [16 tokens][64 rows]. The order of the rows avoids bank conflicts for writes and reads. */
  const auto at = [&](uint32_t warpgroup, uint32_t token, uint32_t row) { return area + ((warpgroup * 16 + token) * 64 + (row ^ token / 2 % 4 * 8)) * 4; };
#pragma unroll
  for (uint32_t chunk = 0; chunk < N / 16; ++chunk) {
    if (chunk * 16 >= tokens) break;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      store_shared4(at(context.warp / 4, i / 4 * 8 + lane % 4 * 2 + i % 2, i / 2 % 2 == 0 ? first : second), sums.of[0][chunk * 8 + i]);
    if (const int code = context.sync(); code != MPK_OK) return code;
    const uint32_t token = context.thread / 16, four = context.thread % 16;
    if (chunk * 16 + token < tokens) {
      if (gated) {
        const float2 g0 = load_shared_pair(at(0, token, four * 2)), g1 = load_shared_pair(at(1, token, four * 2));
        const float2 u0 = load_shared_pair(at(0, token, 32 + four * 2)), u1 = load_shared_pair(at(1, token, 32 + four * 2));
        store_gated_pair(context, chunk * 16 + token, four * 2, {g0.x + g1.x, g0.y + g1.y}, {u0.x + u1.x, u0.y + u1.y});
      } else {
        const uint4 a = load_shared16(at(0, token, four * 4)), b = load_shared16(at(1, token, four * 4));
        store_four(context, chunk * 16 + token, four * 4,
                   {__uint_as_float(a.x) + __uint_as_float(b.x), __uint_as_float(a.y) + __uint_as_float(b.y), __uint_as_float(a.z) + __uint_as_float(b.z),
                    __uint_as_float(a.w) + __uint_as_float(b.w)});
      }
    }
    if ((chunk + 1) * 16 < N) {
      if (const int code = context.sync(); code != MPK_OK) return code;
    }
  }
  return MPK_OK;
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideFew<Weight, N>::store_four(const Context& context, uint32_t token, uint32_t column, const float4& sum) {
  const mpk_operand& out = context.output(0);
  const mpk_operand* const residual = wide::is_first(context) ? wide::residual_of(context) : nullptr;
  const uint32_t columns = out.dims[1];
  uint8_t* const to = row_address(out, token);
  const float value[4] = {sum.x + wide::bias_at(context, false, column), sum.y + wide::bias_at(context, false, column + 1),
                          sum.z + wide::bias_at(context, false, column + 2), sum.w + wide::bias_at(context, false, column + 3)};
  if (residual == nullptr && out.dtype == MPK_F32 && column + 4 <= columns && (reinterpret_cast<uint64_t>(to) & 15) == 0) {
    reinterpret_cast<float4*>(to)[column / 4] = {value[0], value[1], value[2], value[3]};
    return;
  }
  float before[4]; /* these loads run at the same time */
  const uint64_t from = residual != nullptr ? reinterpret_cast<uint64_t>(row_address(*residual, token)) + column * 4 : 0;
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) load_global4_if<0>(before[c], from + c * 4, residual != nullptr && column + c < columns);
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) {
    if (column + c >= columns) break;
    if (residual == nullptr) store_rounded(to, out.dtype, column + c, value[c]);
    else reinterpret_cast<float*>(to)[column + c] = value[c] + before[c];
  }
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideFew<Weight, N>::store_gated_pair(const Context& context, uint32_t token, uint32_t column, const float2& gate,
                                                                     const float2& up) {
  const mpk_operand& out = context.output(0);
  const float gates[2] = {gate.x, gate.y}, ups[2] = {up.x, up.y};
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c) {
    if (column + c >= out.dims[1]) break;
    const float g = rounded_to(Weight, gates[c] + wide::bias_at(context, false, column + c)), u = rounded_to(Weight, ups[c] + wide::bias_at(context, true, column + c));
    store_rounded(row_address(out, token), out.dtype, column + c, u * silu(g));
  }
}

#endif

}  // namespace gpu
}  // namespace mpk
