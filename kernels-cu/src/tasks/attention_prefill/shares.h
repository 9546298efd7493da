// The iteration's slots for the CPU's tasks of the prefill operators.
#pragma once

#include "cpu/task.h"
#include "tasks/attention_prefill/params.h"
#include "tasks/attention_prefill/units.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

inline const mpk_attention_prefill_params& prefill_params(const mpk_kernel_args* args) {
  return *reinterpret_cast<const mpk_attention_prefill_params*>(args->params);
}

// The rank's query heads that read its key-value head `head`.
struct HeadRange {
  uint32_t first, count;
};
inline HeadRange head_range(const mpk_attention_prefill_params& params, uint32_t head) {
  const uint32_t begin = head * params.group, end = begin + params.group;
  const uint32_t first = begin > params.skipped ? begin - params.skipped : 0;
  const uint32_t last = end - params.skipped < params.queries ? end - params.skipped : params.queries;
  return {first, last - first};
}

// The slots, as units.h needs them. `before` has room for one more number than there are slots.
class Shares {
 public:
  Shares(const mpk_batch* batch, const prefill::Shape& shape, uint64_t* before) : batch_(batch), before_(before) {
    before[0] = 0;
    for (uint32_t a = 0; a < count(); ++a) before[a + 1] = before[a] + prefill::slot_weight(shape, at(a));
  }
  uint32_t count() const { return batch_->num_active; }
  prefill::Slot at(uint32_t a) const {
    return {static_cast<uint32_t>(batch_->active_num_rows[a]), static_cast<uint32_t>(batch_->active_context[a])};
  }
  uint64_t before(uint32_t a) const { return before_[a]; }

  // False if `a` comes after `b`.
  static bool in_order(const prefill::Place& a, const prefill::Place& b) {
    const uint32_t x[4] = {a.active, a.head, a.tile, a.key}, y[4] = {b.active, b.head, b.tile, b.key};
    for (int i = 0; i < 4; ++i)
      if (x[i] != y[i]) return x[i] < y[i];
    return true;
  }

 private:
  const mpk_batch* batch_;
  const uint64_t* before_;
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk
