/* A tile of a wide product: 128 rows of the weight, streamed in MPK_LAYOUT_FRAGMENT, times `Nt` times N tokens in
 * MPK_LAYOUT_WIDE. Each of the two compute warpgroups has 64 of the rows. A warp computes the sums of its own 16 rows, as the
 * fragments distribute them. In a gated product (MPK_LAYOUT_PAIRED) these are 8 gates and their ups, so that a thread has both.
 *
 * All of K goes through the rings in steps of 64 (wide_product.cuh). The sums stay in registers until the end.
 *
 * What happens with the sums is decided at run time, not by templates: each further main loop in a kernel costs registers, and
 * beyond some number of loops ptxas serialises the products of all of them (C7512). */
#pragma once

#include "gpu/wide_loader.cuh"
#include "gpu/wide_product.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_linear/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace wide {

constexpr uint32_t kWeight = 1; /* operand index */
static_assert(kStageBytes == kComputeWarps * 4 * kWideBlockBytes, "a stage is 128 rows x 64 k");
static_assert(kPlaces * kPlaceBytes + kComputeWarps * kTurnBytes <= kWorkBytes, "the work area is too small for wide products");

__device__ __forceinline__ const mpk_wide_linear_params& params_of(const TaskSlot& slot) {
  return *reinterpret_cast<const mpk_wide_linear_params*>(slot.params);
}
/* The number of the tile's rows that are in use. */
__device__ __forceinline__ uint32_t tokens_of(const TaskSlot& slot) {
  const mpk_wide_linear_params& params = params_of(slot);
  const uint32_t kind = params.rows_kind, first = static_cast<uint32_t>(slot.task.args[0]);
  const uint32_t used = min(kind == 0 ? slot.num_rows : kind == 1 ? slot.num_samples : params.rows, params.rows);
  return used > first ? min(used - first, params.tokens * params.width) : 0;
}
/* Blocks of 16 k: all blocks of the weight, and the task's. The task has none if no row is in use. */
struct Blocks {
  uint32_t all, first, count;
  __device__ __forceinline__ explicit Blocks(const TaskSlot& slot) : all(tokens_of(slot) == 0 ? 0 : (slot.operands[kWeight].dims[1] + 15) / 16) {
    first = static_cast<uint32_t>(slot.task.args[1]);
    const uint32_t end = min(all, static_cast<uint32_t>(slot.task.args[2]));
    count = end > first ? end - first : 0;
  }
};
/* Bias and residual are added by the task with the first part of k. */
__device__ __forceinline__ bool is_first(const Context& context) { return context.slot->task.args[1] == 0; }

/* The rows of a task's weight, stage by stage. A stage has `Tiles` tiles of 16 rows. `high` stages with different rows have the same k.
 * The next stage has the next `Step` blocks of k. */
template <uint32_t Tiles, uint32_t Step>
class RowStages {
 public:
  __device__ __forceinline__ RowStages(const TaskSlot& slot, const Blocks& blocks, uint32_t high = 1)
      : pitch_(blocks.all * kWideBlockBytes), left_(blocks.count), high_(high), tiles_((slot.operands[kWeight].dims[0] + 15) / 16) {
    whole_ = tiles_ >= high * Tiles;
    forth_ = Tiles * pitch_;
    from_ = slot.operands[kWeight].addr + blocks.first * kWideBlockBytes;
  }
  /* Fills the next stage, which must be free. */
  template <bool Once>
  __device__ __forceinline__ void stream(WideLoader& loader) {
    if (whole_ && left_ >= Step) {
      loader.stream_whole<Tiles, Step * kWideBlockBytes, Once>(from_, pitch_);
    } else {
      const uint32_t begin = number_ * Tiles;
      loader.stream_rest<Once>(from_, tiles_ > begin ? min(tiles_ - begin, Tiles) : 0, pitch_, min(left_, Step) * kWideBlockBytes);
    }
    int64_t further = Step * kWideBlockBytes;
    if (high_ == 1) {
      left_ -= min(left_, Step);
    } else if (++number_ == high_) {
      further -= static_cast<int64_t>(high_ - 1) * forth_;
      left_ -= min(left_, Step);
      number_ = 0;
    } else {
      further = forth_;
    }
    from_ += further;
  }

