// Attention of one or more active slots and one split, for one or more local key-value heads, one after the other.
#pragma once

#include "tasks/attention/params.h"
#include "tasks/attention/slot.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

template <typename T>
class Attention : SlotAttention<T> {
  using Base = SlotAttention<T>;
  using typename Base::Element;
  using Base::args_, Base::dim_, Base::padded_, Base::o_, Base::max_, Base::sum_, Base::rounded_;
  using Base::kv_head_, Base::heads_, Base::first_row_, Base::rows_, Base::context_;
  using Base::page_size_, Base::share_first_, Base::share_last_;

 public:
  explicit Attention(const mpk_kernel_args* args)
      : Base(args, args->inputs[3], params_of(args).head_dim, params_of(args).scale, params_of(args).window), params_(params_of(args)) {}

  int run() {
    const int32_t* a = args_->task->args;
    for (int32_t i = 0; i < a[6]; ++i) {
      const int code = run(static_cast<uint32_t>(a[0] + i * a[7]));
      if (code != MPK_OK) return code;
    }
    return MPK_OK;
  }

 private:
  // One active slot.
  int run(uint32_t active) {
    const int32_t* a = args_->task->args;
    if (active >= args_->batch->num_active) return MPK_OK;
    split_ = static_cast<uint32_t>(a[2]);
    heads_ = static_cast<uint32_t>(a[5]);
    const bool fits = this->take_slot(active);
    if (rows_ == 0) return MPK_OK;
    const uint32_t total = context_ + rows_;
    if (!fits || first_row_ + rows_ > args_->inputs[0].dims[0] || total > args_->inputs[4].dims[0]) return MPK_ABORT_KERNEL;
    const uint32_t pages = (total + page_size_ - 1) / page_size_;
    const uint32_t skipped = this->first_key(context_) / page_size_; // pages that no row sees
    const uint64_t splits = params_.splits, seen = pages - skipped;
    share_first_ = (skipped + static_cast<uint32_t>(seen * split_ / splits)) * page_size_;
    share_last_ = (skipped + static_cast<uint32_t>(seen * (uint64_t{split_} + 1) / splits)) * page_size_;
    if (share_last_ > total) share_last_ = total;
    if (!this->has_pages(share_first_, share_last_)) return MPK_ABORT_KERNEL;

    this->lay_out_scratch();
    for (in_views_ = 0; in_views_ < params_.kv_heads; ++in_views_) {
      kv_head_ = static_cast<uint32_t>(a[1]) + in_views_;
      first_head_ = static_cast<uint32_t>(a[4]) + in_views_ * heads_;
      attend();
    }
    return MPK_OK;
  }

  // One key-value head.
  void attend() {
    append();
    const uint64_t queries = uint64_t{rows_} * heads_;
    for (uint64_t first = 0; first < queries; first += QUERIES) {
      const uint64_t left = queries - first;
      const auto query = [&](uint32_t i) {
        const uint64_t at = first + i;
        const uint32_t row = first_row_ + static_cast<uint32_t>(at / heads_);
        turn(this->view_row(0, row) + (in_views_ * heads_ + at % heads_) * dim_, 5, this->position_of(at));
        return rounded_;
      };
      this->block(first, left < QUERIES ? static_cast<uint32_t>(left) : QUERIES, query,
                  [&](uint32_t i) { write(first + i, i); });
    }
  }

  static const mpk_attention_params& params_of(const mpk_kernel_args* args) {
    return *reinterpret_cast<const mpk_attention_params*>(args->params);
  }

  void turn(const Element* src, uint32_t norm_operand, uint32_t position) {
    this->prepare(src, params_.qk_norm ? &args_->inputs[norm_operand] : nullptr, params_.eps, args_->inputs[4], position);
  }

  // Writes the new keys and values whose positions are in the share.
  void append() {
    const uint32_t first = share_first_ > context_ ? share_first_ : context_;
    for (uint32_t position = first; position < share_last_; ++position) {
      const uint32_t row = first_row_ + position - context_;
      turn(this->view_row(1, row) + in_views_ * dim_, 6, position);
      memcpy(this->cache_row(position, false), rounded_, dim_ * sizeof(Element));
      memcpy(this->cache_row(position, true), this->view_row(2, row) + in_views_ * dim_, dim_ * sizeof(Element));
    }
  }

  void write(uint64_t query, uint32_t i) {
    const uint32_t row = first_row_ + static_cast<uint32_t>(query / heads_);
    const uint32_t head = first_head_ + static_cast<uint32_t>(query % heads_);
    float* o = o_ + uint64_t{i} * padded_;
    const mpk_operand& out = args_->outputs[0];
    if (!params_.partial) {
      for (uint32_t c = 0; c < padded_; c += 16) store(o + c, div(load(o + c), splat(sum_[i])));
      this->store_head(out, row, head, o);
      return;
    }
    const mpk_operand& state = args_->outputs[1];
    float* to = reinterpret_cast<float*>(row_address(out, row)) + uint64_t{head} * out.strides[1] +
                uint64_t{split_} * out.strides[2];
    memcpy(to, o, dim_ * sizeof(float));
    float* ml = reinterpret_cast<float*>(row_address(state, row)) + uint64_t{head} * state.strides[1] +
                uint64_t{split_} * state.strides[2];
    ml[0] = max_[i];
    ml[1] = sum_[i];
  }

  const mpk_attention_params params_;
  uint32_t split_, first_head_;
  uint32_t in_views_; // the head's number within the task
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_attention)(const mpk_kernel_args* args) {
  using namespace mpk::MPK_ISA;
  switch (args->inputs[0].dtype) {
    case MPK_BF16: return Attention<Bf16>(args).run();
    case MPK_F16: return Attention<F16>(args).run();
    case MPK_F32: return Attention<F32>(args).run();
    default: return MPK_ABORT_KERNEL;
  }
}
