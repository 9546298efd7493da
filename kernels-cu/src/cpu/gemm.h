// Product of f32 activations and a tiled weight, for the level that includes this file.
//
// out[r][c] is one chain of fused multiply-adds over k, starting at k = 0, for any R, T and level: the bits
// depend only on the row of x and the row of the weight. (bf16 dot products, if the level has them, form such a
// chain too, over pairs.)
//
// Weights are converted in registers. A block of R rows of x is stored as [k][R], so that the data of a step is
// contiguous. T tiles of 16 columns are T streams of weights.
#pragma once

#include "cpu/simd.h"

namespace mpk {
namespace MPK_ISA {

// Maximum number of rows of a block: with 2 tiles (1 below AVX-512) the accumulators just fit the registers.
#if defined(MPK_SIMD_512)
constexpr uint32_t GEMM_ROWS = 12;
// A single row takes one tile at a time. The weights are read once with little work on them, and AMD's Zen 4 reads
// four streams per core at half the rate of one.
constexpr uint32_t gemm_tiles(uint32_t rows) { return rows == 1 ? 1 : rows <= 4 ? 4 : 2; }
#elif defined(MPK_SIMD_256)
constexpr uint32_t GEMM_ROWS = 5;
constexpr uint32_t gemm_tiles(uint32_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
constexpr uint32_t GEMM_ROWS = 4;
constexpr uint32_t gemm_tiles(uint32_t) { return 1; }
#endif
constexpr uint32_t GEMM_TILES = 4;

// How far ahead of use weights are prefetched, in bytes. Without prefetching, multiply-adds and loads alternate
// with 5 rows and more. With it, 8 rows run a quarter faster.
constexpr uint64_t GEMM_PREFETCH_BYTES = 2048;

// Weight types: `unpack` reads two values of k of one tile.
struct WeightBf16 {
  static constexpr uint32_t STEP_BYTES = 64; // two values of k of one tile
  using X = float;
  MPK_INLINE void unpack(const uint8_t* w, F32x16& first, F32x16& second) {
    from_bf16_pairs(reinterpret_cast<const uint16_t*>(w), first, second);
  }
};
struct WeightF16 {
  static constexpr uint32_t STEP_BYTES = 64;
  using X = float;
  MPK_INLINE void unpack(const uint8_t* w, F32x16& first, F32x16& second) {
    first = from_f16(reinterpret_cast<const uint16_t*>(w));
    second = from_f16(reinterpret_cast<const uint16_t*>(w) + 16);
  }
};
struct WeightF32 {
  static constexpr uint32_t STEP_BYTES = 128;
  using X = float;
  MPK_INLINE void unpack(const uint8_t* w, F32x16& first, F32x16& second) {
    first = load(reinterpret_cast<const float*>(w));
    second = load(reinterpret_cast<const float*>(w) + 16);
  }
};

// Two values of k: acc[t][r] += w[k] * x[k][r], then the same for k + 1. `w` is that of the first tile.
template <class W, uint32_t R, uint32_t T>
MPK_INLINE void gemm_step(F32x16 (&acc)[T][R], const uint8_t* w, uint64_t tile_bytes, const float* x) {
  F32x16 first[T], second[T];
  for (uint32_t t = 0; t < T; ++t) W::unpack(w + t * tile_bytes, first[t], second[t]);
  for (uint32_t r = 0; r < R; ++r) {
    const F32x16 value = splat(x[r]);
    for (uint32_t t = 0; t < T; ++t) acc[t][r] = fma(first[t], value, acc[t][r]);
  }
  for (uint32_t r = 0; r < R; ++r) {
    const F32x16 value = splat(x[R + r]);
    for (uint32_t t = 0; t < T; ++t) acc[t][r] = fma(second[t], value, acc[t][r]);
  }
}

#if defined(MPK_ISA_AVX512_BF16)
// bf16 dot products; x holds pairs of bf16, with the first value of k in the low half.
struct WeightBf16Dot {
  static constexpr uint32_t STEP_BYTES = 64;
  using X = uint32_t;
};
template <class W, uint32_t R, uint32_t T>
MPK_INLINE void gemm_step(F32x16 (&acc)[T][R], const uint8_t* w, uint64_t tile_bytes, const uint32_t* x) {
  __m512bh pairs[T];
  for (uint32_t t = 0; t < T; ++t)
    pairs[t] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + t * tile_bytes));
  for (uint32_t r = 0; r < R; ++r) {
    const __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x[r])));
    for (uint32_t t = 0; t < T; ++t) acc[t][r].v = _mm512_dpbf16_ps(acc[t][r].v, pairs[t], value);
  }
}
#endif

// acc[r][t] for R rows and T tiles; `w` is the first tile, and the others follow `tile_bytes` apart.
template <class W, uint32_t R, uint32_t T>
MPK_INLINE void gemm_block(const typename W::X* x, const uint8_t* w, uint64_t tile_bytes, uint64_t steps,
                           float* out /* [R][T * 16] */) {
  constexpr uint32_t PER_STEP = __is_same(typename W::X, float) ? 2 * R : R;
  F32x16 acc[T][R];
  for (uint32_t t = 0; t < T; ++t)
    for (uint32_t r = 0; r < R; ++r) acc[t][r] = zero();
  for (uint64_t i = 0; i < steps; ++i) {
    if constexpr (R > 4)
      for (uint32_t t = 0; t < T; ++t) __builtin_prefetch(w + t * tile_bytes + GEMM_PREFETCH_BYTES);
    gemm_step<W, R, T>(acc, w, tile_bytes, x);
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

// Indexed by rows - 1: the function for gemm_tiles(rows) tiles, and the one for a single tile.
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
