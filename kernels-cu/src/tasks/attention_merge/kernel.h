// Combines the partial results of attention's splits, for all rows of one active slot and the query heads of
// one key-value head. Splits are taken in order; those without keys are skipped.
#pragma once

#include "cpu/simd.h"
#include "cpu/task.h"
#include "cpu/wide.h"
#include "tasks/attention_merge/params.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

MPK_INLINE void store_as(uint32_t dtype, uint8_t* p, F32x16 a) {
  if (dtype == MPK_BF16) to_bf16(reinterpret_cast<uint16_t*>(p), a);
  else if (dtype == MPK_F16) to_f16(reinterpret_cast<uint16_t*>(p), a);
  else store(reinterpret_cast<float*>(p), a);
}

int attention_merge(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_attention_merge_params*>(args->params);
  const mpk_batch* batch = args->batch;
  const uint32_t active = static_cast<uint32_t>(args->task->args[0]);
  const uint32_t first_head = static_cast<uint32_t>(args->task->args[1]);
  const uint32_t heads = static_cast<uint32_t>(args->task->args[2]);
  if (active >= batch->num_active) return MPK_OK;
  const uint32_t first_row = static_cast<uint32_t>(batch->active_first_row[active]);
  const uint32_t rows = static_cast<uint32_t>(batch->active_num_rows[active]);
  const mpk_operand &partial = args->inputs[0], &state = args->inputs[1], &out = args->outputs[0];
  if (first_row + rows > rows_of_result(out)) return MPK_ABORT_KERNEL;
  const uint64_t bytes = element_bytes(out.dtype);
  float* weight = reinterpret_cast<float*>(args->scratch);
  for (uint32_t row = first_row; row < first_row + rows; ++row) {
    for (uint32_t head = first_head; head < first_head + heads; ++head) {
      const float* o = reinterpret_cast<const float*>(row_address(partial, row)) + uint64_t{head} * partial.strides[1];
      const float* ml = reinterpret_cast<const float*>(row_address(state, row)) + uint64_t{head} * state.strides[1];
      float highest = -INFINITY;
      for (uint32_t i = 0; i < params.splits; ++i) {
        const float m = ml[uint64_t{i} * state.strides[2]];
        if (m > highest) highest = m;
      }
      float sum = 0.0f;
      for (uint32_t i = 0; i < params.splits; ++i) {
        const float* of_split = ml + uint64_t{i} * state.strides[2];
        float lanes[16];
        store(lanes, exp(sub(splat(of_split[0]), splat(highest))));
        weight[i] = lanes[0];
        if (of_split[1] != 0.0f) sum = sum + lanes[0] * of_split[1];
      }
      const bool wide = out.ndim == 4;
      uint8_t* to = wide ? nullptr : row_address(out, row) + uint64_t{head} * params.head_dim * bytes;
      for (uint32_t c = 0; c < params.head_dim; c += 16) {
        const uint32_t n = params.head_dim - c < 16 ? params.head_dim - c : 16;
        F32x16 total = zero();
        for (uint32_t i = 0; i < params.splits; ++i) {
          if (ml[uint64_t{i} * state.strides[2] + 1] == 0.0f) continue;
          const float* from = o + uint64_t{i} * partial.strides[2] + c;
          total = fma(splat(weight[i]), n == 16 ? load(from) : load_first(from, n), total);
        }
        const F32x16 result = div(total, splat(sum));
        if (n == 16 && !wide) {
          store_as(out.dtype, to + c * bytes, result);
        } else {
          alignas(64) uint8_t tail[64];
          store_as(out.dtype, tail, result);
          if (wide) store_wide(out, row, head * params.head_dim + c, reinterpret_cast<const uint16_t*>(tail), n);
          else memcpy(to + c * bytes, tail, n * bytes);
        }
      }
    }
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_attention_merge)(const mpk_kernel_args* args) {
  return mpk::MPK_ISA::attention_merge(args);
}
