// Vector code shared by task kernels, compiled once for each level.
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
  // out[i] = silu(gate[i]) * up[i], all of `dtype`, computed in f32; `scratch` holds n floats
  void (*silu_mul)(void* out, const void* gate, const void* up, uint32_t dtype, float* scratch, uint64_t n);
  // out = x / sqrt(mean(x^2) + eps) * weight, computed in f32; `scratch` holds n floats
  void (*rmsnorm)(void* out, uint32_t out_dtype, const void* x, uint32_t x_dtype, const void* weight,
                  uint32_t weight_dtype, float eps, float* scratch, uint64_t n);
  // Reads memory at full speed and folds it into a number. Decoding is compared with this rate.
  uint32_t (*read)(const void* memory, uint64_t bytes, uint32_t streams, uint32_t prefetch);
};

// The functions of the level in use.
const VectorOps& vector_ops();

} // namespace mpk
