/* Kernels that put weights in their places, in the layout that the tasks read, before the persistent kernel starts. The
 * values are rows that the host has copied to the device, or random values. The host's side is
 * distributed/src/cuda/weights.rs. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "mpk/abi.h"
#ifdef MPK_WITHOUT
#include "gpu/loads.cuh"
#endif

/* The target of a matrix of rows x columns: row 0 becomes row first_row, and column 0 becomes column first_column, of
 * the tensor at `addr`, whose rows are `stride` elements apart. For packed layouts: first_column = 0, stride = columns rounded up; the
 * elements in between are set to zero. Rows are counted as in the source; MPK_LAYOUT_PAIRED puts them in another order. */
struct mpk_weights_target {
  uint64_t addr;
  uint64_t stride;
  uint64_t first_row, first_column;
  uint64_t rows, columns;
  uint32_t dtype;  /* MPK_F32, MPK_F16 or MPK_BF16 */
  uint32_t layout; /* enum mpk_layout: strided, fragment or paired */
  uint64_t half_rows; /* for MPK_LAYOUT_PAIRED: rows of the tensor's first half */
};
static_assert(sizeof(mpk_weights_target) == 64, "the host writes the same struct");

namespace mpk {
namespace gpu {
namespace weights {

/* Rounds to nearest even. If the types are equal, the bits stay the same. */
template <typename To, typename From>
struct Convert;
template <typename T>
struct Convert<T, T> {
  static __device__ T of(T value) { return value; }
};
template <>
struct Convert<float, __half> {
  static __device__ float of(__half value) { return __half2float(value); }
};
template <>
struct Convert<float, __nv_bfloat16> {
  static __device__ float of(__nv_bfloat16 value) { return __bfloat162float(value); }
};
template <>
struct Convert<__half, float> {
  static __device__ __half of(float value) { return __float2half_rn(value); }
};
template <>
struct Convert<__nv_bfloat16, float> {
  static __device__ __nv_bfloat16 of(float value) { return __float2bfloat16_rn(value); }
};
template <>
struct Convert<__half, __nv_bfloat16> {
  static __device__ __half of(__nv_bfloat16 value) { return __float2half_rn(__bfloat162float(value)); }
};
template <>
struct Convert<__nv_bfloat16, __half> {
  static __device__ __nv_bfloat16 of(__half value) { return __float2bfloat16_rn(__half2float(value)); }
};

/* Row-major values in device memory. */
template <typename From>
struct Rows {
  const From* first;
  uint64_t pitch;
  template <typename To>
  __device__ To at(uint64_t row, uint64_t column) const {
    return Convert<To, From>::of(first[row * pitch + column]);
  }
};

__device__ inline uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

/* launch/src/model/random_weights.rs documents the formula. Every value is exact in all three types. */
struct Random {
  uint64_t key;
  uint64_t pitch, first_row, first_column;
  uint32_t norm;
  template <typename To>
  __device__ To at(uint64_t row, uint64_t column) const {
    const uint64_t i = (first_row + row) * pitch + first_column + column;
    uint32_t h = mix32(static_cast<uint32_t>(i) ^ static_cast<uint32_t>(key)) ^ static_cast<uint32_t>(key >> 32) ^ static_cast<uint32_t>(i >> 32);
    h *= 0x9E3779B1u;
    h ^= h >> 15;
    const int32_t s = static_cast<int32_t>((h & 127u) + (h >> 8 & 127u) + (h >> 16 & 127u) + (h >> 24 & 127u)) - 254;
    const float value = norm ? 1.0f + static_cast<float>((s + 16) >> 5) / 128.0f : static_cast<float>(s) / 4096.0f;
    return Convert<To, float>::of(value);
  }
};

/* What one thread writes to a packed matrix at a time: 16 bytes of one block of 16 rows x 16 columns. */
template <typename To>
struct Unit {
  static constexpr uint32_t kElements = 16 / sizeof(To);
  static constexpr uint32_t kOfBlock = 256 / kElements;
  /* Unit number `n` of a block, in an order in which adjacent threads read adjacent columns; and its elements. */
  static __device__ uint32_t place(uint32_t n) { return sizeof(To) == 2 ? n : ((n & 7u) * 2 + (n >> 3 & 1u)) * 4 + (n >> 4); }
  static __device__ uint32_t row(uint32_t place, uint32_t e) {
    return sizeof(To) == 2 ? (place >> 2) + 8 * (e >> 1 & 1u) : (place & 3u) * 4 + e;
  }
  static __device__ uint32_t column(uint32_t place, uint32_t e) {
    return sizeof(To) == 2 ? (place & 3u) * 4 + (e >> 2) * 2 + (e & 1u) : (place >> 3) + 8 * (place >> 2 & 1u);
  }
};

/* The order of a packed matrix's rows: the tiles of 16 that may have rows first .. end, and the row at a place of a tile. */
struct InOrder {
  __device__ explicit InOrder(const mpk_weights_target&) {}
  __device__ uint64_t first_tile(uint64_t first, uint64_t) const { return first / 16; }
  __device__ uint64_t end_tile(uint64_t, uint64_t end) const { return (end + 15) / 16; }
  __device__ uint64_t row(uint64_t tile, uint32_t place) const { return tile * 16 + place; }
};
/* MPK_LAYOUT_PAIRED: rows of the first half, then as many of the second half. */
struct InPairs {
  uint64_t half;
  __device__ explicit InPairs(const mpk_weights_target& target) : half(target.half_rows) {}
  __device__ bool both(uint64_t first, uint64_t end) const { return first < half && end > half; }
  __device__ uint64_t first_tile(uint64_t first, uint64_t end) const {
    return both(first, end) ? 0 : (first < half ? first : first - half) / MPK_PAIR_ROWS;
  }
  __device__ uint64_t end_tile(uint64_t first, uint64_t end) const {
    return ((both(first, end) ? half : first < half ? end : end - half) + MPK_PAIR_ROWS - 1) / MPK_PAIR_ROWS;
  }
  __device__ uint64_t row(uint64_t tile, uint32_t place) const {
    return (place < MPK_PAIR_ROWS ? 0 : half) + tile * MPK_PAIR_ROWS + place % MPK_PAIR_ROWS;
  }
};

template <typename To, typename Order, typename Source>
__device__ void write_fragments(const mpk_weights_target& target, const Source& source) {
  using U = Unit<To>;
  const Order order(target);
  const uint64_t blocks_of_tile = target.stride / 16, end_row = target.first_row + target.rows;
  const uint64_t first_tile = order.first_tile(target.first_row, end_row);
  const uint64_t tiles = order.end_tile(target.first_row, end_row) - first_tile;
  const uint64_t units = tiles * blocks_of_tile * U::kOfBlock;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t n = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < units; n += step) {
    const uint64_t block = n / U::kOfBlock;
    const uint32_t place = U::place(static_cast<uint32_t>(n % U::kOfBlock));
    const uint64_t tile = block / blocks_of_tile;
    const uint64_t first_column = (block - tile * blocks_of_tile) * 16;
    alignas(16) To values[U::kElements];
    bool inside[U::kElements];
    bool all = true;
#pragma unroll
    for (uint32_t e = 0; e < U::kElements; ++e) {
      const uint64_t row = order.row(first_tile + tile, U::row(place, e));
      const uint64_t column = first_column + U::column(place, e);
      inside[e] = row >= target.first_row && row - target.first_row < target.rows;
      all = all && inside[e];
      values[e] = inside[e] && column < target.columns ? source.template at<To>(row - target.first_row, column) : Convert<To, float>::of(0.0f);
    }
    To* out = reinterpret_cast<To*>(target.addr) + ((first_tile + tile) * blocks_of_tile * 16 + first_column) * 16 + place * U::kElements;
    if (all) {
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(values);
    } else {
      /* Other rows of these 16 bytes belong to another piece of the tensor, or are padding that is already zero. In pairs of rows,
       * half of them do, unless a piece has both halves. */
#pragma unroll
      for (uint32_t e = 0; e < U::kElements; ++e) {
        if (inside[e]) out[e] = values[e];
      }
    }
  }
}

template <typename To, typename Source>
__device__ void write_rows(const mpk_weights_target& target, const Source& source) {
  const uint64_t count = target.rows * target.columns;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  To* out = reinterpret_cast<To*>(target.addr);
  for (uint64_t n = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < count; n += step) {
    const uint64_t row = n / target.columns;
    const uint64_t column = n - row * target.columns;
    out[(target.first_row + row) * target.stride + target.first_column + column] = source.template at<To>(row, column);
  }
}

template <typename To, typename Source>
__device__ void write_as(const mpk_weights_target& target, const Source& source) {
  switch (target.layout) {
    case MPK_LAYOUT_FRAGMENT: return write_fragments<To, InOrder>(target, source);
    case MPK_LAYOUT_PAIRED: return write_fragments<To, InPairs>(target, source);
    default: return write_rows<To>(target, source);
  }
}

template <typename Source>
__device__ void write(const mpk_weights_target& target, const Source& source) {
  switch (target.dtype) {
    case MPK_F32: return write_as<float>(target, source);
    case MPK_F16: return write_as<__half>(target, source);
    case MPK_BF16: return write_as<__nv_bfloat16>(target, source);
    default: return;
  }
}

}  // namespace weights
}  // namespace gpu
}  // namespace mpk

