// Sixteen f32 lanes with the same bits on every level: one __m512, two __m256, or an array.
//
// Only for files compiled for a level (MPK_ISA set). Everything is in a namespace of the level, so that the
// linker never mixes code of two levels. Sums over lanes have one fixed order.
#pragma once

#ifndef MPK_ISA
#error "simd.h is for files that build.rs compiles for a level (NAME_avx2.cpp, NAME_avx512.cpp, NAME_scalar.cpp)"
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(MPK_ISA_AVX512) || defined(MPK_ISA_AVX512_BF16)
#define MPK_SIMD_512 1
#include <immintrin.h>
#elif defined(MPK_ISA_AVX2)
#define MPK_SIMD_256 1
#include <immintrin.h>
#endif

#define MPK_INLINE static inline __attribute__((always_inline))

namespace mpk {
namespace MPK_ISA {

constexpr uint32_t LANES = 16;

#if defined(MPK_SIMD_512)

struct F32x16 {
  __m512 v;
};
MPK_INLINE F32x16 zero() { return {_mm512_setzero_ps()}; }
MPK_INLINE F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
MPK_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
MPK_INLINE void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
MPK_INLINE F32x16 load_first(const float* p, uint32_t n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
MPK_INLINE void store_first(float* p, F32x16 a, uint32_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
MPK_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
MPK_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MPK_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MPK_INLINE F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once
MPK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// maximum of a and b; b if either is NaN
MPK_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
MPK_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
MPK_INLINE F32x16 round_even(F32x16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a * 2^n for whole n in -252..254, in two steps that are exact or rounded once
MPK_INLINE F32x16 scale2(F32x16 a, F32x16 n) {
  const __m512i i = _mm512_cvtps_epi32(n.v);
  const __m512i half = _mm512_srai_epi32(i, 1);
  const __m512i bias = _mm512_set1_epi32(127);
  const __m512 s1 = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
  const __m512 s2 =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(i, half), bias), 23));
  return {_mm512_mul_ps(_mm512_mul_ps(a.v, s1), s2)};
}
MPK_INLINE F32x16 from_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
MPK_INLINE F32x16 from_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
MPK_INLINE void to_bf16(uint16_t* p, F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(
      rounded, nan, _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
MPK_INLINE void to_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Splits pairs [16][2] of bf16 into first and second elements.
MPK_INLINE void from_bf16_pairs(const uint16_t* p, F32x16& first, F32x16& second) {
  const __m512i w = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#elif defined(MPK_SIMD_256)

struct F32x16 {
  __m256 lo, hi;
};
MPK_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
MPK_INLINE F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MPK_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MPK_INLINE void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
MPK_INLINE F32x16 load_first(const float* p, uint32_t n) {
  float t[16] = {};
  memcpy(t, p, n * sizeof(float));
  return load(t);
}
MPK_INLINE void store_first(float* p, F32x16 a, uint32_t n) {
  float t[16];
  store(t, a);
  memcpy(p, t, n * sizeof(float));
}
MPK_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
MPK_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
MPK_INLINE F32x16 round_even(F32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
MPK_INLINE __m256 scale2_half(__m256 a, __m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(i, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 s2 =
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, s1), s2);
}
MPK_INLINE F32x16 scale2(F32x16 a, F32x16 n) { return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }
MPK_INLINE F32x16 from_bf16(const uint16_t* p) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
}
MPK_INLINE F32x16 from_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
MPK_INLINE void to_bf16_half(uint16_t* p, __m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(
      rounded, _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40)), nan);
  const __m256i packed = _mm256_packus_epi32(rounded, rounded);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
MPK_INLINE void to_bf16(uint16_t* p, F32x16 a) {
  to_bf16_half(p, a.lo);
  to_bf16_half(p + 8, a.hi);
}
MPK_INLINE void to_f16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MPK_INLINE void from_bf16_pairs(const uint16_t* p, F32x16& first, F32x16& second) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}

#else

struct F32x16 {
  float v[16];
};
#define MPK_EACH(expression)                                                                               \
  F32x16 r;                                                                                                \
  for (uint32_t i = 0; i < 16; ++i) r.v[i] = (expression);                                                 \
  return r
MPK_INLINE F32x16 zero() { return {}; }
MPK_INLINE F32x16 splat(float x) { MPK_EACH(x); }
MPK_INLINE F32x16 load(const float* p) { MPK_EACH(p[i]); }
MPK_INLINE void store(float* p, F32x16 a) { memcpy(p, a.v, sizeof(a.v)); }
MPK_INLINE F32x16 load_first(const float* p, uint32_t n) { MPK_EACH(i < n ? p[i] : 0.0f); }
MPK_INLINE void store_first(float* p, F32x16 a, uint32_t n) { memcpy(p, a.v, n * sizeof(float)); }
MPK_INLINE F32x16 add(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] + b.v[i]); }
MPK_INLINE F32x16 sub(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] - b.v[i]); }
MPK_INLINE F32x16 mul(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] * b.v[i]); }
MPK_INLINE F32x16 div(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] / b.v[i]); }
MPK_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { MPK_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
MPK_INLINE F32x16 max(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
MPK_INLINE F32x16 min(F32x16 a, F32x16 b) { MPK_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
MPK_INLINE F32x16 round_even(F32x16 a) { MPK_EACH(__builtin_rintf(a.v[i])); }
MPK_INLINE float power_of_two(int32_t n) {
  const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
MPK_INLINE F32x16 scale2(F32x16 a, F32x16 n) {
  F32x16 r;
  for (uint32_t i = 0; i < 16; ++i) {
    const int32_t whole = static_cast<int32_t>(n.v[i]), half = whole >> 1;
    r.v[i] = a.v[i] * power_of_two(half) * power_of_two(whole - half);
  }
  return r;
}
MPK_INLINE float bits_to_f32(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
MPK_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, m = h & 1023u;
  if (exponent == 31) return bits_to_f32(sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0u));
  if (exponent == 0) {
    const float tiny = static_cast<float>(m) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return bits_to_f32(sign | ((exponent + 112u) << 23) | (m << 13));
}
MPK_INLINE uint16_t f32_to_f16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t a = bits & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a < 0x38800000u) { // subnormal: the sum with 0.5 rounds to a multiple of 2^-24
    const float sum = bits_to_f32(a) + 0.5f;
    uint32_t sum_bits;
    memcpy(&sum_bits, &sum, 4);
    return static_cast<uint16_t>(sign | (sum_bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}
MPK_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
MPK_INLINE F32x16 from_bf16(const uint16_t* p) { MPK_EACH(bits_to_f32(static_cast<uint32_t>(p[i]) << 16)); }
MPK_INLINE F32x16 from_f16(const uint16_t* p) { MPK_EACH(f16_to_f32(p[i])); }
MPK_INLINE void to_bf16(uint16_t* p, F32x16 a) {
  for (uint32_t i = 0; i < 16; ++i) p[i] = f32_to_bf16(a.v[i]);
}
MPK_INLINE void to_f16(uint16_t* p, F32x16 a) {
  for (uint32_t i = 0; i < 16; ++i) p[i] = f32_to_f16(a.v[i]);
}
MPK_INLINE void from_bf16_pairs(const uint16_t* p, F32x16& first, F32x16& second) {
  for (uint32_t i = 0; i < 16; ++i) {
    first.v[i] = bits_to_f32(static_cast<uint32_t>(p[2 * i]) << 16);
    second.v[i] = bits_to_f32(static_cast<uint32_t>(p[2 * i + 1]) << 16);
  }
}
#undef MPK_EACH

#endif

// Sum and maximum over the lanes, in one order on all levels.
MPK_INLINE float sum_lanes(F32x16 a) {
  float t[16];
  store(t, a);
  for (uint32_t step = 8; step > 0; step /= 2)
    for (uint32_t i = 0; i < step; ++i) t[i] = t[i] + t[i + step];
  return t[0];
}
MPK_INLINE float max_lanes(F32x16 a) {
  float t[16];
  store(t, a);
  for (uint32_t step = 8; step > 0; step /= 2)
    for (uint32_t i = 0; i < step; ++i) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
  return t[0];
}

// e^x, within 2 units in the last place; goes to 0 below the smallest normal number.
MPK_INLINE F32x16 exp(F32x16 x) {
  x = min(splat(89.0f), max(splat(-104.0f), x)); // in this order a NaN stays NaN
  const F32x16 n = round_even(mul(x, splat(0x1.715476p+0f)));
  F32x16 r = fma(n, splat(-0x1.62e4p-1f), x);
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  F32x16 p = splat(0x1.a01a02p-13f);          // 1/5040
  p = fma(p, r, splat(0x1.6c16c2p-10f));      // 1/720
  p = fma(p, r, splat(0x1.111112p-7f));       // 1/120
  p = fma(p, r, splat(0x1.555556p-5f));       // 1/24
  p = fma(p, r, splat(0x1.555556p-3f));       // 1/6
  p = fma(p, r, splat(0.5f));
  p = fma(p, mul(r, r), r);
  p = add(p, splat(1.0f));
  return scale2(p, n);
}

} // namespace MPK_ISA
} // namespace mpk
