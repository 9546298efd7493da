/* A tile of a wide product: `Mt` times 128 rows of the weight, streamed in MPK_LAYOUT_FRAGMENT, times `Nt` times N tokens in
 * MPK_LAYOUT_WIDE. Each of the two warpgroups that compute has 64 of each 128 rows; a warp's sums are of its own 16 rows, as
 * the fragments deal them, so a gated product has the gates and the ups of an output in one thread.
 *
 * All of K goes through the rings in steps of 64 (wide_product.cuh); the sums stay in registers and leave them once. */
#pragma once

#include "gpu/wide_loader.cuh"
#include "gpu/wide_product.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_linear/params.h"

namespace mpk {
namespace gpu {

namespace wide {
/* Outputs: of the weight's type, f32 with a residual where there is one, or silu(gate) * up of the weight's type. */
enum Out : uint32_t { kHalf, kFloat, kGated };
}  // namespace wide

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
struct WideLinear : TaskCode {
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  static constexpr bool kIsGated = Out == wide::kGated;
  static constexpr uint32_t kWeight = 1;
  static_assert(!kIsGated || Mt == 2, "gates and ups");
  static_assert(kStageBytes == kComputeWarps * 4 * kWideBlockBytes, "a stage is 128 rows x 64 k");
  static_assert(kPlaceBytes >= N * 128 && kPlaces >= 2 * Nt, "places of N tokens x 64 k");
  static_assert(kPlaces * kPlaceBytes + kComputeWarps * kTurnBytes <= kWorkBytes, "the work area is too small for wide products");

  struct Part {
    uint32_t tokens;      /* rows in use of the tile */
    uint32_t steps, tail; /* of 64 k, and blocks of 16 after them */
  };
  static __device__ __forceinline__ const mpk_wide_linear_params& params_of(const TaskSlot& slot) {
    return *reinterpret_cast<const mpk_wide_linear_params*>(slot.params);
  }
  static __device__ __forceinline__ Part part(const TaskSlot& slot) {
    const mpk_wide_linear_params& params = params_of(slot);
    const uint32_t kind = params.rows_kind, first = static_cast<uint32_t>(slot.task.args[0]);
    const uint32_t used = min(kind == 0 ? slot.num_rows : kind == 1 ? slot.num_samples : params.rows, params.rows);
    const uint32_t blocks = (slot.operands[kWeight].dims[1] + 15) / 16;
    return {used > first ? min(used - first, slot.operands[slot.task.num_inputs].dims[0]) : 0, blocks / 4, blocks % 4};
  }

