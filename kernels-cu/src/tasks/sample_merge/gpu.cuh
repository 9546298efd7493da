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
    const mpk_operand& lists = context.input(0); /* [1, parts, 1, words] */
    const uint32_t* first = reinterpret_cast<const uint32_t*>(lists.addr);
    const uint64_t stride = lists.strides[1];
    const uint32_t wanted = row.sampling.top_k, count = lists.dims[1] * wanted;
    uint32_t* list = reinterpret_cast<uint32_t*>(context.output(0).addr);
    Work* work = reinterpret_cast<Work*>(context.work());
    const auto listed_at = [&](uint32_t i) {
      const uint32_t part = quotient(i, wanted);
      return pair_key(first + part * stride, i - part * wanted);
    };
    /* All are loaded at once, if there is room for them. */
    const bool held = count <= kHeld;
    uint64_t top = 0;
#pragma unroll 1
    for (uint32_t i = context.thread; i < count; i += 4 * kComputeThreads) {
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        const uint32_t own = i + u * kComputeThreads;
        const uint64_t key = own < count ? listed_at(own) : 0;
        if (held && own < count) work->keys[own] = key;
        if (key > top) top = key;
      }
    }
    const auto key_at = [&](uint32_t i) { return held ? work->keys[i] : listed_at(i); };
    const Team team(context);
    const FewKeys listed = select_few(context, team, count, wanted, top, &work->few, key_at, own_keys(team, count, key_at), [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
    fill_list(team, list, listed.count, wanted);
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kHeld = 4096;
  struct Work {
    uint64_t keys[kHeld];
    FewRoom few;
  };
  static_assert(sizeof(Work) <= kWorkBytes, "the work area is too small");
};

}  // namespace gpu
}  // namespace mpk
