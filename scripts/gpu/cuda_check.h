// For main of a small CUDA program: says what failed and returns 1.
#pragma once

#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                                    \
  do {                                                                                                                 \
    const cudaError_t error = (call);                                                                                  \
    if (error != cudaSuccess) {                                                                                        \
      std::fprintf(stderr, "error: %s: %s\n", #call, cudaGetErrorString(error));                                       \
      return 1;                                                                                                        \
    }                                                                                                                  \
  } while (0)