/* Packs rows in device memory, `pitch` elements apart, of type `dtype`. Any grid, blocks of 256 threads. */
extern "C" __global__ void __launch_bounds__(256)
mpk_pack_weights(mpk_weights_target target, const void* rows, uint64_t pitch, uint32_t dtype) {
  using namespace mpk::gpu::weights;
  switch (dtype) {
    case MPK_F32: return write(target, Rows<float>{static_cast<const float*>(rows), pitch});
    case MPK_F16: return write(target, Rows<__half>{static_cast<const __half*>(rows), pitch});
    case MPK_BF16: return write(target, Rows<__nv_bfloat16>{static_cast<const __nv_bfloat16*>(rows), pitch});
    default: return;
  }
}

/* Writes random values: those of the tensor with this key, whose rows are `pitch` long, starting at (row, column). */
extern "C" __global__ void __launch_bounds__(256)
mpk_fill_random(mpk_weights_target target, uint64_t key, uint64_t pitch, uint64_t row, uint64_t column, uint32_t norm) {
  using namespace mpk::gpu::weights;
  write(target, Random{key, pitch, row, column, norm});
}

#ifdef MPK_WITHOUT
/* For `mpk-bench stream`: reads `count` pieces of 16 bytes at full memory speed, and does nothing with them. Any
 * grid. */
extern "C" __global__ void __launch_bounds__(512) mpk_read_memory(const uint4* from, uint64_t count, uint32_t* nothing) {
  constexpr uint32_t kBatch = 8;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint32_t any = 0;
  for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += kBatch * step) {
    uint4 v[kBatch] = {};
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i)
      if (at + i * step < count) v[i] = mpk::gpu::load_global16(reinterpret_cast<uint64_t>(from + at + i * step));
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) any ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  /* Almost never true, and then *nothing is 0: this keeps the loads. */
  if (any == 0x9E3779B9u && *nothing != 0) *nothing = any;
}
#endif