 private:
  uint64_t from_;                /* address of the stage's first tile */
  uint32_t pitch_, left_, high_; /* bytes from one tile to the next; blocks of 16 k that are left */
  uint32_t tiles_, forth_;       /* all tiles; bytes from one stage to the next */
  uint32_t number_ = 0;          /* of the stage, among those with the same k */
  bool whole_;                   /* all stages have all their tiles */
};

/* The bias of a column of the tile; 0 if it has none. `up`: of the up instead of the gate. */
__device__ __forceinline__ float bias_at(const Context& context, bool up, uint32_t column) {
  const mpk_wide_linear_params& params = params_of(*context.slot);
  if (params.has_bias == 0 || params.add_bias == 0 || !is_first(context)) return 0.0f;
  const mpk_operand& operand = context.input(kWeight + 1 + (up ? 1 : 0));
  return column < operand.dims[0] ? load_as_f32(reinterpret_cast<const void*>(operand.addr), operand.dtype, column) : 0.0f;
}

/* The bias of rows lane / 4 and lane / 4 + 8 of the warp's 16 rows, row tile `tile` of the task. In a gated product these are a gate and its up. */
__device__ __forceinline__ void load_bias(const Context& context, bool gated, uint32_t tile, float (&bias)[2]) {
  const uint32_t column = tile * (gated ? MPK_PAIR_ROWS : 16) + context.lane / 4;
  bias[0] = bias_at(context, false, column);
  bias[1] = bias_at(context, gated, gated ? column : column + 8);
}
/* The residual, or NULL. */
__device__ __forceinline__ const mpk_operand* residual_of(const Context& context) {
  const mpk_wide_linear_params& params = params_of(*context.slot);
  return params.has_residual != 0 ? &context.input(kWeight + 1 + params.has_bias) : nullptr;
}

/* Named barriers 4 to 7 are for two or four warps: with neighbouring rows, or with the same rows (wide_shared.cuh). Attention uses 2 and 3. */
__device__ __forceinline__ void pair_sync(uint32_t warp) { asm volatile("bar.sync %0,64;" ::"r"(4 + warp / 2) : "memory"); }

}  // namespace wide

/* Stores a warpgroup's sums: of 64 rows of the weight, which are 4 row tiles of 16, times `Nt` times N tokens. `tile`: the warp's row tile among
 * those of the task. `first`: the first of the tokens. `Columns`: columns of a column tile of an output in MPK_LAYOUT_WIDE. */
template <uint32_t Weight, uint32_t Nt, uint32_t N, uint32_t Columns>
struct WideStore {
  using Sums = WideSums<Nt, N>;
  static __device__ __forceinline__ void store(Context& context, Sums& sums, uint32_t tokens, uint32_t first, uint32_t tile);

 private:
  static_assert(N % 64 == 0, "two warps share the gated sums of 64 tokens");

  static __device__ __forceinline__ void store_gated(Context& context, Sums& sums, const float (&bias)[2], uint32_t tokens, uint32_t first, uint32_t tile,
                                                     uint32_t buffer);
  static __device__ __forceinline__ void store_halves(const mpk_operand& out, uint32_t lane, uint32_t token, uint32_t tokens, uint32_t column,
                                                      const uint4 (&pieces)[2]);
  static __device__ __forceinline__ void store_floats(const Context& context, const Sums& sums, const float (&bias)[2], uint32_t tokens, uint32_t first,
                                                      uint32_t tile);
};

template <uint32_t Weight, uint32_t Nt, uint32_t N>
struct WideLinear : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  static_assert(Nt <= 2 && kPlaceBytes >= N * 128 && kStageBytes >= N * 128, "places and stages of N tokens x 64 k");
};

