/* Rows in MPK_LAYOUT_WIDE: as they are, normed, or silu(gate) * up; computed in f32 and rounded once. A warp makes a row, or
 * several share one. A lane takes 16 bytes of x at a time, and a warp's loads lie side by side: with shared memory in use as it
 * is, the first-level cache has no room for lines that several loads share.
 *
 * A task runs this code once, and after the products before it little of it is left in the instruction cache: a profile of batch
 * 128 shows warps that wait for instructions in half of the time. So what seldom happens, rows that are not aligned, has a loop of
 * its own, which is not unrolled. */
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
    const mpk_operand& x = context.input(0);
    const uint32_t columns = context.params<mpk_wide_rows_params>().columns;
    const uint64_t row_bytes = static_cast<uint64_t>(x.strides[Stacked ? 1 : 0]) * sizeof(typename Number<X>::Type);
    const uint64_t apart = Stacked ? static_cast<uint64_t>(x.strides[0]) * sizeof(typename Number<X>::Type) : 0;
    const uint64_t norm = Source == kRmsNorm ? context.input(1).addr : 0;
    /* Then a piece is in the row as a whole, or not at all. */
    const bool aligned = columns % kColumns == 0 && ((x.addr | row_bytes | apart | norm | (Source == kSiluMul ? columns * 2 : 0)) & 15) == 0;
    return aligned ? make<true>(context, row_bytes, apart, norm, columns) : make<false>(context, row_bytes, apart, norm, columns);
  }

 private:
  /* Columns of a piece: 16 bytes of x. */
  static constexpr uint32_t kColumns = 16 / sizeof(typename Number<X>::Type);
  /* Of 16 columns in a column tile. */
  static constexpr uint32_t kUnits = Columns / 16;
  /* Pieces under way in a lane. */
  template <bool Aligned>
  static constexpr uint32_t kBatch = !Aligned ? 1 : Stacked ? 4 : 8;

  /* Numbers of a piece; 0 beyond the row. */
  template <uint32_t Dtype>
  struct Piece {
    static constexpr uint32_t kBytes = sizeof(typename Number<Dtype>::Type), kWords = kColumns * kBytes / 4;
    uint32_t words[kWords];

    template <bool Aligned>
    __device__ __forceinline__ void load(uint64_t row, uint32_t piece, uint32_t columns) {
      const uint32_t first = piece * kColumns;
      const uint64_t from = row + first * kBytes;
      if constexpr (Aligned) {
        const bool valid = first < columns;
        if constexpr (kWords == 2) load_global8_if(words[0], words[1], from, valid);
        else load_global16_if<0>(words[0], words[1], words[2], words[3], from, valid);
        if constexpr (kWords == 8) load_global16_if<16>(words[4], words[5], words[6], words[7], from, valid);
      } else {
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) {
          const bool valid = first + c < columns;
          if constexpr (kBytes == 4) {
            words[c] = valid ? reinterpret_cast<const uint32_t*>(from)[c] : 0u;
          } else {
            const uint32_t half = valid ? reinterpret_cast<const uint16_t*>(from)[c] : 0u;
            words[c / 2] = c % 2 == 0 ? half : words[c / 2] | half << 16;
          }
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

  /* What multiplies, or stands beside, x: the norm weight or the ups. */
  static constexpr uint32_t kOther = Source == kRmsNorm ? Norm : X;

  template <bool Aligned>
  static __device__ __forceinline__ int make(Context& context, uint64_t row_bytes, uint64_t apart, uint64_t norm, uint32_t columns) {
    constexpr uint32_t kMany = kBatch<Aligned>;
    const mpk_wide_rows_params& params = context.params<mpk_wide_rows_params>();
    const mpk_operand& out = context.output(0);
    const int32_t* const args = context.slot->task.args;
    const uint32_t used = context.rows_in_use(params.rows_kind, params.rows), first = static_cast<uint32_t>(args[0]);
    const uint32_t rows = used > first ? min(used - first, static_cast<uint32_t>(args[2])) : 0;
    const uint32_t pieces = (columns + MPK_WIDE_COLUMNS - 1) / MPK_WIDE_COLUMNS * (MPK_WIDE_COLUMNS / kColumns);
    /* A block of few rows: several warps to a row, and each row has its warps. */
    const uint32_t block = static_cast<uint32_t>(args[2]), of_row = block > 4 ? 1 : block > 2 ? 2 : block > 1 ? 4 : 8;
    const uint32_t part = context.warp % of_row, step = 32 * of_row, at = part * 32 + context.lane;
    /* A step's pieces are whole column tiles. */
    const uint64_t out_step = static_cast<uint64_t>(step * kColumns / Columns) * out.strides[1] * 2;
#pragma unroll 1
    for (uint32_t row = context.warp / of_row; row < rows || of_row != 1; row += kComputeWarps / of_row) {
      const bool valid = row < rows;
      const uint32_t in_x = params.gather == 0 ? static_cast<uint32_t>(args[1]) + row : valid ? static_cast<uint32_t>(context.batch()->sample_row[first + row]) : 0;
      const uint64_t from = context.input(0).addr + in_x * row_bytes;
      const uint32_t end = valid ? pieces : 0;
      /* Numbers on every path: the first loop may have no rounds, and what is not defined there ptxas keeps through all tasks. */
      Piece<X> values[kMany] = {};
      float scale = 1.0f;
      if constexpr (Source == kRmsNorm) {
        float squares = 0.0f;
#pragma unroll 1
        for (uint32_t piece = at; piece < end; piece += step * kMany) {
          load_x<Aligned>(values, from, apart, piece, step, columns);
#pragma unroll
          for (uint32_t i = 0; i < kMany; ++i)
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
#pragma unroll 1
          for (uint32_t warp = context.warp - part; warp < context.warp - part + of_row; ++warp) squares += shared[warp];
        }
        scale = rsqrtf(fmaf(squares, reciprocal(static_cast<float>(columns)), params.eps));
      }
      /* Values that the sum of squares has left in the registers are the whole row. */
      const bool held = Source == kRmsNorm && pieces <= step * kMany;
      uint64_t to = place(out, first + row, row, at);
#pragma unroll 1
      for (uint32_t piece = at; piece < end; piece += step * kMany) {
        Piece<kOther> others[kMany];
        if constexpr (Source != kPlain) {
          const uint64_t others_from = Source == kRmsNorm ? norm : from + columns * 2;
#pragma unroll
          for (uint32_t i = 0; i < kMany; ++i) others[i].template load<Aligned>(others_from, piece + i * step, columns);
        }
        if (!held) load_x<Aligned>(values, from, apart, piece, step, columns);
#pragma unroll
        for (uint32_t i = 0; i < kMany; ++i, to += out_step) {
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
          store_if(to, words, piece + i * step < end);
        }
      }
      if (of_row != 1) break;
    }
    return MPK_OK;
  }

  /* The pieces `piece`, `piece` + `step`, ... of a row of x; of two summands their sum. */
  template <bool Aligned>
  static __device__ __forceinline__ void load_x(Piece<X> (&values)[kBatch<Aligned>], uint64_t row, uint64_t apart, uint32_t piece, uint32_t step,
                                                uint32_t columns) {
#pragma unroll
    for (uint32_t i = 0; i < kBatch<Aligned>; ++i) values[i].template load<Aligned>(row, piece + i * step, columns);
    if constexpr (Stacked) {
      static_assert(X == MPK_F32, "sums are of f32");
      Piece<X> second[kBatch<Aligned>];
#pragma unroll
      for (uint32_t i = 0; i < kBatch<Aligned>; ++i) second[i].template load<Aligned>(row + apart, piece + i * step, columns);
#pragma unroll
      for (uint32_t i = 0; i < kBatch<Aligned>; ++i)
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) values[i].words[c] = __float_as_uint(values[i].at(c) + second[i].at(c));
    }
  }

  /* Where a piece's columns go: of 16 neighbouring columns the even pairs lie together, and the odd ones, `kHalves` bytes from them by the
   * exclusive or of their addresses. `number`: the row's in its tensor; `row`: in the view. */
  static __device__ __forceinline__ uint64_t place(const mpk_operand& out, uint32_t number, uint32_t row, uint32_t piece) {
    const uint32_t column = piece * kColumns, unit = column / 16, word = column % 16 / 4;
    const uint32_t in_row = Columns == MPK_WIDE_NARROW ? narrow_piece(number, unit % kUnits, 0) : wide_piece(number, unit % kUnits, 0);
    return out.addr + static_cast<uint64_t>(unit / kUnits) * out.strides[1] * 2 + row * (Columns * 2) + in_row + word * 4;
  }
  static constexpr uint32_t kHalves = 16;
  static __device__ __forceinline__ void store_if(uint64_t to, const uint32_t (&words)[kColumns / 2], bool valid) {
    const uint64_t other = to ^ kHalves;
    const uint32_t wanted = valid;
    if constexpr (kColumns == 4)
      asm volatile("{.reg .pred p; setp.ne.u32 p,%4,0; @p st.global.u32 [%0],%2; @p st.global.u32 [%1],%3;}" ::"l"(to), "l"(other), "r"(words[0]),
                   "r"(words[1]), "r"(wanted) : "memory");
    else
      asm volatile("{.reg .pred p; setp.ne.u32 p,%6,0; @p st.global.v2.u32 [%0],{%2,%3}; @p st.global.v2.u32 [%1],{%4,%5};}" ::"l"(to), "l"(other),
                   "r"(words[0]), "r"(words[2]), "r"(words[1]), "r"(words[3]), "r"(wanted) : "memory");
  }
};

#endif

}  // namespace gpu
}  // namespace mpk
