// Attention of a task's share of the iteration's units (units.h), over pages that `attention_append` has filled.
#pragma once

#include "tasks/attention/slot.h"
#include "tasks/attention_prefill/params.h"
#include "tasks/attention_prefill/shares.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

template <typename T>
class AttentionPrefill : SlotAttention<T> {
  using Base = SlotAttention<T>;
  using typename Base::Element;
  using Base::args_, Base::dim_, Base::padded_, Base::o_, Base::max_, Base::sum_;
  using Base::kv_head_, Base::heads_, Base::first_row_, Base::rows_, Base::context_, Base::share_first_, Base::share_last_;

 public:
  explicit AttentionPrefill(const mpk_kernel_args* args)
      : Base(args, args->inputs[1], prefill_params(args).head_dim, prefill_params(args).scale,
             prefill_params(args).window),
        params_(prefill_params(args)) {}

  int run() {
    const uint32_t task = static_cast<uint32_t>(args_->task->args[0]);
    const prefill::Shape shape = prefill::shape_of(params_.group, params_.kv_heads, params_.window);
    const Shares shares(args_->batch, shape, reinterpret_cast<uint64_t*>(this->lay_out_scratch()));
    prefill::Place at = prefill::cut(shares, shape, task, params_.tasks);
    const prefill::Place end = prefill::cut(shares, shape, task + 1, params_.tasks);
    if (!shares.in_order(at, end)) return MPK_ABORT_KERNEL; // units would be computed twice, or not at all
    while (!prefill::same_place(at, end)) {
      const prefill::Part part = prefill::take_part(shares, shape, at, end);
      const int code = attend(shape, part, prefill::is_whole(part) ? WHOLE : prefill::partial_index(part.place, task));
      if (code != MPK_OK) return code;
    }
    return MPK_OK;
  }

 private:
  static constexpr uint32_t WHOLE = 0xFFFFFFFFu;

  int attend(const prefill::Shape& shape, const prefill::Part& part, uint32_t partial) {
    kv_head_ = part.place.head;
    const HeadRange heads = head_range(params_, kv_head_);
    heads_ = heads.count;
    if (!this->take_slot(part.place.active) || first_row_ + rows_ > args_->inputs[0].dims[0]) return MPK_ABORT_KERNEL;
    const uint32_t total = context_ + rows_;
    const uint32_t hidden = prefill::hidden_tiles(shape, {rows_, context_}, part.place.tile);
    share_first_ = (hidden + part.place.key) * prefill::kTileKeys;
    share_last_ = (hidden + part.end) * prefill::kTileKeys < total ? (hidden + part.end) * prefill::kTileKeys : total;
    if (!this->has_pages(share_first_, share_last_)) return MPK_ABORT_KERNEL;
    const uint32_t before = prefill::tokens_before(shape, {rows_, context_}, part.place.tile);
    const uint32_t count = (prefill::tokens_before(shape, {rows_, context_}, part.place.tile + 1) - before) * heads_;
    for (uint32_t first = 0; first < count; first += QUERIES) {
      const uint64_t from = uint64_t{before} * heads_ + first;
      const auto query = [&](uint32_t i) { return row_of(args_->inputs[0], heads.first, from + i); };
      const auto write = [&](uint32_t i) {
        float* o = o_ + uint64_t{i} * padded_;
        if (partial == WHOLE) {
          for (uint32_t c = 0; c < padded_; c += 16) store(o + c, div(load(o + c), splat(sum_[i])));
          const uint64_t at = from + i;
          this->store_head(args_->outputs[0], first_row_ + static_cast<uint32_t>(at / heads_), heads.first + static_cast<uint32_t>(at % heads_), o);
          return;
        }
        const uint64_t row = uint64_t{partial} * prefill::kTileRows + first + i;
        memcpy(reinterpret_cast<float*>(args_->outputs[1].addr) + row * dim_, o, dim_ * sizeof(float));
        float* state = reinterpret_cast<float*>(args_->outputs[2].addr) + row * 2;
        state[0] = max_[i];
        state[1] = sum_[i];
      };
      this->block(from, count - first < QUERIES ? count - first : QUERIES, query, write);
    }
    return MPK_OK;
  }

  // The row of query `query` of the slot in a tensor [rows, query heads * dim].
  Element* row_of(const mpk_operand& view, uint32_t first_head, uint64_t query) const {
    const uint32_t row = first_row_ + static_cast<uint32_t>(query / heads_);
    return reinterpret_cast<Element*>(row_address(view, row)) + (first_head + query % heads_) * dim_;
  }

  const mpk_attention_prefill_params params_;
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_attention_prefill)(const mpk_kernel_args* args) {
  using namespace mpk::MPK_ISA;
  switch (args->inputs[0].dtype) {
    case MPK_BF16: return AttentionPrefill<Bf16>(args).run();
    case MPK_F16: return AttentionPrefill<F16>(args).run();
    case MPK_F32: return AttentionPrefill<F32>(args).run();
    default: return MPK_ABORT_KERNEL;
  }
}
