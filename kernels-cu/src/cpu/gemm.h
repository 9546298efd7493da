// Product of f32 activations and a tiled weight, for the level that includes this file.
//
// out[r][c] is one chain of fused multiply-adds over k, from k = 0 on, whatever R, T and the level: the bits
// depend on the row of x and the row of the weight only. (bf16 dot products, where the level has them, are such
// a chain too, over pairs.)
//
// Weights are converted in registers. A block of R rows of x is stored [k][R], so that what a step needs is
// contiguous; T tiles of 16 columns are as many streams of weights.
#pragma once

#include "cpu/simd.h"

namespace mpk {
namespace MPK_ISA {

// Most rows of a block: with 2 tiles (1 below AVX-512) the accumulators just fit the registers.
#if defined(MPK_SIMD_512)
constexpr uint32_t GEMM_ROWS = 12;
constexpr uint32_t gemm_tiles(uint32_t rows) { return rows <= 4 ? 4 : 2; }
#elif defined(MPK_SIMD_256)
constexpr uint32_t GEMM_ROWS = 5;
constexpr uint32_t gemm_tiles(uint32_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr uint32_t GEMM_ROWS = 4;
constexpr uint32_t gemm_tiles(uint32_t) { return 1; }
#endif
constexpr uint32_t GEMM_TILES = 4;

// How far ahead of use weights are prefetched, bytes, when they are read once.
#ifndef MPK_PREFETCH_BYTES
#define MPK_PREFETCH_BYTES 2048
#endif

// Weight types. `step` does two values of k for one tile: acc[r] += w[k] * x[k][r], then the same for k + 1.
struct WeightBf16 {
  static constexpr uint32_t STEP_BYTES = 64; // two values of k of one tile
  using X = float;
  template <uint32_t R> MPK_INLINE void step(F32x16* acc, const uint8_t* w, const float* x) {
    F32x16 first, second;
    from_bf16_pairs(reinterpret_cast<const uint16_t*>(w), first, second);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(first, splat(x[r]), acc[r]);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(second, splat(x[R + r]), acc[r]);
  }
};
struct WeightF16 {
  static constexpr uint32_t STEP_BYTES = 64;
  using X = float;
  template <uint32_t R> MPK_INLINE void step(F32x16* acc, const uint8_t* w, const float* x) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w);
    const F32x16 first = from_f16(half), second = from_f16(half + 16);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(first, splat(x[r]), acc[r]);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(second, splat(x[R + r]), acc[r]);
  }
};
struct WeightF32 {
  static constexpr uint32_t STEP_BYTES = 128;
  using X = float;
  template <uint32_t R> MPK_INLINE void step(F32x16* acc, const uint8_t* w, const float* x) {
    const float* full = reinterpret_cast<const float*>(w);
    const F32x16 first = load(full), second = load(full + 16);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(first, splat(x[r]), acc[r]);
    for (uint32_t r = 0; r < R; ++r) acc[r] = fma(second, splat(x[R + r]), acc[r]);
  }
};
#if defined(MPK_ISA_AVX512_BF16)
// x holds pairs of bf16: the first value of k in the low half.
struct WeightBf16Dot {
  static constexpr uint32_t STEP_BYTES = 64;
  using X = uint32_t;
  template <uint32_t R> MPK_INLINE void step(F32x16* acc, const uint8_t* w, const uint32_t* x) {
    const __m512i pairs = _mm512_loadu_si512(w);
    for (uint32_t r = 0; r < R; ++r)
      acc[r].v = _mm512_dpbf16_ps(acc[r].v, reinterpret_cast<__m512bh>(pairs),
                                  reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[r]))));
  }
};
#endif

// acc[r][t] for R rows and T tiles; `w` is the first tile, the next are `tile_bytes` apart.
template <class W, uint32_t R, uint32_t T>
MPK_INLINE void gemm_block(const typename W::X* x, const uint8_t* w, uint64_t tile_bytes, uint64_t steps,
                           float* out /* [R][T * 16] */) {
  constexpr uint32_t PER_STEP = __is_same(typename W::X, float) ? 2 * R : R;
  F32x16 acc[T][R];
  for (uint32_t t = 0; t < T; ++t)
    for (uint32_t r = 0; r < R; ++r) acc[t][r] = zero();
  for (uint64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 4
    for (uint32_t t = 0; t < T; ++t) {
      const uint8_t* at = w + t * tile_bytes;
      if (R <= 4) __builtin_prefetch(at + MPK_PREFETCH_BYTES);
      W::template step<R>(acc[t], at, x);
    }
    w += W::STEP_BYTES;
    x += PER_STEP;
  }
  for (uint32_t r = 0; r < R; ++r)
    for (uint32_t t = 0; t < T; ++t) store(out + (r * T + t) * LANES, acc[t][r]);
}

using GemmBlock = void (*)(const void* x, const uint8_t* w, uint64_t tile_bytes, uint64_t steps, float* out);

template <class W, uint32_t R, uint32_t T>
void gemm_block_function(const void* x, const uint8_t* w, uint64_t tile_bytes, uint64_t steps, float* out) {
  gemm_block<W, R, T>(static_cast<const typename W::X*>(x), w, tile_bytes, steps, out);
}

// By rows - 1: the function for gemm_tiles(rows) tiles, and the one for a single tile.
template <class W> struct GemmFunctions {
  GemmBlock wide[GEMM_ROWS];
  GemmBlock narrow[GEMM_ROWS];
  template <uint32_t R> constexpr void fill() {
    if constexpr (R > 0) {
      wide[R - 1] = gemm_block_function<W, R, gemm_tiles(R)>;
      narrow[R - 1] = gemm_block_function<W, R, 1>;
      fill<R - 1>();
    }
  }
  constexpr GemmFunctions() : wide{}, narrow{} { fill<GEMM_ROWS>(); }
};

} // namespace MPK_ISA
} // namespace mpk
