// Joins the partial results of units that several tasks of `attention_prefill` computed. Task t looks at cut t. If that lies
// inside a unit, the tasks of all cuts inside the unit share its rows.
#pragma once

#include "cpu/simd.h"
#include "cpu/wide.h"
#include "tasks/attention_prefill/shares.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

inline void store_rounded(uint32_t dtype, uint8_t* p, F32x16 a) {
  if (dtype == MPK_BF16) to_bf16(reinterpret_cast<uint16_t*>(p), a);
  else if (dtype == MPK_F16) to_f16(reinterpret_cast<uint16_t*>(p), a);
  else store(reinterpret_cast<float*>(p), a);
}

class PrefillMerge {
 public:
  explicit PrefillMerge(const mpk_kernel_args* args)
      : args_(args), params_(prefill_params(args)), shape_(prefill::shape_of(params_.group, params_.kv_heads, params_.window)),
        shares_(args->batch, shape_, reinterpret_cast<uint64_t*>(args->scratch)) {}

  int run() {
    const uint32_t task = static_cast<uint32_t>(args_->task->args[0]);
    const prefill::Place own = cut(task);
    if (task == 0 || own.key == 0) return MPK_OK;
    uint32_t first = task, last = task; // cuts inside the unit
    while (first > 1 && inside(cut(first - 1), own)) --first;
    while (last + 1 < params_.tasks && inside(cut(last + 1), own)) ++last;
    const prefill::Slot slot = shares_.at(own.active);
    const HeadRange heads = head_range(params_, own.head);
    const uint32_t before = prefill::tokens_before(shape_, slot, own.tile);
    const uint32_t rows = (prefill::tokens_before(shape_, slot, own.tile + 1) - before) * heads.count;
    const uint32_t cuts = last - first + 1;
    const uint32_t first_row = static_cast<uint32_t>(args_->batch->active_first_row[own.active]) + before;
    const mpk_operand& out = args_->outputs[0];
    if (first_row + rows / heads.count > rows_of_result(out)) return MPK_ABORT_KERNEL;
    for (uint32_t row = rows * (task - first) / cuts; row < rows * (task - first + 1) / cuts; ++row) {
      join(first, last, row, first_row + row / heads.count, heads.first + row % heads.count);
    }
    return MPK_OK;
  }

 private:
  prefill::Place cut(uint32_t task) const { return prefill::cut(shares_, shape_, task, params_.tasks); }
  static bool inside(const prefill::Place& place, const prefill::Place& unit) { return prefill::same_unit(place, unit) && place.key != 0; }

  // Calls each(number of the partial result) in the order of the keys.
  template <typename F>
  void for_parts(uint32_t first, uint32_t last, F&& each) const {
    each((first - 1) * prefill::kPartsOfTask + 1);
    for (uint32_t task = first; task <= last; ++task)
      if (!prefill::same_place(cut(task), cut(task + 1))) each(task * prefill::kPartsOfTask);
  }

  // Row `row` of the unit: query head `head` of the tensor's row `to_row`.
  void join(uint32_t first, uint32_t last, uint32_t row, uint32_t to_row, uint32_t head) const {
    const auto* sums = reinterpret_cast<const float*>(args_->inputs[0].addr);
    const auto* states = reinterpret_cast<const float*>(args_->inputs[1].addr);
    const mpk_operand& out = args_->outputs[0];
    const uint32_t dim = params_.head_dim, dtype = out.dtype;
    const bool wide = out.ndim == 4;
    uint8_t* to = wide ? nullptr : row_address(out, to_row) + uint64_t{head} * dim * element_bytes(dtype);
    const auto at = [&](uint32_t part) { return uint64_t{part} * prefill::kTileRows + row; };
    float highest = -INFINITY, sum = 0.0f;
    for_parts(first, last, [&](uint32_t part) { highest = states[2 * at(part)] > highest ? states[2 * at(part)] : highest; });
    const auto weight = [&](uint32_t part) {
      float lanes[16];
      store(lanes, exp(sub(splat(states[2 * at(part)]), splat(highest))));
      return lanes[0];
    };
    for_parts(first, last, [&](uint32_t part) {
      if (states[2 * at(part) + 1] != 0.0f) sum = sum + weight(part) * states[2 * at(part) + 1];
    });
    for (uint32_t c = 0; c < dim; c += 16) {
      const uint32_t n = dim - c < 16 ? dim - c : 16;
      F32x16 total = zero();
      for_parts(first, last, [&](uint32_t part) {
        if (states[2 * at(part) + 1] == 0.0f) return; // it has no key, and its sums are undefined
        const float* from = sums + at(part) * dim + c;
        total = fma(splat(weight(part)), n == 16 ? load(from) : load_first(from, n), total);
      });
      const F32x16 result = div(total, splat(sum));
      alignas(64) uint8_t tail[64];
      store_rounded(dtype, tail, result);
      if (wide) store_wide(out, to_row, head * dim + c, reinterpret_cast<const uint16_t*>(tail), n);
      else memcpy(to + c * element_bytes(dtype), tail, n * element_bytes(dtype));
    }
  }

  const mpk_kernel_args* args_;
  const mpk_attention_prefill_params params_;
  const prefill::Shape shape_;
  const Shares shares_;
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_attention_prefill_merge)(const mpk_kernel_args* args) {
  return mpk::MPK_ISA::PrefillMerge(args).run();
}
