/* A tile that has all rows of the iteration: up to 64 rows of the weight times N tokens, or two or three times 64 rows that share the
 * loaded tokens. Memory bandwidth for the weights limits such products. The two warpgroups share the k of a stage, and their sums are added
 * in shared memory, 16 tokens at a time. In a gated product, 8 gates and their ups alternate (MPK_LAYOUT_PAIRED). The tokens lie in
 * column tiles of N rows x 32 (MPK_WIDE_NARROW).
 *
 * A task may have only a part of k. Then its sums are one of several outputs, and a later task adds these up. */
#pragma once

#include "gpu/wide_linear.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Multiplies `blocks` times 16 k into `sums`. A step has 128 k: a stage with 64 rows of the weight, and a place with N tokens.
 * Warpgroup 0 takes the first 64 k, warpgroup 1 the others. So each warpgroup has a part of every sum.
 * `high`: with 2 or 3, the tile has as many times 64 rows of the weight. So many stages share the step's tokens, and each third of
 * `sums` has 64 rows. With 1, the tile has 64 rows, each stage is a step, and each third has the sums of every third step; the thirds are
 * added at the end. */
template <uint32_t Weight, uint32_t Chains, uint32_t N>
__device__ __forceinline__ void tall_multiply(WideSums<Chains, N>& sums, StageRing& stages, PlaceRing& places, uint32_t blocks,
                                             uint32_t high, uint32_t warp, uint32_t lane, bool arrives) {
  sums.clear();
  const bool tall = Chains != 1 && high > 1;
  const uint32_t first = warp / 4 * 4, tile = warp % 4;
  constexpr uint32_t kSecond = N * kNarrowBytes / 16; /* from one column tile to the next, in units of a descriptor */
  uint4 a[4];
  uint32_t tokens = 0, of_place = 0; /* address of the step's tokens, barrier of their place */
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
      if (third == 0 || Chains == 1 || !tall) {
        places.wait();
        /* In a short step the second half of the place is not filled, and not read. */
        tokens = places.address() + (here > 4 ? first / 4 * (N * 128) : 0);
        of_place = places.empty_barrier();
        places.next();
      }
      const uint64_t b = narrow_descriptor(tokens);
      wgmma_fence();
#pragma unroll
      for (uint32_t block = 0; block < 4; ++block) wgmma<Weight>(sums.of[third], a[block], b + (block / 2 * kSecond + block % 2 * 2));
      wgmma_commit();
      if (arrives) mbarrier_arrive(of_stage);
      wgmma_wait<0>();
      const bool last = third == Chains - 1 || !tall || third + 1 == high;
      if (last && arrives) mbarrier_arrive(of_place);
      if (last) left -= here;
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
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  /* Each has 64 rows of the weight. There are no registers for more. */
  static constexpr uint32_t kChains = 3;
  static_assert(kPlaceBytes >= 2 * N * 128, "places of N tokens x 128 k");
  static_assert(kComputeWarps * kTurnBytes >= 2 * 16 * 64 * 4, "both warpgroups' sums of 16 tokens");

  static __device__ __forceinline__ int store(Context& context, const WideSums<kChains, N>& sums, uint32_t tokens);
  static __device__ __forceinline__ void store_four(const Context& context, uint32_t token, uint32_t column, const float4& sum);
  static __device__ __forceinline__ void store_gated_pair(const Context& context, uint32_t token, uint32_t column, const float2& gate, const float2& up);
  /* How many times 64 rows of the weight a tile has, at most. */
  static __device__ __forceinline__ uint32_t high_of(const TaskSlot& slot) { return (wide::params_of(slot).high + 63) / 64; }
};

