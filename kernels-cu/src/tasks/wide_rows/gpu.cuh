/* Rows in MPK_LAYOUT_WIDE: as they are, normed, or silu(gate) * up; computed in f32 and rounded once. A warp makes a row, or
 * several share one; a lane makes 16 columns at a time. */
#pragma once

#include "gpu/linear_rows.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_rows/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Source: how the rows are made. X, Norm, Out: enum mpk_dtype of x, the norm weight and the output. */
template <uint32_t Source, uint32_t X, uint32_t Norm, uint32_t Out>
struct WideRows : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_wide_rows_params& params = context.params<mpk_wide_rows_params>();
    const mpk_operand &x = context.input(0), &out = context.output(0);
    const uint32_t used = context.rows_in_use(params.rows_kind, params.rows), first = static_cast<uint32_t>(context.slot->task.args[0]);
    const int32_t* const args = context.slot->task.args;
    const uint32_t rows = used > first ? min(used - first, static_cast<uint32_t>(args[2])) : 0, columns = params.columns;
    const uint32_t units = (columns + MPK_WIDE_COLUMNS - 1) / MPK_WIDE_COLUMNS * 4;
    const uint64_t norm = Source == kRmsNorm ? context.input(1).addr : 0;
    const uint64_t row_bytes = static_cast<uint64_t>(x.strides[0]) * sizeof(typename Number<X>::Type);
    /* Whole units can be loaded 16 bytes at a time. */
    const bool aligned = ((x.addr | row_bytes | norm | (Source == kSiluMul ? columns * 2 : 0)) & 15) == 0;
    /* A block of few rows: several warps to a row, and each row has its warps. */
    const uint32_t block = static_cast<uint32_t>(args[2]), of_row = block > 4 ? 1 : block > 2 ? 2 : block > 1 ? 4 : 8;
    const uint32_t part = context.warp % of_row, step = 32 * of_row, at = part * 32 + context.lane;
    for (uint32_t row = context.warp / of_row; row < rows || of_row != 1; row += kComputeWarps / of_row) {
      const bool valid = row < rows;
      const uint64_t from = x.addr + static_cast<uint64_t>(static_cast<uint32_t>(args[1]) + row) * row_bytes;
      float scale = 1.0f;
      if constexpr (Source == kRmsNorm) {
        float squares = 0.0f;
        for (uint32_t unit = at; unit < units && valid; unit += step * kBatch) {
          Sixteen<X> values[kBatch];
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i) values[i].load(from, unit + i * step, columns, aligned);
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
#pragma unroll
            for (uint32_t c = 0; c < 16; ++c) squares = fmaf(values[i].at(c), values[i].at(c), squares);
        }
#pragma unroll
        for (uint32_t distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
        if (of_row != 1) {
          float* const shared = reinterpret_cast<float*>(context.work());
          if (context.lane == 0) shared[context.warp] = squares;
          if (const int code = context.sync(); code != MPK_OK) return code;
          squares = 0.0f;
          for (uint32_t warp = context.warp - part; warp < context.warp - part + of_row; ++warp) squares += shared[warp];
        }
        scale = rsqrtf(fmaf(squares, reciprocal(static_cast<float>(columns)), params.eps));
      }
      for (uint32_t unit = at; unit < units && valid; unit += step * kBatch) {
        Sixteen<X> values[kBatch];
        Sixteen<Source == kRmsNorm ? Norm : X> others[kBatch];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          values[i].load(from, unit + i * step, columns, aligned);
          if constexpr (Source == kRmsNorm) others[i].load(norm, unit + i * step, columns, aligned);
          if constexpr (Source == kSiluMul) others[i].load(from + columns * 2, unit + i * step, columns, aligned);
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          const uint32_t u = unit + i * step;
          if (u >= units) continue;
          uint32_t words[8];
#pragma unroll
          for (uint32_t pair = 0; pair < 8; ++pair) {
            float v[2];
#pragma unroll
            for (uint32_t c = 0; c < 2; ++c) {
              v[c] = values[i].at(pair * 2 + c);
              if constexpr (Source == kRmsNorm) v[c] = v[c] * scale * others[i].at(pair * 2 + c);
              if constexpr (Source == kSiluMul) v[c] = silu(v[c]) * others[i].at(pair * 2 + c);
            }
            words[pair] = pair_of<Out>(v[0], v[1]);
          }
          uint8_t* const to = reinterpret_cast<uint8_t*>(out.addr) + static_cast<uint64_t>(u / 4) * out.strides[1] * 2 + row * (MPK_WIDE_COLUMNS * 2);
          *reinterpret_cast<uint4*>(to + wide_piece(first + row, u % 4, 0)) = uint4{words[0], words[2], words[4], words[6]};
          *reinterpret_cast<uint4*>(to + wide_piece(first + row, u % 4, 1)) = uint4{words[1], words[3], words[5], words[7]};
        }
      }
      if (of_row != 1) break;
    }
    return MPK_OK;
  }

 private:
  /* Units under way in a lane: 64 registers of f32. */
  static constexpr uint32_t kBatch = 4;

  /* 16 numbers; 0 beyond the row. */
  template <uint32_t Dtype>
  struct Sixteen {
    static constexpr uint32_t kBytes = sizeof(typename Number<Dtype>::Type);
    uint4 words[kBytes];

    __device__ __forceinline__ void load(uint64_t row, uint32_t unit, uint32_t columns, bool aligned) {
#pragma unroll
      for (uint32_t i = 0; i < kBytes; ++i) words[i] = uint4{0, 0, 0, 0};
      if (aligned && unit * 16 + 16 <= columns) {
#pragma unroll
        for (uint32_t i = 0; i < kBytes; ++i) words[i] = load_global16(row + (unit * kBytes + i) * 16);
      } else if (unit * 16 < columns) {
#pragma unroll
        for (uint32_t i = 0; i < kBytes; ++i) words[i] = some(row, unit * 16 + i * (16 / kBytes), columns);
      }
    }
    __device__ __forceinline__ float at(uint32_t c) const {
      const uint32_t n = c * kBytes / 4;
      const uint4& four = words[n / 4];
      const uint32_t word = n % 4 == 0 ? four.x : n % 4 == 1 ? four.y : n % 4 == 2 ? four.z : four.w;
      if constexpr (kBytes == 4) return __uint_as_float(word);
      const unsigned short half = static_cast<unsigned short>(word >> (c % 2 * 16));
      if constexpr (Dtype == MPK_BF16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
      else return __half2float(__ushort_as_half(half));
    }

   private:
    /* 16 bytes from `column` on, element by element. */
    static __device__ __forceinline__ uint4 some(uint64_t row, uint32_t column, uint32_t columns) {
      uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
      for (uint32_t i = 0; i < 16 / kBytes; ++i) {
        if (column + i >= columns) continue;
        if constexpr (kBytes == 4) word[i] = reinterpret_cast<const uint32_t*>(row)[column + i];
        else word[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[column + i]) << (i % 2 * 16);
      }
      return uint4{word[0], word[1], word[2], word[3]};
    }
  };
};

#endif

}  // namespace gpu
}  // namespace mpk
