/* The log-probability of each sample's token, from its logit. */
#pragma once

#include "gpu/task.cuh"
#include "tasks/argmax_reduce/logprob.h"
#include "tasks/argmax_reduce/params.h"

namespace mpk {
namespace gpu {

struct TokenLogprob : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const mpk_operand& logits = context.input(0); /* [slices, samples] */
    float* logprobs = reinterpret_cast<float*>(context.output(0).addr);
    const uint32_t samples = context.rows_in_use(/*rows_kind=*/1, logits.dims[1]);
#pragma unroll 1
    for (uint32_t sample = context.thread; sample < samples; sample += kComputeThreads) {
      float logit = -INFINITY; /* of all ranks but the one that has the token */
#pragma unroll 1
      for (uint32_t slice = 0; slice < logits.dims[0]; ++slice)
        logit = fmaxf(logit, reinterpret_cast<const float*>(row_address(logits, slice))[sample]);
      const uint32_t* words = reinterpret_cast<const uint32_t*>(row_address(context.input(1), sample));
      const double log_sum = __hiloint2double(static_cast<int>(words[MPK_LOG_SUM_HIGH]), static_cast<int>(words[MPK_LOG_SUM_LOW]));
      logprobs[sample] = logprob_of(logit, __uint_as_float(words[MPK_LOG_SUM_MAXIMUM]), log_sum);
    }
    return MPK_OK;
  }
};

}  // namespace gpu
}  // namespace mpk
