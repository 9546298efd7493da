/* Weights by bins of logits: how much comes before a token, within bounds. */
#pragma once

#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

constexpr uint32_t kBins = MPK_SAMPLE_BINS;
static_assert(kBins == 2 * kComputeThreads, "two bins a thread");
constexpr float kBinsOfE = 23.083120654f; /* 16 / ln 2 */
constexpr float kBinWidth = 0.043321699f;
/* A token's mass is 2^(its place in the bin / 16), 1 to 1.045, in parts of this: the sums of a part fit into 32 bits. */
constexpr float kMassUnit = 131072.0f;

/* Never falls where the logit rises. */
__device__ __forceinline__ int32_t bin_of(float value) { return static_cast<int32_t>(fminf(fmaxf(floorf(value * kBinsOfE), -1e9f), 1e9f)); }
__device__ __forceinline__ uint32_t mass_of(float value) {
  const float at = value * kBinsOfE;
  return static_cast<uint32_t>(exp2f((at - floorf(at)) * 0.0625f) * kMassUnit + 0.5f);
}
/* What a bin's masses are worth beside those of the bin `below` places higher. */
__device__ __forceinline__ float bin_scale(uint32_t below) { return exp2f(static_cast<float>(below) * -0.0625f); }

/* By all compute threads: `mine`, the masses of bins 2 t and 2 t + 1 of thread t, the highest bins first. Gives what comes before
 * the thread's first one, and all. `room`: kComputeWarps, not in use. Also a barrier. */
struct MassScan {
  float before, all;
};
__device__ __forceinline__ MassScan scan_masses(Context& context, float mine, float* room) {
  float through = mine;
#pragma unroll
  for (uint32_t d = 1; d < 32; d *= 2) {
    const float other = __shfl_up_sync(0xFFFFFFFFu, through, d);
    if (context.lane >= d) through += other;
  }
  if (context.lane == 31) room[context.warp] = through;
  const float of_lanes = __shfl_up_sync(0xFFFFFFFFu, through, 1);
  context.sync();
  MassScan scan = {context.lane == 0 ? 0.0f : of_lanes, 0.0f};
#pragma unroll
  for (uint32_t w = 0; w < kComputeWarps; ++w) {
    const float of_warp = room[w];
    if (w < context.warp) scan.before += of_warp;
    scan.all += of_warp;
  }
  return scan;
}

}  // namespace gpu
}  // namespace mpk
