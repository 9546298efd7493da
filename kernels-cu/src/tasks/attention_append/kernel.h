// Applies norm and rope to the queries and keys of some rows and one key-value head; writes keys and values to their pages.
#pragma once

#include "tasks/attention/slot.h"
#include "tasks/attention_append/params.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

template <typename T>
class AttentionAppend : SlotAttention<T> {
  using Base = SlotAttention<T>;
  using typename Base::Element;
  using Base::args_, Base::dim_, Base::rounded_, Base::kv_head_, Base::rows_, Base::context_;

 public:
  explicit AttentionAppend(const mpk_kernel_args* args)
      : Base(args, args->outputs[1], params_of(args).head_dim, 1.0f, 0), params_(params_of(args)) {}

  int run() {
    const mpk_batch* batch = args_->batch;
    const uint32_t first = static_cast<uint32_t>(args_->task->args[0]), most = args_->inputs[0].dims[0];
    const uint32_t heads = args_->inputs[0].dims[1] / dim_;
    kv_head_ = static_cast<uint32_t>(args_->task->args[1]);
    this->lay_out_scratch();
    for (uint32_t i = 0; i < most && first + i < batch->num_rows; ++i) {
      const uint32_t active = static_cast<uint32_t>(batch->row_active[first + i]);
      const uint32_t position = static_cast<uint32_t>(batch->row_position[first + i]);
      if (active >= batch->num_active || !this->take_slot(active) || position >= context_ + rows_ ||
          position >= args_->inputs[3].dims[0] || !this->has_pages(position, position + 1))
        return MPK_ABORT_KERNEL;
      for (uint32_t h = 0; h < heads; ++h) {
        turn(this->view_row(0, i) + uint64_t{h} * dim_, 4, position);
        memcpy(reinterpret_cast<Element*>(row_address(args_->outputs[0], i)) + uint64_t{h} * dim_, rounded_, dim_ * sizeof(Element));
      }
      turn(this->view_row(1, i), 5, position);
      memcpy(this->cache_row(position, false), rounded_, dim_ * sizeof(Element));
      memcpy(this->cache_row(position, true), this->view_row(2, i), dim_ * sizeof(Element));
    }
    return MPK_OK;
  }

 private:
  static const mpk_attention_append_params& params_of(const mpk_kernel_args* args) {
    return *reinterpret_cast<const mpk_attention_append_params*>(args->params);
  }
  void turn(const Element* src, uint32_t norm_operand, uint32_t position) {
    this->prepare(src, params_.qk_norm ? &args_->inputs[norm_operand] : nullptr, params_.eps, args_->inputs[3], position);
  }

  const mpk_attention_append_params params_;
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_attention_append)(const mpk_kernel_args* args) {
  using namespace mpk::MPK_ISA;
  switch (args->inputs[0].dtype) {
    case MPK_BF16: return AttentionAppend<Bf16>(args).run();
    case MPK_F16: return AttentionAppend<F16>(args).run();
    case MPK_F32: return AttentionAppend<F32>(args).run();
    default: return MPK_ABORT_KERNEL;
  }
}