  using Product = WideProduct<Weight, Mt, Nt, N>;
  static __device__ __forceinline__ void store(Context& context, const Product& product, uint32_t tokens);
  static __device__ __forceinline__ void store_half(const mpk_operand& out, uint32_t buffer, uint32_t lane, uint32_t first_token, uint32_t tokens,
                                                    uint32_t first_column, const float (&sum)[N / 2]);
  static __device__ __forceinline__ void store_float(const mpk_operand& out, const mpk_operand* residual, uint32_t lane,
                                                     uint32_t first_token, uint32_t tokens, uint32_t first_column, const float (&sum)[N / 2]);
};

template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
__device__ inline bool WideLinear<Weight, Out, Mt, Nt, N>::load(Loader& loader) {
  const TaskSlot& slot = *loader.slot;
  const Part p = part(slot);
  const uint32_t steps = p.tokens == 0 ? 0 : p.steps + (p.tail != 0);
  if (loader.prefetches()) {
    /* A wave of tiles shares its weights in the L2 cache as it is. */
    loader.skip(steps * Mt);
    return true;
  }
  WideLoader wide(loader);
  wide.begin(steps != 0);
  if (steps == 0) return true;
  const mpk_operand& x = slot.operands[0];
  const uint32_t pitch = (p.steps * 4 + p.tail) * kWideBlockBytes;
  const uint64_t x_step = static_cast<uint64_t>(x.strides[1]) * 2, x_tile = x.dims[0] > 1 ? static_cast<uint64_t>(x.strides[0]) * 2 : 0;
  const uint8_t* const from_x = reinterpret_cast<const uint8_t*>(x.addr);
  const uint8_t* from[Mt];
  uint32_t rows[Mt]; /* tiles of 16 */
#pragma unroll
  for (uint32_t m = 0; m < Mt; ++m) {
    const mpk_operand& weight = slot.operands[kWeight + (kIsGated ? m : 0)];
    const uint32_t first = kIsGated ? 0 : m * 8, all = (weight.dims[0] + 15) / 16;
    from[m] = reinterpret_cast<const uint8_t*>(weight.addr) + static_cast<uint64_t>(first) * pitch;
    rows[m] = all > first ? min(all - first, 8u) : 0;
  }
  constexpr uint32_t kAhead = kStages / Mt;
  uint32_t ahead = 0; /* steps whose weights have been asked for */
  bool ready = false;
  for (uint32_t step = 0; step < steps;) {
    if (!ready) {
      ready = wide.inputs_ready();
      if (ready && !wide.acquire_inputs()) return false;
    }
    /* Before the inputs are there: as many weights as the ring holds. */
    if (ready ? ahead <= step : ahead < steps && ahead < kAhead) {
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m)
        if (!wide.stream_rows(from[m] + static_cast<uint64_t>(ahead) * (4 * kWideBlockBytes), pitch, rows[m],
                              (ahead < p.steps ? 4 : p.tail) * kWideBlockBytes))
          return false;
      ++ahead;
    }
    if (!ready) {
      if (peek(shared_state().left) != 0) return false;
      continue;
    }
#pragma unroll
    for (uint32_t t = 0; t < Nt; ++t)
      if (!wide.stream_place(from_x + t * x_tile + step * x_step, N * 128)) return false;
    ++step;
  }
  wide.end();
  return true;
}

template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
__device__ inline int WideLinear<Weight, Out, Mt, Nt, N>::run(Context& context) {
  Shared& shared = shared_state();
  if (context.thread == 0) begin_wide();
  /* Thread 0 changes them behind the barrier of wait_inputs. */
  const RingPlace stage = peek(shared.next_stage), place = peek(shared.next_place);
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  const Part p = part(*context.slot);
  if (p.tokens == 0) return MPK_OK;
  WideRing<kStages, kStageBytes> stages = {shared_address(stage_at(0)), shared_address(shared.stage_full), shared_address(shared.stage_empty), stage.index,
                                           stage.parity};
  WideRing<kPlaces, kPlaceBytes> places = {shared_address(work_area()), shared_address(shared.place_full), shared_address(shared.place_empty), place.index,
                                           place.parity};
  Product product;
  product.multiply(stages, places, p.steps, p.tail, context.warp, context.lane, kEveryLaneArrives || context.lane == 0);
  if (context.thread == 0) {
    poke(shared.next_stage, {stages.index, stages.parity});
    poke(shared.next_place, {places.index, places.parity});
  }
  store(context, product, p.tokens);
  return MPK_OK;
}

template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
__device__ __forceinline__ void WideLinear<Weight, Out, Mt, Nt, N>::store(Context& context, const Product& product, uint32_t tokens) {
  const mpk_wide_linear_params& params = params_of(*context.slot);
  const mpk_operand& out = context.output(0);
  const uint32_t lane = context.lane, has_bias = params.has_bias;
  const mpk_operand* residual = nullptr;
  if (Out == wide::kFloat && params.has_residual != 0) residual = &context.input(kWeight + 1 + has_bias);
  const uint32_t buffer = shared_address(work_area()) + kPlaces * kPlaceBytes + context.warp * kTurnBytes;
  /* Of the rows lane / 4 and lane / 4 + 8 of a warp's 16. */
  float bias[Mt][2];
#pragma unroll
  for (uint32_t m = 0; m < Mt; ++m)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      bias[m][half] = 0.0f;
      if (has_bias != 0 && params.add_bias != 0) {
        const mpk_operand& operand = context.input(kWeight + (kIsGated ? 2 + m : 1));
        const uint32_t column = (kIsGated ? 0 : m * 128) + context.warp * 16 + lane / 4 + half * 8;
        if (column < operand.dims[0]) bias[m][half] = load_as_f32(reinterpret_cast<const void*>(operand.addr), operand.dtype, column);
      }
    }
#pragma unroll
  for (uint32_t t = 0; t < Nt; ++t) {
    if (t * N >= tokens) break;
    if constexpr (kIsGated) {
      float sum[N / 2];
#pragma unroll
      for (uint32_t i = 0; i < N / 2; ++i) {
        const float gate = rounded_to(Weight, product.sum[0][t][i] + bias[0][i / 2 % 2]);
        const float up = rounded_to(Weight, product.sum[1][t][i] + bias[1][i / 2 % 2]);
        sum[i] = up * silu(gate);
      }
      store_half(out, buffer, lane, t * N, tokens, context.warp * 16, sum);
    } else {
#pragma unroll
      for (uint32_t m = 0; m < Mt; ++m) {
        float sum[N / 2];
#pragma unroll
        for (uint32_t i = 0; i < N / 2; ++i) sum[i] = product.sum[m][t][i] + bias[m][i / 2 % 2];
        const uint32_t column = m * 128 + context.warp * 16;
        if constexpr (Out == wide::kHalf) store_half(out, buffer, lane, t * N, tokens, column, sum);
        else store_float(out, residual, lane, t * N, tokens, column, sum);
      }
    }
  }
}

