/* Merges the lists of the rank's parts into the rank's highest logits of a sample. */
#pragma once

#include "tasks/sample_merge/params.h"
#include "tasks/sample_partial/gpu_few.cuh"

namespace mpk {
namespace gpu {

struct SampleMerge : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_merge_params>().kept;
    const SampleRow row(context, static_cast<uint32_t>(context.slot->task.args[3]), kept);
    const int code = context.wait_inputs();
    if (code != MPK_OK || row.mode != sampling::kList) return code;
    const uint32_t wanted = row.sampling.top_k;
    uint32_t* list = reinterpret_cast<uint32_t*>(context.output(0).addr);
    Work* work = reinterpret_cast<Work*>(context.work());
    const ListedKeys keys(context.input(0), wanted, work->keys); /* lists [1, parts, 1, words] */
    const uint64_t top = keys.bring(context.thread);
    const Team team(context);
    const FewKeys listed = select_few(context, team, keys.count, wanted, top, &work->few, keys, own_keys(team, keys.count, keys), [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
    fill_list(team, list, listed.count, wanted);
    return MPK_OK;
  }

 private:
  struct Work {
    uint64_t keys[ListedKeys::kRoom];
    FewRoom few;
  };
  static_assert(sizeof(Work) <= kWorkBytes, "the work area is too small");
};

}  // namespace gpu
}  // namespace mpk
