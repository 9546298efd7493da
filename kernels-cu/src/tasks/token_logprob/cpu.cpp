// The log-probability of each sample's token, from its logit.
#include <algorithm>
#include <cstring>

#include "cpu/task.h"
#include "tasks/argmax_reduce/logprob.h"
#include "tasks/argmax_reduce/params.h"

extern "C" int mpk_task_token_logprob(const mpk_kernel_args* args) {
  const mpk_operand& logits = args->inputs[0]; // [slices, samples]
  auto* logprobs = reinterpret_cast<float*>(args->outputs[0].addr);
  const uint32_t samples = std::min(args->batch->num_samples, logits.dims[1]);
  for (uint32_t sample = 0; sample < samples; ++sample) {
    float logit = -INFINITY; // of all ranks but the one that has the token
    for (uint32_t slice = 0; slice < logits.dims[0]; ++slice)
      logit = std::max(logit, reinterpret_cast<const float*>(mpk::row_address(logits, slice))[sample]);
    const auto* words = reinterpret_cast<const uint32_t*>(mpk::row_address(args->inputs[1], sample));
    float maximum;
    double log_sum;
    std::memcpy(&maximum, words + MPK_LOG_SUM_MAXIMUM, sizeof(maximum));
    std::memcpy(&log_sum, words + MPK_LOG_SUM_LOW, sizeof(log_sum));
    logprobs[sample] = mpk::logprob_of(logit, maximum, log_sum);
  }
  return MPK_OK;
}
