// Looks up the logit of each sample's token, if it is among this rank's columns.
#include <algorithm>
#include <cmath>

#include "cpu/task.h"

extern "C" int mpk_task_token_logit(const mpk_kernel_args* args) {
  const uint32_t first_token = static_cast<uint32_t>(args->task->args[0]);
  const uint32_t columns = static_cast<uint32_t>(args->task->args[1]);
  const mpk_operand& out = args->outputs[0]; // [1, samples]
  const auto* tokens = reinterpret_cast<const uint32_t*>(args->inputs[0].addr);
  auto* logits = reinterpret_cast<float*>(out.addr);
  const uint32_t samples = std::min(args->batch->num_samples, out.dims[1]);
  for (uint32_t sample = 0; sample < samples; ++sample) {
    const uint32_t column = tokens[sample] - first_token;
    float logit = -INFINITY;
    if (column < columns) logit = reinterpret_cast<const float*>(mpk::row_address(args->inputs[1], sample))[column];
    logits[sample] = std::isnan(logit) ? -INFINITY : logit;
  }
  return MPK_OK;
}
