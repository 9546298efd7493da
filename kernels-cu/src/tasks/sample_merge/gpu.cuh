/* Merges the lists of the rank's parts into the rank's highest logits of a sample. */
#pragma once

#include "tasks/sample_merge/params.h"
#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

struct SampleMerge : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_merge_params>().kept;
    const SampleRow row(context, static_cast<uint32_t>(context.slot->task.args[3]), kept);
    const int code = context.wait_inputs();
    if (code != MPK_OK || row.mode != sampling::kList) return code;
    const mpk_operand& lists = context.input(0); /* [1, parts, 1, words] */
    const uint32_t* first = reinterpret_cast<const uint32_t*>(lists.addr);
    const uint64_t stride = lists.strides[1];
    const uint32_t wanted = row.sampling.top_k;
    uint32_t* list = reinterpret_cast<uint32_t*>(context.output(0).addr);
    const auto key_at = [&](uint32_t i) {
      const uint32_t part = quotient(i, wanted);
      return pair_key(first + part * stride, i - part * wanted);
    };
    const uint32_t listed = select_keys(context, lists.dims[1] * wanted, wanted, reinterpret_cast<SelectRoom*>(context.work()), key_at,
                                        [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
    fill_list(context, list, listed, wanted);
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
