// Functions on whole rows, for the level that includes this file.
#pragma once

#include "cpu/simd.h"
#include "mpk/abi.h"
#include "tasks/silu_mul/params.h"

namespace mpk {
namespace MPK_ISA {

// 16 elements of an f32, f16 or bf16 array as f32; or the first n of them, with the others read as
// 0.
MPK_INLINE F32x16 load_as_f32(const void* p, uint32_t dtype, uint64_t i) {
  if (dtype == MPK_F32) return load(static_cast<const float*>(p) + i);
  const uint16_t* half = static_cast<const uint16_t*>(p) + i;
  return dtype == MPK_BF16 ? from_bf16(half) : from_f16(half);
}
MPK_INLINE F32x16 load_first_as_f32(const void* p, uint32_t dtype, uint64_t i, uint32_t n) {
  if (dtype == MPK_F32) return load_first(static_cast<const float*>(p) + i, n);
  uint16_t t[LANES] = {};
  memcpy(t, static_cast<const uint16_t*>(p) + i, n * sizeof(uint16_t));
  return dtype == MPK_BF16 ? from_bf16(t) : from_f16(t);
}
// Stores to memory, rounded to nearest even.
MPK_INLINE void store_rounded(void* p, uint32_t dtype, uint64_t i, F32x16 a) {
  if (dtype == MPK_F32) return store(static_cast<float*>(p) + i, a);
  uint16_t* half = static_cast<uint16_t*>(p) + i;
  dtype == MPK_BF16 ? to_bf16(half, a) : to_f16(half, a);
}
MPK_INLINE void store_first_rounded(void* p, uint32_t dtype, uint64_t i, F32x16 a, uint32_t n) {
  if (dtype == MPK_F32) return store_first(static_cast<float*>(p) + i, a, n);
  uint16_t t[LANES];
  dtype == MPK_BF16 ? to_bf16(t, a) : to_f16(t, a);
  memcpy(static_cast<uint16_t*>(p) + i, t, n * sizeof(uint16_t));
}

// Calls f(i, n) for each 16 elements, with n = 16, and once for the remaining n < 16.
template <class F> MPK_INLINE void for_lanes(uint64_t count, F f) {
  uint64_t i = 0;
  for (; i + LANES <= count; i += LANES) f(i, LANES);
  if (i < count) f(i, static_cast<uint32_t>(count - i));
}
MPK_INLINE F32x16 load_n(const void* p, uint32_t dtype, uint64_t i, uint32_t n) {
  return n == LANES ? load_as_f32(p, dtype, i) : load_first_as_f32(p, dtype, i, n);
}
MPK_INLINE void store_n(void* p, uint32_t dtype, uint64_t i, F32x16 a, uint32_t n) {
  n == LANES ? store_rounded(p, dtype, i, a) : store_first_rounded(p, dtype, i, a, n);
}

// out = in as f32
static inline void widen(float* out, const void* in, uint32_t dtype, uint64_t count) {
  for_lanes(count, [&](uint64_t i, uint32_t n) { store_n(out, MPK_F32, i, load_n(in, dtype, i, n), n); });
}

// out = in rounded to `dtype`
static inline void narrow(void* out, uint32_t dtype, const float* in, uint64_t count) {
  for_lanes(count, [&](uint64_t i, uint32_t n) { store_n(out, dtype, i, load_n(in, MPK_F32, i, n), n); });
}

// Rounds to `dtype` in place; the values stay f32.
static inline void round_through(float* row, uint32_t dtype, uint64_t count) {
  if (dtype == MPK_F32) return;
  for_lanes(count, [&](uint64_t i, uint32_t n) {
    float t[LANES]; // room for any dtype
    store_rounded(t, dtype, 0, load_n(row, MPK_F32, i, n));
    store_n(row, MPK_F32, i, load_as_f32(t, dtype, 0), n);
  });
}

// out = a + b; `b` is of `dtype`
static inline void add_rows(float* out, const float* a, const void* b, uint32_t dtype, uint64_t count) {
  for_lanes(count, [&](uint64_t i, uint32_t n) {
    store_n(out, MPK_F32, i, add(load_n(a, MPK_F32, i, n), load_n(b, dtype, i, n)), n);
  });
}

// out = x / sqrt(mean(x^2) + eps) * weight, in f32
static inline void rmsnorm_row(float* out, const void* x, uint32_t x_dtype, const void* weight,
                               uint32_t weight_dtype, float eps, uint64_t count) {
  F32x16 squares = zero();
  for_lanes(count, [&](uint64_t i, uint32_t n) {
    const F32x16 v = load_n(x, x_dtype, i, n);
    squares = fma(v, v, squares);
  });
  const float mean = sum_lanes(squares) / static_cast<float>(count);
  const F32x16 scale = splat(1.0f / __builtin_sqrtf(mean + eps));
  for_lanes(count, [&](uint64_t i, uint32_t n) {
    const F32x16 normed = mul(load_n(x, x_dtype, i, n), scale);
    store_n(out, MPK_F32, i, mul(normed, load_n(weight, weight_dtype, i, n)), n);
  });
}

// x through an activation (enum mpk_activation), in f32
MPK_INLINE F32x16 activated(uint32_t activation, F32x16 x) {
  if (activation == MPK_ACTIVATION_GELU) {
    float lanes[LANES];
    store(lanes, x);
    for (float& v : lanes) v = 0.5f * v * (1.0f + __builtin_erff(v * 0.70710678118654752f));
    return load(lanes);
  }
  F32x16 t = x;
  if (activation == MPK_ACTIVATION_GELU_TANH) // 2 sqrt(2 / pi) (x + 0.044715 x^3)
    t = mul(x, fma(mul(x, x), splat(0.0713548162726f), splat(1.5957691216057308f)));
  return div(x, add(splat(1.0f), exp(sub(zero(), t))));
}

// out = activation(gate) * up, in f32
static inline void gate_row(float* out, uint32_t activation, const void* gate, const void* up, uint32_t dtype,
                            uint64_t count) {
  for_lanes(count, [&](uint64_t i, uint32_t n) {
    const F32x16 gated = activated(activation, load_n(gate, dtype, i, n));
    store_n(out, MPK_F32, i, mul(gated, load_n(up, dtype, i, n)), n);
  });
}

} // namespace MPK_ISA
} // namespace mpk
