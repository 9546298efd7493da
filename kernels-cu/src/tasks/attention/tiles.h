// The two products of attention in register tiles. For any tile size, the same operations in the same order compute
// every result: a score is 16 lane sums over head_dim, which are then added pairwise; an output element is one chain of
// multiply-adds over the keys.
#pragma once

#include "cpu/simd.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

#if defined(MPK_SIMD_512)
constexpr uint32_t QUERY_TILE = 4, VALUE_TILE = 4, DOT_TILE = 16;

// out[i] = sum over the lanes of a[i], in the order of sum_lanes.
MPK_INLINE void sum_tile(float* out, const F32x16 (&a)[16]) {
  const auto halves = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  const auto quarters = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  const auto pairs = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  };
  const auto singles = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  };
  // Four sums end up in the four 128-bit lanes, so a[4 * lane + element] enters at place 4 * element + lane.
  const auto four = [&](int element) {
    return quarters(halves(a[element].v, a[4 + element].v), halves(a[8 + element].v, a[12 + element].v));
  };
  _mm512_storeu_ps(out, singles(pairs(four(0), four(1)), pairs(four(2), four(3))));
}
#elif defined(MPK_SIMD_256)
constexpr uint32_t QUERY_TILE = 2, VALUE_TILE = 2, DOT_TILE = 4;

MPK_INLINE void sum_tile(float* out, const F32x16 (&a)[4]) {
  const auto eight = [](F32x16 x) { return _mm256_add_ps(x.lo, x.hi); };
  const auto four = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const __m256 x = four(eight(a[0]), eight(a[2])), y = four(eight(a[1]), eight(a[3]));
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
  const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
  float lanes[8];
  _mm256_storeu_ps(lanes, one);
  out[0] = lanes[0];
  out[1] = lanes[1];
  out[2] = lanes[4];
  out[3] = lanes[5];
}
#else
constexpr uint32_t QUERY_TILE = 1, VALUE_TILE = 1, DOT_TILE = 1;

MPK_INLINE void sum_tile(float* out, const F32x16 (&a)[1]) { out[0] = sum_lanes(a[0]); }
#endif

// NQ queries against DOT_TILE / NQ keys.
template <typename T, uint32_t NQ>
MPK_INLINE void dot_tile(const float* q, uint32_t dim, const typename T::Element* k, float* out, uint32_t out_stride) {
  constexpr uint32_t NK = DOT_TILE / NQ;
  F32x16 sums[DOT_TILE];
  if constexpr (QUERY_TILE >= 4 && NQ <= 2) {
    // Few queries: reading the keys takes longest, and reading in address order is fastest.
#pragma GCC unroll 16
    for (uint32_t j = 0; j < NK; ++j) {
      F32x16 sum[NQ];
#pragma GCC unroll 16
      for (uint32_t i = 0; i < NQ; ++i) sum[i] = zero();
      for (uint32_t c = 0; c < dim; c += 16) {
        const F32x16 key = T::load16(k + uint64_t{j} * dim + c);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < NQ; ++i) sum[i] = fma(load(q + uint64_t{i} * dim + c), key, sum[i]);
      }
#pragma GCC unroll 16
      for (uint32_t i = 0; i < NQ; ++i) sums[i * NK + j] = sum[i];
    }
  } else {
#pragma GCC unroll 16
    for (uint32_t i = 0; i < DOT_TILE; ++i) sums[i] = zero();
    for (uint32_t c = 0; c < dim; c += 16) {
      F32x16 query[NQ];
#pragma GCC unroll 16
      for (uint32_t i = 0; i < NQ; ++i) query[i] = load(q + uint64_t{i} * dim + c);
#pragma GCC unroll 16
      for (uint32_t j = 0; j < NK; ++j) {
        const F32x16 key = T::load16(k + uint64_t{j} * dim + c);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < NQ; ++i) sums[i * NK + j] = fma(query[i], key, sums[i * NK + j]);
      }
    }
  }
  float tile[DOT_TILE];
  sum_tile(tile, sums);
#pragma GCC unroll 16
  for (uint32_t i = 0; i < NQ; ++i) memcpy(out + uint64_t{i} * out_stride, tile + i * NK, NK * sizeof(float));
}

template <typename T, uint32_t NQ>
MPK_INLINE void dots_of(const float* q, uint32_t dim, const typename T::Element* k, uint32_t keys, float* out,
                        uint32_t out_stride) {
  constexpr uint32_t NK = DOT_TILE / NQ;
  uint32_t j = 0;
  for (; j + NK <= keys; j += NK) dot_tile<T, NQ>(q, dim, k + uint64_t{j} * dim, out + j, out_stride);
  for (; j < keys; ++j) {
    for (uint32_t i = 0; i < NQ; ++i) {
      F32x16 sum = zero();
      for (uint32_t c = 0; c < dim; c += 16)
        sum = fma(load(q + uint64_t{i} * dim + c), T::load16(k + uint64_t{j} * dim + c), sum);
      out[uint64_t{i} * out_stride + j] = sum_lanes(sum);
    }
  }
}

