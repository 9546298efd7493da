// Sums the ranks' partial tiles in rank order and adds the residual once. In the flagged form it waits for every
// word. The tiles may be f32, bf16 or f16; the sum is f32.
#pragma once

#include "cpu/simd.h"
#include "cpu/task.h"
#include "tasks/reduce/params.h"

// Compiled once, for the baseline, because the protocol's inline functions must not use a level's vector
// instructions.
extern "C" int mpk_reduce_wait(const mpk_kernel_args* args, const uint64_t* words, uint32_t count);

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

MPK_INLINE void store_as(uint32_t dtype, uint8_t* p, F32x16 a) {
  if (dtype == MPK_BF16) to_bf16(reinterpret_cast<uint16_t*>(p), a);
  else if (dtype == MPK_F16) to_f16(reinterpret_cast<uint16_t*>(p), a);
  else store(reinterpret_cast<float*>(p), a);
}

// The first `n` of 16 values; 0 for the rest.
MPK_INLINE F32x16 load_as(uint32_t dtype, const uint8_t* p, uint32_t n) {
  if (dtype == MPK_F32) {
    const auto* from = reinterpret_cast<const float*>(p);
    return n == 16 ? load(from) : load_first(from, n);
  }
  const auto widened = [dtype](const uint16_t* from) { return dtype == MPK_BF16 ? from_bf16(from) : from_f16(from); };
  if (n == 16) return widened(reinterpret_cast<const uint16_t*>(p));
  uint16_t tail[16] = {};
  memcpy(tail, p, n * sizeof(uint16_t));
  return widened(tail);
}

MPK_INLINE float value_of(uint64_t word) {
  const uint32_t bits = static_cast<uint32_t>(word);
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The values of 16 flagged words; false if one of them lacks the tag `tag`, so that the caller must wait
// for it. A vector load reads each 8-byte lane in one access, so a lane with the tag also has its value.
MPK_INLINE bool flagged16(const uint64_t* words, uint32_t tag, F32x16& values) {
#if defined(MPK_SIMD_512) && !defined(__SANITIZE_THREAD__)
  const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 8);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  values.v = _mm512_castsi512_ps(_mm512_permutex2var_epi32(a, even, b));
  const __m512i tags = _mm512_permutex2var_epi32(a, odd, b);
  return _mm512_cmpneq_epi32_mask(tags, _mm512_set1_epi32(static_cast<int32_t>(tag))) == 0;
#else
  float lanes[16];
  bool arrived = true;
  for (uint32_t i = 0; i < 16; ++i) {
    const uint64_t word = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
    arrived &= static_cast<uint32_t>(word >> 32) == tag;
    lanes[i] = value_of(word);
  }
  values = load(lanes);
  return arrived;
#endif
}

struct Tile {
  explicit Tile(const mpk_kernel_args* kernel_args)
      : args(kernel_args), params(*reinterpret_cast<const mpk_reduce_params*>(kernel_args->params)) {
    flagged = (params.flags & MPK_REDUCE_FLAGGED) != 0;
    residual = (params.flags & MPK_REDUCE_RESIDUAL) != 0 ? args->inputs + (flagged ? 1 : 2) : nullptr;
    rows = rows_in_use_from(args, params.rows_kind, static_cast<uint32_t>(args->task->args[0]), args->outputs[0].dims[0]);
    columns = args->outputs[0].dims[1];
    const mpk_operand& receive = args->inputs[flagged ? 0 : 1];
    received = receive.addr;
    dtype = receive.dtype;
    bytes = element_bytes(dtype);
    rank_stride = receive.strides[0];
    row_stride = receive.strides[1];
  }
  // The start of rank `rank`'s partial values of a row.
  const uint8_t* partial(uint32_t rank, uint32_t row) const {
    if (rank == params.rank) return row_address(args->inputs[0], row);
    return reinterpret_cast<const uint8_t*>(received) + (rank * rank_stride + row * row_stride) * bytes;
  }
  const uint64_t* words(uint32_t rank, uint32_t row) const {
    return reinterpret_cast<const uint64_t*>(received) + rank * rank_stride + row * row_stride;
  }

  const mpk_kernel_args* args;
  const mpk_reduce_params params;
  bool flagged;
  const mpk_operand* residual;
  uint32_t rows, columns, dtype;
  uint64_t bytes; // of a summand's element
  uint64_t received, rank_stride, row_stride;
};

int reduce(const mpk_kernel_args* args) {
  const Tile tile(args);
  const mpk_operand& out = args->outputs[0];
  const uint64_t bytes = element_bytes(out.dtype);
  const uint32_t tag = MPK_FLAG_TAG(*args->task, args->batch->epoch);
  for (uint32_t row = 0; row < tile.rows; ++row) {
    for (uint32_t c = 0; c < tile.columns; c += 16) {
      const uint32_t n = tile.columns - c < 16 ? tile.columns - c : 16;
      F32x16 sum = zero();
      for (uint32_t rank = 0; rank < tile.params.world; ++rank) {
        F32x16 part;
        if (!tile.flagged) {
          part = load_as(tile.dtype, tile.partial(rank, row) + c * tile.bytes, n);
        } else {
          const uint64_t* words = tile.words(rank, row) + c;
          if (n < 16 || !flagged16(words, tag, part)) {
            const int code = mpk_reduce_wait(args, words, n);
            if (code != MPK_OK) return code;
            float lanes[16] = {};
            for (uint32_t i = 0; i < n; ++i) lanes[i] = value_of(words[i]);
            part = load(lanes);
          }
        }
        sum = rank == 0 ? part : add(sum, part);
      }
      if (tile.residual != nullptr) {
        const float* from = reinterpret_cast<const float*>(row_address(*tile.residual, row)) + c;
        sum = add(sum, n == 16 ? load(from) : load_first(from, n));
      }
      uint8_t* to = row_address(out, row) + c * bytes;
      if (n == 16) {
        store_as(out.dtype, to, sum);
      } else {
        uint8_t tail[64];
        store_as(out.dtype, tail, sum);
        memcpy(to, tail, n * bytes);
      }
    }
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_reduce)(const mpk_kernel_args* args) { return mpk::MPK_ISA::reduce(args); }