template <uint32_t Weight, uint32_t N>
__device__ inline bool WideTall<Weight, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t steps = (blocks.count + 7) / 8, high = high_of(slot);
  if (loader.prefetches()) {
    loader.skip(steps * high);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<4, 8> rows(slot, blocks, high);
  /* Column tiles have just the N rows, so those of a step are adjacent. */
  constexpr uint32_t kTileBytes = N * kNarrowBytes;
  uint64_t from_x = slot.operands[0].addr + blocks.first / 2 * kTileBytes;
  uint32_t left = blocks.count;
  const auto weights = [&] { rows.template stream<true>(wide); };
  const auto place = [&] {
    wide.stream_place(from_x, (left > 4 ? 4 : 2) * kTileBytes);
    from_x += 4 * kTileBytes;
    left -= min(left, 8u);
  };
  return wide.run<true, false>(steps * high, steps, weights, [] {}, place);
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
  return store(context, sums, tokens);
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ int WideTall<Weight, N>::store(Context& context, const WideSums<kChains, N>& sums, uint32_t tokens) {
  const bool gated = wide::params_of(*context.slot).gated != 0;
  const uint32_t high = high_of(*context.slot);
  const uint32_t lane = context.lane, area = shared_address(work_area()) + kPlaces * kPlaceBytes;
  const uint32_t first = wide::first_place(context, gated), second = wide::second_place(context, gated);
  /* For each warpgroup [16 tokens][64 rows]. The order of the rows avoids bank conflicts for writes and reads. */
  const auto at = [&](uint32_t warpgroup, uint32_t token, uint32_t row) { return area + ((warpgroup * 16 + token) * 64 + (row ^ token / 2 % 4 * 8)) * 4; };
#pragma unroll
  for (uint32_t number = 0; number < kChains * (N / 16); ++number) {
    const uint32_t third = number / (N / 16), chunk = number % (N / 16);
    if (third >= high) break;
    if (chunk * 16 >= tokens) continue;
    if (number != 0) {
      if (const int code = context.sync(); code != MPK_OK) return code;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      store_shared4(at(context.warp / 4, i / 4 * 8 + lane % 4 * 2 + i % 2, i / 2 % 2 == 0 ? first : second), sums.of[third][chunk * 8 + i]);
    if (const int code = context.sync(); code != MPK_OK) return code;
    const uint32_t in_chunk = context.thread / 16, four = context.thread % 16;
    const uint32_t token = chunk * 16 + in_chunk;
    if (token >= tokens) continue;
    if (gated) {
      float2 gate = load_shared_pair(at(0, in_chunk, four * 2)), up = load_shared_pair(at(0, in_chunk, 32 + four * 2));
      const float2 g = load_shared_pair(at(1, in_chunk, four * 2)), u = load_shared_pair(at(1, in_chunk, 32 + four * 2));
      gate.x += g.x, gate.y += g.y, up.x += u.x, up.y += u.y;
      store_gated_pair(context, token, third * 32 + four * 2, gate, up);
    } else {
      const uint4 a = load_shared16(at(0, in_chunk, four * 4)), b = load_shared16(at(1, in_chunk, four * 4));
      store_four(context, token, third * 64 + four * 4,
                 {__uint_as_float(a.x) + __uint_as_float(b.x), __uint_as_float(a.y) + __uint_as_float(b.y),
                  __uint_as_float(a.z) + __uint_as_float(b.z), __uint_as_float(a.w) + __uint_as_float(b.w)});
    }
  }
  return MPK_OK;
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideTall<Weight, N>::store_four(const Context& context, uint32_t token, uint32_t column, const float4& sum) {
  const mpk_operand& out = context.output(0);
  const mpk_operand* const residual = wide::is_first(context) ? wide::residual_of(context) : nullptr;
  /* With two summands (three dimensions), the view of the output has one of them, the view of the residual both. */
  const uint32_t dim = out.ndim - 2, columns = out.dims[dim + 1];
  uint8_t* const to = reinterpret_cast<uint8_t*>(out.addr) + static_cast<uint64_t>(token) * out.strides[dim] * element_bytes(out.dtype);
  float value[4] = {sum.x + wide::bias_at(context, false, column), sum.y + wide::bias_at(context, false, column + 1),
                    sum.z + wide::bias_at(context, false, column + 2), sum.w + wide::bias_at(context, false, column + 3)};
  if (residual != nullptr) {
    const uint32_t of_residual = residual->ndim - 2;
    const uint64_t from = residual->addr + (static_cast<uint64_t>(token) * residual->strides[of_residual] + column) * 4;
    const uint64_t apart = of_residual != 0 ? static_cast<uint64_t>(residual->strides[0]) * 4 : 0;
    float before[2][4]; /* these loads run at the same time */
    if (((from | apart) & 15) == 0 && column + 4 <= columns) {
      const uint4 a = load_global16(from), b = apart != 0 ? load_global16(from + apart) : uint4{0, 0, 0, 0};
      before[0][0] = __uint_as_float(a.x), before[0][1] = __uint_as_float(a.y), before[0][2] = __uint_as_float(a.z), before[0][3] = __uint_as_float(a.w);
      before[1][0] = __uint_as_float(b.x), before[1][1] = __uint_as_float(b.y), before[1][2] = __uint_as_float(b.z), before[1][3] = __uint_as_float(b.w);
    } else {
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        load_global4_if<0>(before[0][c], from + c * 4, column + c < columns);
        load_global4_if<0>(before[1][c], from + apart + c * 4, apart != 0 && column + c < columns);
      }
    }
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) value[c] += before[0][c] + before[1][c];
  }
  if (out.dtype == MPK_F32 && column + 4 <= columns && (reinterpret_cast<uint64_t>(to) & 15) == 0) {
    reinterpret_cast<float4*>(to)[column / 4] = {value[0], value[1], value[2], value[3]};
    return;
  }
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c)
    if (column + c < columns) store_rounded(to, out.dtype, column + c, value[c]);
}

template <uint32_t Weight, uint32_t N>
__device__ __forceinline__ void WideTall<Weight, N>::store_gated_pair(const Context& context, uint32_t token, uint32_t column, const float2& gate,
                                                                     const float2& up) {
  const mpk_operand& out = context.output(0);
  const float gates[2] = {gate.x, gate.y}, ups[2] = {up.x, up.y};
  const uint32_t columns = context.input(wide::kWeight).dims[0] / 2;
  float value[2] = {};
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c) {
    if (column + c >= columns) break;
    const float g = rounded_to(Weight, gates[c] + wide::bias_at(context, false, column + c)), u = rounded_to(Weight, ups[c] + wide::bias_at(context, true, column + c));
    value[c] = u * silu(g);
  }
  if (wide::params_of(*context.slot).wide_output != 0) {
    /* Column tiles are whole, and the view's first row is a multiple of 8. */
    const uint32_t in_tile = column % MPK_WIDE_NARROW, word = in_tile % 16 / 4;
    uint8_t* const to = reinterpret_cast<uint8_t*>(out.addr) + static_cast<uint64_t>(column / MPK_WIDE_NARROW) * out.strides[1] * 2 +
                        token * (kNarrowBytes) + narrow_piece(token, in_tile / 16, in_tile / 2 % 2) + word * 4;
    if (column / MPK_WIDE_NARROW < out.dims[1]) *reinterpret_cast<uint32_t*>(to) = pair_of<Weight>(value[0], value[1]);
    return;
  }
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c)
    if (column + c < out.dims[1]) store_rounded(row_address(out, token), out.dtype, column + c, value[c]);
}

#endif

}  // namespace gpu
}  // namespace mpk
