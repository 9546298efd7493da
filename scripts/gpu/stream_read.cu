// Rate at which a streaming kernel reads device memory: the floor of decode. Prints a JSON line for each grid.
#include <cstdio>
#include <cuda_runtime.h>

#include "cuda_check.h"

// Reads all of it once; the sum keeps the loads.
__global__ void read_all(const uint4* data, size_t count, unsigned* sum) {
  unsigned total = 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; ++j) total += words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
  }
  for (; i < count; i += stride) total += data[i].x;
  if (total == 0xFFFFFFFFu) atomicAdd(sum, total);
}

int main() {
  const size_t bytes = size_t{8} << 30;
  uint4* data = nullptr;
  unsigned* sum = nullptr;
  CHECK(cudaMalloc(&data, bytes));
  CHECK(cudaMalloc(&sum, sizeof(*sum)));
  CHECK(cudaMemset(data, 1, bytes));
  CHECK(cudaMemset(sum, 0, sizeof(*sum)));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  int processors = 0;
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  for (int blocks = processors; blocks <= 4 * processors; blocks *= 2) {
    float best = 1e9f;
    for (int repeat = 0; repeat < 6; ++repeat) {
      CHECK(cudaEventRecord(begin));
      read_all<<<blocks, 512>>>(data, bytes / sizeof(uint4), sum);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (repeat > 0 && ms < best) best = ms;
    }
    CHECK(cudaGetLastError());
    std::printf("{\"blocks\": %d, \"threads\": 512, \"bytes_per_second\": %.4g}\n", blocks, bytes / (best * 1e-3));
  }
  return 0;
}