/* A warp's 16 columns of N tokens: sectors of 32 bytes, a lane 16. */
template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
__device__ __forceinline__ void WideLinear<Weight, Out, Mt, Nt, N>::store_half(const mpk_operand& out, uint32_t buffer, uint32_t lane, uint32_t first_token,
                                                                               uint32_t tokens, uint32_t first_column, const float (&sum)[N / 2]) {
  const uint32_t columns = out.dims[1], column = first_column + lane % 2 * 8;
  const uint64_t row_bytes = static_cast<uint64_t>(out.strides[0]) * 2;
  const bool whole = column + 8 <= columns && ((out.addr | row_bytes) & 15) == 0;
#pragma unroll
  for (uint32_t j = 0; j < N / 32; ++j) {
    uint32_t pairs[8];
    uint4 pieces[2];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) pairs[i] = pair_of<Weight>(sum[j * 16 + i * 2], sum[j * 16 + i * 2 + 1]);
    turn(buffer, lane, pairs, pieces);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t token = first_token + j * 32 + i * 16 + lane / 2;
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
}

/* A warp's 16 columns of N tokens: of 8 columns a sector of 32 bytes. */
template <uint32_t Weight, uint32_t Out, uint32_t Mt, uint32_t Nt, uint32_t N>
__device__ __forceinline__ void WideLinear<Weight, Out, Mt, Nt, N>::store_float(const mpk_operand& out, const mpk_operand* residual,
                                                                                uint32_t lane, uint32_t first_token, uint32_t tokens, uint32_t first_column,
                                                                                const float (&sum)[N / 2]) {
  const uint32_t columns = out.dims[1];
  const bool inside[2] = {first_column + lane / 4 < columns, first_column + lane / 4 + 8 < columns};
#pragma unroll
  for (uint32_t j = 0; j < N / 8; j += 4) {
    float value[16];
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t token = first_token + (j + i / 4) * 8 + lane % 4 * 2 + i % 2, column = first_column + lane / 4 + i / 2 % 2 * 8;
      value[i] = 0.0f;
      if (residual != nullptr && token < tokens && inside[i / 2 % 2]) value[i] = reinterpret_cast<const float*>(row_address(*residual, token))[column];
    }
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t token = first_token + (j + i / 4) * 8 + lane % 4 * 2 + i % 2, column = first_column + lane / 4 + i / 2 % 2 * 8;
      if (token >= tokens || !inside[i / 2 % 2]) continue;
      reinterpret_cast<float*>(row_address(out, token))[column] = sum[j * 4 + i] + value[i];
    }
  }
}

#endif

}  // namespace gpu
}  // namespace mpk
