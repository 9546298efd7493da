// The vector code that task kernels share, compiled once for each level.
#pragma once

#include "cpu/task.h"

namespace mpk {

struct VectorOps {
  // out[i] = a[i] + b[i]; `a` is of `a_dtype`
  void (*add)(float* out, const void* a, uint32_t a_dtype, const float* b, uint64_t n);
  // out[i] = in[i] as f32
  void (*to_f32)(float* out, const void* in, uint32_t dtype, uint64_t n);
  // out[i] = in[i] rounded to `dtype`, to nearest even
  void (*from_f32)(void* out, uint32_t dtype, const float* in, uint64_t n);
};

// Those of the level in use.
const VectorOps& vector_ops();

} // namespace mpk
