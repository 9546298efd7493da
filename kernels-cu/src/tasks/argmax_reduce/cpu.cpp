// Merges the records of all tiles of all ranks for one sample.
#include <cmath>
#include <cstring>

#include "cpu/task.h"
#include "tasks/argmax_partial/cpu_wanted.h"
#include "tasks/argmax_partial/params.h"
#include "tasks/argmax_reduce/logprob.h"
#include "tasks/argmax_reduce/params.h"

namespace {

float value_of(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

struct Pair {
  float value;
  uint32_t token;
  bool before(const Pair& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

} // namespace

extern "C" int mpk_task_argmax_reduce(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_argmax_reduce_params*>(args->params);
  const uint32_t sample = static_cast<uint32_t>(args->task->args[0]);
  if (sample >= args->batch->num_samples) return MPK_OK;
  const mpk_operand& partials = args->inputs[0]; // [ranks, tiles, 1, words]
  const uint64_t hash = args->batch->hash;
  const auto record_at = [&](uint32_t rank, uint32_t tile) {
    return reinterpret_cast<const uint32_t*>(partials.addr) + uint64_t{rank} * partials.strides[0] +
           uint64_t{tile} * partials.strides[1];
  };

  const uint32_t kept = mpk::wanted_candidates(args, sample, params.kept, params.sampled != 0);
  Pair* best = reinterpret_cast<Pair*>(args->scratch);
  for (uint32_t i = 0; i < params.kept; ++i) best[i] = {-INFINITY, MPK_ARGMAX_NO_TOKEN};
  float highest = -INFINITY;
  for (uint32_t rank = 0; rank < partials.dims[0]; ++rank) {
    for (uint32_t tile = 0; tile < partials.dims[1]; ++tile) {
      const uint32_t* record = record_at(rank, tile);
      if ((uint64_t{record[MPK_ARGMAX_HASH_HIGH]} << 32 | record[MPK_ARGMAX_HASH_LOW]) != hash)
        return MPK_ABORT_DIVERGED;
      const float maximum = value_of(record[MPK_ARGMAX_MAXIMUM]);
      if (maximum > highest) highest = maximum;
      for (uint32_t i = 0; i < kept; ++i) {
        const Pair pair = {value_of(record[MPK_ARGMAX_PAIRS + 2 * i]), record[MPK_ARGMAX_PAIRS + 2 * i + 1]};
        uint32_t at = kept;
        while (at > 0 && pair.before(best[at - 1])) --at;
        if (at == kept) break; // the rest of the record is lower still
        std::memmove(best + at + 1, best + at, (kept - 1 - at) * sizeof(Pair));
        best[at] = pair;
      }
    }
  }
  if (kept == 0) return MPK_OK; // nothing reads the outputs
  if (best[0].token == MPK_ARGMAX_NO_TOKEN) return MPK_ABORT_KERNEL;

  *reinterpret_cast<int32_t*>(args->outputs[0].addr) = static_cast<int32_t>(best[0].token);
  if (params.top_k == 0) return MPK_OK;

  double sum = 0.0;
  for (uint32_t rank = 0; rank < partials.dims[0]; ++rank) {
    for (uint32_t tile = 0; tile < partials.dims[1]; ++tile) {
      const uint32_t* record = record_at(rank, tile);
      const float maximum = value_of(record[MPK_ARGMAX_MAXIMUM]);
      if (maximum == -INFINITY) continue;
      const double shift = maximum == highest ? 0.0 : static_cast<double>(maximum) - static_cast<double>(highest);
      sum += static_cast<double>(value_of(record[MPK_ARGMAX_SUM])) * std::exp(shift);
    }
  }
  const double log_sum = std::log(sum);
  auto* token = reinterpret_cast<int32_t*>(args->outputs[1].addr);
  auto* logprob = reinterpret_cast<float*>(args->outputs[2].addr);
  for (uint32_t i = 0; i < params.top_k; ++i) {
    const bool none = best[i].token == MPK_ARGMAX_NO_TOKEN;
    token[i] = none ? -1 : static_cast<int32_t>(best[i].token);
    logprob[i] = none ? -INFINITY : mpk::logprob_of(best[i].value, highest, log_sum);
  }
  if (params.log_sum != 0) {
    auto* words = reinterpret_cast<uint32_t*>(args->outputs[3].addr);
    std::memcpy(words + MPK_LOG_SUM_MAXIMUM, &highest, sizeof(highest));
    std::memcpy(words + MPK_LOG_SUM_LOW, &log_sum, sizeof(log_sum)); // little-endian, like the GPU
  }
  return MPK_OK;
}