// out[i][j] = q[i] . k[j]. Rows of q and k are `dim` apart, a multiple of 16.
template <typename T>
void dots(const float* q, uint32_t queries, uint32_t dim, const typename T::Element* k, uint32_t keys,
                 float* out, uint32_t out_stride) {
  uint32_t i = 0;
  if constexpr (QUERY_TILE >= 4)
    for (; i + 4 <= queries; i += 4)
      dots_of<T, 4>(q + uint64_t{i} * dim, dim, k, keys, out + uint64_t{i} * out_stride, out_stride);
  if constexpr (QUERY_TILE >= 2)
    for (; i + 2 <= queries; i += 2)
      dots_of<T, 2>(q + uint64_t{i} * dim, dim, k, keys, out + uint64_t{i} * out_stride, out_stride);
  for (; i < queries; ++i)
    dots_of<T, 1>(q + uint64_t{i} * dim, dim, k, keys, out + uint64_t{i} * out_stride, out_stride);
}

// NQ outputs, NV vectors of each.
template <typename T, uint32_t NQ, uint32_t NV>
MPK_INLINE void weighted_tile(float* o, uint32_t dim, const float* p, uint32_t p_stride,
                              const typename T::Element* v, uint32_t keys) {
  F32x16 sums[NQ][NV];
#pragma GCC unroll 16
  for (uint32_t i = 0; i < NQ; ++i)
#pragma GCC unroll 16
    for (uint32_t c = 0; c < NV; ++c) sums[i][c] = load(o + uint64_t{i} * dim + 16 * c);
  for (uint32_t j = 0; j < keys; ++j) {
    F32x16 value[NV];
#pragma GCC unroll 16
    for (uint32_t c = 0; c < NV; ++c) value[c] = T::load16(v + uint64_t{j} * dim + 16 * c);
#pragma GCC unroll 16
    for (uint32_t i = 0; i < NQ; ++i) {
      const F32x16 weight = splat(p[uint64_t{i} * p_stride + j]);
#pragma GCC unroll 16
      for (uint32_t c = 0; c < NV; ++c) sums[i][c] = fma(weight, value[c], sums[i][c]);
    }
  }
#pragma GCC unroll 16
  for (uint32_t i = 0; i < NQ; ++i)
#pragma GCC unroll 16
    for (uint32_t c = 0; c < NV; ++c) store(o + uint64_t{i} * dim + 16 * c, sums[i][c]);
}

template <typename T, uint32_t NQ>
MPK_INLINE void weighted_of(float* o, uint32_t dim, const float* p, uint32_t p_stride,
                            const typename T::Element* v, uint32_t keys) {
  uint32_t c = 0;
  if constexpr (QUERY_TILE >= 4 && NQ <= 2) // whole rows of 128 values at a time, so that they are read in order
    for (; c + 16 * 2 * VALUE_TILE <= dim; c += 16 * 2 * VALUE_TILE)
      weighted_tile<T, NQ, 2 * VALUE_TILE>(o + c, dim, p, p_stride, v + c, keys);
  for (; c + 16 * VALUE_TILE <= dim; c += 16 * VALUE_TILE)
    weighted_tile<T, NQ, VALUE_TILE>(o + c, dim, p, p_stride, v + c, keys);
  for (; c < dim; c += 16) weighted_tile<T, NQ, 1>(o + c, dim, p, p_stride, v + c, keys);
}

// o[i] += sum over j of p[i][j] * v[j], for up to QUERY_TILE outputs. Rows of o and v are `dim` apart.
template <typename T>
void weighted(float* o, uint32_t queries, uint32_t dim, const float* p, uint32_t p_stride,
                     const typename T::Element* v, uint32_t keys) {
  uint32_t i = 0;
  if constexpr (QUERY_TILE >= 4)
    for (; i + 4 <= queries; i += 4)
      weighted_of<T, 4>(o + uint64_t{i} * dim, dim, p + uint64_t{i} * p_stride, p_stride, v, keys);
  if constexpr (QUERY_TILE >= 2)
    for (; i + 2 <= queries; i += 2)
      weighted_of<T, 2>(o + uint64_t{i} * dim, dim, p + uint64_t{i} * p_stride, p_stride, v, keys);
  for (; i < queries; ++i)
    weighted_of<T, 1>(o + uint64_t{i} * dim, dim, p + uint64_t{i} * p_stride, p_stride, v, keys);
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk
