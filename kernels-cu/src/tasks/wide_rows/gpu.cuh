/* Rows in MPK_LAYOUT_WIDE: as they are, normed, or silu(gate) * up; computed in f32 and rounded once. A warp makes a row, or
 * several share one. A lane takes 16 bytes of x at a time, and a warp's loads lie side by side: with shared memory in use as it
 * is, the first-level cache has no room for lines that several loads share. */
#pragma once

#include "gpu/linear_rows.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_rows/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Source: how the rows are made. X, Norm, Out: enum mpk_dtype of x, the norm weight and the output. Columns: of a column tile. Stacked: x
 * is two summands. */
template <uint32_t Source, uint32_t X, uint32_t Norm, uint32_t Out, uint32_t Columns = MPK_WIDE_COLUMNS, bool Stacked = false>
struct WideRows : TaskCode {
  static __device__ int run(Context& context) {
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const mpk_wide_rows_params& params = context.params<mpk_wide_rows_params>();
    const mpk_operand &x = context.input(0), &out = context.output(0);
    const uint32_t used = context.rows_in_use(params.rows_kind, params.rows), first = static_cast<uint32_t>(context.slot->task.args[0]);
    const int32_t* const args = context.slot->task.args;
    const uint32_t rows = used > first ? min(used - first, static_cast<uint32_t>(args[2])) : 0, columns = params.columns;
    const uint32_t pieces = (columns + MPK_WIDE_COLUMNS - 1) / MPK_WIDE_COLUMNS * (MPK_WIDE_COLUMNS / kColumns);
    const uint64_t norm = Source == kRmsNorm ? context.input(1).addr : 0;
    const uint64_t row_bytes = static_cast<uint64_t>(x.strides[Stacked ? 1 : 0]) * sizeof(typename Number<X>::Type);
    const uint64_t apart = Stacked ? static_cast<uint64_t>(x.strides[0]) * sizeof(typename Number<X>::Type) : 0;
    /* Whole pieces can be loaded at once. */
    const bool aligned = ((x.addr | row_bytes | apart | norm | (Source == kSiluMul ? columns * 2 : 0)) & 15) == 0;
    /* A block of few rows: several warps to a row, and each row has its warps. */
    const uint32_t block = static_cast<uint32_t>(args[2]), of_row = block > 4 ? 1 : block > 2 ? 2 : block > 1 ? 4 : 8;
    const uint32_t part = context.warp % of_row, step = 32 * of_row, at = part * 32 + context.lane;
    for (uint32_t row = context.warp / of_row; row < rows || of_row != 1; row += kComputeWarps / of_row) {
      const bool valid = row < rows;
      const uint32_t in_x = params.gather == 0 ? static_cast<uint32_t>(args[1]) + row : valid ? static_cast<uint32_t>(context.batch()->sample_row[first + row]) : 0;
      const uint64_t from = x.addr + in_x * row_bytes;
      float scale = 1.0f;
      if constexpr (Source == kRmsNorm) {
        float squares = 0.0f;
        for (uint32_t piece = at; piece < pieces && valid; piece += step * kBatch) {
          Piece<X> values[kBatch];
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i) values[i].load(from, piece + i * step, columns, aligned);
          if constexpr (Stacked) add_second(values, from + apart, piece, step, columns, aligned);
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
#pragma unroll
            for (uint32_t c = 0; c < kColumns; ++c) squares = fmaf(values[i].at(c), values[i].at(c), squares);
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
      for (uint32_t piece = at; piece < pieces && valid; piece += step * kBatch) {
        Piece<X> values[kBatch];
        Piece<Source == kRmsNorm ? Norm : X> others[kBatch];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          values[i].load(from, piece + i * step, columns, aligned);
          if constexpr (Source == kRmsNorm) others[i].load(norm, piece + i * step, columns, aligned);
          if constexpr (Source == kSiluMul) others[i].load(from + columns * 2, piece + i * step, columns, aligned);
        }
        if constexpr (Stacked) add_second(values, from + apart, piece, step, columns, aligned);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          const uint32_t p = piece + i * step;
          if (p >= pieces) continue;
          uint32_t words[kColumns / 2];
#pragma unroll
          for (uint32_t pair = 0; pair < kColumns / 2; ++pair) {
            float v[2];
#pragma unroll
            for (uint32_t c = 0; c < 2; ++c) {
              v[c] = values[i].at(pair * 2 + c);
              if constexpr (Source == kRmsNorm) v[c] = v[c] * scale * others[i].at(pair * 2 + c);
              if constexpr (Source == kSiluMul) v[c] = silu(v[c]) * others[i].at(pair * 2 + c);
            }
            words[pair] = pair_of<Out>(v[0], v[1]);
          }
          store(out, first + row, row, p, words);
        }
      }
      if (of_row != 1) break;
    }
    return MPK_OK;
  }

 private:
  /* Columns of a piece: 16 bytes of x. */
  static constexpr uint32_t kColumns = 16 / sizeof(typename Number<X>::Type);
  /* Of 16 columns in a column tile. */
  static constexpr uint32_t kUnits = Columns / 16;
  /* Pieces under way in a lane. */
  static constexpr uint32_t kBatch = Stacked ? 4 : 8;

  template <class Values>
  static __device__ __forceinline__ void add_second(Values& values, uint64_t row, uint32_t piece, uint32_t step, uint32_t columns, bool aligned) {
    static_assert(X == MPK_F32, "sums are of f32");
    Piece<X> second[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) second[i].load(row, piece + i * step, columns, aligned);
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i)
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) values[i].words[c] = __float_as_uint(values[i].at(c) + second[i].at(c));
  }

  /* Of 16 neighbouring columns the even pairs lie together, and the odd ones. */
  static __device__ __forceinline__ void store(const mpk_operand& out, uint32_t place, uint32_t row, uint32_t piece, const uint32_t (&words)[kColumns / 2]) {
    const uint32_t column = piece * kColumns, unit = column / 16, word = column % 16 / 4;
    uint8_t* const to = reinterpret_cast<uint8_t*>(out.addr) + static_cast<uint64_t>(unit / kUnits) * out.strides[1] * 2 + row * (Columns * 2) + word * 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint8_t* const at = to + (Columns == MPK_WIDE_NARROW ? narrow_piece(place, unit % kUnits, half) : wide_piece(place, unit % kUnits, half));
      if constexpr (kColumns == 4) *reinterpret_cast<uint32_t*>(at) = words[half];
      else *reinterpret_cast<uint2*>(at) = uint2{words[half], words[half + 2]};
    }
  }

  /* Numbers of a piece; 0 beyond the row. */
  template <uint32_t Dtype>
  struct Piece {
    static constexpr uint32_t kBytes = sizeof(typename Number<Dtype>::Type), kWords = kColumns * kBytes / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ void load(uint64_t row, uint32_t piece, uint32_t columns, bool aligned) {
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) words[i] = 0;
      const uint32_t first = piece * kColumns;
      if (aligned && first + kColumns <= columns) {
        const uint64_t from = row + first * kBytes;
        if constexpr (kWords == 2) {
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          words[0] = two.x, words[1] = two.y;
        } else {
#pragma unroll
          for (uint32_t i = 0; i < kWords; i += 4) {
            const uint4 four = load_global16(from + i * 4);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
          }
        }
      } else if (first < columns) {
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) {
          if (first + c >= columns) continue;
          if constexpr (kBytes == 4) words[c] = reinterpret_cast<const uint32_t*>(row)[first + c];
          else words[c / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[first + c]) << (c % 2 * 16);
        }
      }
    }
    __device__ __forceinline__ float at(uint32_t c) const {
      if constexpr (kBytes == 4) return __uint_as_float(words[c]);
      const unsigned short half = static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16));
      if constexpr (Dtype == MPK_BF16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
      else return __half2float(__ushort_as_half(half));
    }
  };
};

#endif

}  // namespace gpu
}  // namespace mpk