template <uint32_t Weight, uint32_t Nt, uint32_t N>
__device__ inline bool WideLinear<Weight, Nt, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const wide::Blocks blocks(slot);
  const uint32_t steps = (blocks.count + 3) / 4;
  const bool both = Nt == 2 && wide::tokens_of(slot) > N;
  if (loader.prefetches()) {
    /* The tiles of a wave share their weights in the L2 cache anyway. */
    loader.skip(both ? 2 * steps : steps);
    return true;
  }
  WideLoader wide(loader);
  wide::RowStages<8, 4> rows(slot, blocks);
  const mpk_operand& x = slot.operands[0];
  const uint64_t x_step = static_cast<uint64_t>(x.strides[1]) * 2;
  uint64_t first = x.addr + blocks.first / 4 * x_step, second = first + (x.dims[0] > 1 ? static_cast<uint64_t>(x.strides[0]) * 2 : 0);
  const auto weights = [&] { rows.template stream<false>(wide); };
  const auto tokens = [&] {
    wide.stream_stage(second, N * 128);
    second += x_step;
  };
  const auto place = [&] {
    wide.stream_place(first, N * 128);
    first += x_step;
  };
  if (both) return wide.run<false, true>(steps, steps, weights, tokens, place);
  return wide.run<false, false>(steps, steps, weights, tokens, place);
}

template <uint32_t Weight, uint32_t Nt, uint32_t N>
__device__ inline int WideLinear<Weight, Nt, N>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes these after the barrier in wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const uint32_t tokens = wide::tokens_of(*context.slot), blocks = wide::Blocks(*context.slot).count;
  if (tokens == 0) return MPK_OK;
  StageRing stages(stage);
  PlaceRing places(place);
  WideSums<Nt, N> sums;
  const bool arrives = kEveryLaneArrives || context.lane == 0;
  if (Nt == 2 && tokens <= N) wide_multiply<Weight, 1>(sums, stages, places, blocks, context.warp, context.lane, arrives);
  else wide_multiply<Weight, Nt>(sums, stages, places, blocks, context.warp, context.lane, arrives);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  WideStore<Weight, Nt, N, MPK_WIDE_COLUMNS>::store(context, sums, tokens, 0, context.warp);
  return MPK_OK;
}

template <uint32_t Weight, uint32_t Nt, uint32_t N, uint32_t Columns>
__device__ __forceinline__ void WideStore<Weight, Nt, N, Columns>::store(Context& context, Sums& sums, uint32_t tokens, uint32_t first, uint32_t tile) {
  const bool gated = wide::params_of(*context.slot).gated != 0;
  const mpk_operand& out = context.output(0);
  const uint32_t buffer = shared_address(work_area()) + kPlaces * kPlaceBytes + context.warp * kTurnBytes;
  float bias[2];
  wide::load_bias(context, gated, tile, bias);
  if (gated) return store_gated(context, sums, bias, tokens, first, tile, buffer);
  if (out.dtype == MPK_F32) return store_floats(context, sums, bias, tokens, first, tile);
#pragma unroll
  for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
    for (uint32_t j = 0; j < N / 32; ++j) {
      uint32_t pairs[8];
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) pairs[i] = pair_of<Weight>(sums.of[t][j * 16 + i * 2] + bias[i % 2], sums.of[t][j * 16 + i * 2 + 1] + bias[i % 2]);
      uint4 pieces[2];
      turn(buffer, context.lane, pairs, pieces);
      store_halves(out, context.lane, first + t * N + j * 32, tokens, tile * 16, pieces);
    }
}

/* Two warps with neighbouring rows have 8 columns each of the same 16. They transpose their values of 64 tokens into one buffer. Then
 * each of them stores all 16 columns for half of these tokens. */
template <uint32_t Weight, uint32_t Nt, uint32_t N, uint32_t Columns>
__device__ __forceinline__ void WideStore<Weight, Nt, N, Columns>::store_gated(Context& context, Sums& sums, const float (&bias)[2], uint32_t tokens,
                                                                               uint32_t first, uint32_t tile, uint32_t buffer) {
  const mpk_operand& out = context.output(0);
  const bool to_wide = wide::params_of(*context.slot).wide_output != 0;
  const uint32_t lane = context.lane, half = context.warp % 2, group = tile / 2, both = buffer - half * kTurnBytes;
#pragma unroll
  for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
    for (uint32_t j = 0; j < N / 64; ++j) {
      uint32_t pairs[8];
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        const float* const sum = &sums.of[t][(j * 8 + i) * 4];
        const uint32_t gate = pair_of<Weight>(sum[0] + bias[0], sum[1] + bias[0]), up = pair_of<Weight>(sum[2] + bias[1], sum[3] + bias[1]);
        pairs[i] = pair_of<Weight>(silu(low_of<Weight>(gate)) * low_of<Weight>(up), silu(high_of<Weight>(gate)) * high_of<Weight>(up));
      }
      turn_half(both, lane, half, pairs);
      wide::pair_sync(context.warp);
      uint4 pieces[2];
      turned(both + half * kTurnBytes, lane, pieces);
      wide::pair_sync(context.warp);
      const uint32_t token = first + t * N + j * 64 + half * 32;
      if (to_wide) store_wide<Columns>(out, lane, token, tokens, group, context.input(wide::kWeight).dims[0] / 2, pieces);
      else store_halves(out, lane, token, tokens, group * 16, pieces);
    }
}

