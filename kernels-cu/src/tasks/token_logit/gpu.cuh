/* Looks up the logit of each sample's token, if it is among this rank's columns. */
#pragma once

#include "gpu/task.cuh"

namespace mpk {
namespace gpu {

struct TokenLogit : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const uint32_t first_token = static_cast<uint32_t>(context.slot->task.args[0]);
    const uint32_t columns = static_cast<uint32_t>(context.slot->task.args[1]);
    const mpk_operand& out = context.output(0); /* [1, samples] */
    const uint32_t* tokens = reinterpret_cast<const uint32_t*>(context.input(0).addr);
    float* logits = reinterpret_cast<float*>(out.addr);
    const uint32_t samples = context.rows_in_use(/*rows_kind=*/1, out.dims[1]);
#pragma unroll 1
    for (uint32_t sample = context.thread; sample < samples; sample += kComputeThreads) {
      const uint32_t column = tokens[sample] - first_token;
      float logit = -INFINITY;
      if (column < columns) logit = reinterpret_cast<const float*>(row_address(context.input(1), sample))[column];
      logits[sample] = logit == logit ? logit : -INFINITY; /* NaN */
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
