// The highest logits of a sample on this rank, from the lists of the rank's parts.
#include <algorithm>

#include "tasks/sample_merge/params.h"
#include "tasks/sample_partial/cpu_row.h"

namespace {
struct Higher {
  bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};
} // namespace

extern "C" int mpk_task_sample_merge(const mpk_kernel_args* args) {
  using namespace mpk::sampling;
  const uint32_t kept = reinterpret_cast<const mpk_sample_merge_params*>(args->params)->kept;
  const Row row = row_of(args, static_cast<uint32_t>(args->task->args[3]), kept);
  if (row.mode != kList) return MPK_OK;
  const mpk_operand& lists = args->inputs[0]; // [1, parts, 1, words]
  const uint32_t wanted = row.sampling.top_k;
  uint64_t* keys = reinterpret_cast<uint64_t*>(args->scratch);
  uint32_t count = 0;
  for (uint32_t part = 0; part < lists.dims[1]; ++part) {
    const uint32_t* list = reinterpret_cast<const uint32_t*>(lists.addr) + uint64_t{part} * lists.strides[1];
    for (uint32_t i = 0; i < wanted && list[2 * i + 1] != MPK_SAMPLE_NO_TOKEN; ++i)
      keys[count++] = key_of(float_of(list[2 * i]), list[2 * i + 1]);
  }
  const uint32_t listed = wanted < count ? wanted : count;
  if (listed < count) std::nth_element(keys, keys + listed, keys + count, Higher());
  uint32_t* out = reinterpret_cast<uint32_t*>(args->outputs[0].addr);
  for (uint32_t i = 0; i < wanted; ++i) {
    out[2 * i] = bits_of(i < listed ? value_of_key(keys[i]) : -INFINITY);
    out[2 * i + 1] = i < listed ? token_of_key(keys[i]) : MPK_SAMPLE_NO_TOKEN;
  }
  return MPK_OK;
}