/* Stores 16 columns of 32 tokens in sectors of 32 bytes, 16 bytes per lane. */
template <uint32_t Weight, uint32_t Nt, uint32_t N, uint32_t Columns>
__device__ __forceinline__ void WideStore<Weight, Nt, N, Columns>::store_halves(const mpk_operand& out, uint32_t lane, uint32_t first_token, uint32_t tokens,
                                                                        uint32_t first_column, const uint4 (&pieces)[2]) {
  const uint32_t columns = out.dims[1], column = first_column + lane % 2 * 8;
  const uint64_t row_bytes = static_cast<uint64_t>(out.strides[0]) * 2;
  const bool whole = column + 8 <= columns && ((out.addr | row_bytes) & 15) == 0;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t token = first_token + i * 16 + lane / 2;
    if (token >= tokens) continue;
    uint8_t* const to = reinterpret_cast<uint8_t*>(out.addr) + token * row_bytes + column * 2;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = pieces[i];
    } else {
      const uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c)
        if (column + c < columns) reinterpret_cast<uint16_t*>(to)[c] = static_cast<uint16_t>(words[c / 2] >> (c % 2 * 16));
    }
  }
}

/* Stores a warp's 16 columns of all tokens. 8 columns are a sector of 32 bytes. */
template <uint32_t Weight, uint32_t Nt, uint32_t N, uint32_t Columns>
__device__ __forceinline__ void WideStore<Weight, Nt, N, Columns>::store_floats(const Context& context, const Sums& sums, const float (&bias)[2], uint32_t tokens,
                                                                                uint32_t first, uint32_t tile) {
  const mpk_operand& out = context.output(0);
  const mpk_operand* const residual = wide::is_first(context) ? wide::residual_of(context) : nullptr;
  const uint32_t lane = context.lane, columns = out.dims[1], first_column = tile * 16 + lane / 4, first_token = first + lane % 4 * 2;
  const bool inside[2] = {first_column < columns, first_column + 8 < columns}, adds[2] = {inside[0] && residual != nullptr, inside[1] && residual != nullptr};
  const uint64_t to_bytes = static_cast<uint64_t>(out.strides[0]) * 4, from_bytes = residual != nullptr ? static_cast<uint64_t>(residual->strides[0]) * 4 : 0;
  const uint64_t to = out.addr + first_token * to_bytes + first_column * 4;
  const uint64_t from = residual != nullptr ? residual->addr + first_token * from_bytes + first_column * 4 : 0;
#pragma unroll
  for (uint32_t t = 0; t < Nt; ++t)
#pragma unroll
    for (uint32_t j = 0; j < N / 8; j += 8) {
      /* These loads run at the same time. One after the other they would take most of the task's time. */
      float value[32];
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t token = t * N + (j + i / 2) * 8 + i % 2;
        const bool used = first_token + token < tokens;
        load_global4_if<0>(value[i * 2], from + token * from_bytes, used && adds[0]);
        load_global4_if<32>(value[i * 2 + 1], from + token * from_bytes, used && adds[1]);
      }
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {
        const uint32_t token = t * N + (j + i / 2) * 8 + i % 2, at = (j + i / 2) * 4 + i % 2;
        const bool used = first_token + token < tokens;
        store_global4_if<0>(to + token * to_bytes, sums.of[t][at] + bias[0] + value[i * 2], used && inside[0]);
        store_global4_if<32>(to + token * to_bytes, sums.of[t][at + 2] + bias[1] + value[i * 2 + 1], used && inside[1]);
      }
    }
}

#endif

}  // namespace gpu
}  // namespace mpk
