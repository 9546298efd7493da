/* A row on its way to MPK_LAYOUT_WIDE: its pieces in registers, its norm, and the place where it is stored. All compute threads share a
 * row. Piece p of a thread is piece thread + p * kComputeThreads of the row. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/row_numbers.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_rows/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Source: how a row is computed (enum RowSource). X, Norm, Out: enum mpk_dtype of x, the norm weight and the output. Columns: columns of
 * a column tile. */
template <uint32_t Source, uint32_t X, uint32_t Norm, uint32_t Out, uint32_t Columns>
struct WideRow {
  static_assert(Columns == MPK_WIDE_COLUMNS || Columns == MPK_WIDE_NARROW, "a column tile of the layout");
  /* Columns of a piece, which has 16 bytes of x. */
  static constexpr uint32_t kColumns = 16 / sizeof(typename Number<X>::Type);
  /* Groups of 16 columns in a column tile. */
  static constexpr uint32_t kUnits = Columns / 16;

  static __device__ __forceinline__ uint32_t of_thread(uint32_t pieces) {
    return pieces > threadIdx.x ? (pieces - threadIdx.x + kComputeThreads - 1) / kComputeThreads : 0;
  }

  /* The values of a piece; 0 outside the row. */
  template <uint32_t Dtype>
  struct Piece {
    static constexpr uint32_t kBytes = sizeof(typename Number<Dtype>::Type), kWords = kColumns * kBytes / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ void load(uint64_t from, bool valid) {
      if constexpr (kWords == 2) load_global8_if(words[0], words[1], from, valid);
      else load_global16_if<0>(words[0], words[1], words[2], words[3], from, valid);
      if constexpr (kWords == 8) load_global16_if<16>(words[4], words[5], words[6], words[7], from, valid);
    }
    /* Reads a piece of 8 or 16 bytes from shared memory. */
    __device__ __forceinline__ void read(uint32_t from) {
      if constexpr (kWords == 2) {
        const uint2 v = load_shared8(from);
        words[0] = v.x, words[1] = v.y;
      } else {
        const uint4 v = load_shared16(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      }
    }
    /* Loads from global memory, value by value, for a row that is not aligned. */
    __device__ __forceinline__ void load_numbers(uint64_t row, uint32_t piece, uint32_t columns) {
      const uint32_t first = piece * kColumns;
      const uint64_t from = row + first * kBytes;
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
    __device__ __forceinline__ void add(const Piece& other) {
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) words[c] = __float_as_uint(at(c) + other.at(c));
    }
    __device__ __forceinline__ float squares() const {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) sum = fmaf(at(c), at(c), sum);
      return sum;
    }
    __device__ __forceinline__ float at(uint32_t c) const {
      if constexpr (kBytes == 4) return __uint_as_float(words[c]);
      const unsigned short half = static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16));
      if constexpr (Dtype == MPK_BF16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
      else return __half2float(__ushort_as_half(half));
    }
  };

  /* The other factor: the norm weight or the ups. */
  static constexpr uint32_t kOther = Source == kRmsNorm ? Norm : X;

  /* Computes the row's factor from each thread's sum of squares. `turn` alternates, because slower threads may still read the sums of
   * the previous turn. */
  static __device__ __forceinline__ int find_scale(Context& context, const mpk_wide_rows_params& params, float* sums_of_warps, float squares, float& scale,
                                                   uint32_t turn) {
    squares = sum_of_warp(squares);
    float* const sums = sums_of_warps + turn * kComputeWarps;
    if (context.lane == 0) sums[context.warp] = squares;
    if (const int code = context.sync(); code != MPK_OK) return code;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < kComputeWarps; ++warp) sum += sums[warp];
    scale = rsqrtf(fmaf(sum, reciprocal(static_cast<float>(params.columns)), params.eps));
    return MPK_OK;
  }

  /* Where a row of the output is stored. */
  struct Place {
    uint64_t address, tile_bytes; /* of the row in its first column tile; from one column tile to the next */
    uint32_t number;              /* the row's number in its tensor */
    /* Row `row` of the view, which is row `first` + `row` of the tensor. */
    __device__ __forceinline__ Place(const mpk_operand& out, uint32_t first, uint32_t row)
        : address(out.addr + row * (Columns * 2)), tile_bytes(static_cast<uint64_t>(out.strides[1]) * 2), number(first + row) {}
    __device__ __forceinline__ uint64_t of(uint32_t piece) const {
      const uint32_t column = piece * kColumns, unit = column / 16, word = column % 16 / 4;
      const uint32_t in_row = Columns == MPK_WIDE_NARROW ? narrow_piece(number, 0) : wide_piece(number, unit % kUnits, 0);
      return address + unit / kUnits * tile_bytes + in_row + word * 4;
    }
  };

  /* Stores a thread's pieces of a row, of which `padded` are in the row's column tiles. */
  template <uint32_t Pieces>
  static __device__ __forceinline__ void store_pieces(const Context& context, const Place& place, uint32_t padded, const Piece<X> (&x)[Pieces],
                                                      const Piece<kOther> (&other)[Pieces], float scale) {
    /* The distance between a thread's pieces is a whole number of column tiles. */
    static_assert(kComputeThreads * kColumns % Columns == 0, "column tiles");
    uint64_t to = place.of(context.thread);
#pragma unroll
    for (uint32_t p = 0; p < Pieces; ++p, to += kComputeThreads * kColumns / Columns * place.tile_bytes) store(to, p < padded, x[p], other[p], scale);
  }

  /* In a group of 16 columns, the even pairs lie together, and so do the odd pairs. The addresses of both differ by exclusive or with
   * `kHalves`. */
  static constexpr uint32_t kHalves = 16;
  static __device__ __forceinline__ void store(uint64_t to, bool valid, const Piece<X>& x, const Piece<kOther>& other, float scale) {
    uint32_t words[kColumns / 2];
#pragma unroll
    for (uint32_t pair = 0; pair < kColumns / 2; ++pair) {
      float v[2];
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        v[c] = x.at(pair * 2 + c);
        if constexpr (Source == kRmsNorm) v[c] = v[c] * scale * other.at(pair * 2 + c);
        if constexpr (Source == kSiluMul) v[c] = silu(v[c]) * other.at(pair * 2 + c);
      }
      words[pair] = pair_of<Out>(v[0], v[1]);
    }
    const uint64_t to_odd = to ^ kHalves;
    const uint32_t wanted = valid;
    if constexpr (kColumns == 4)
      asm volatile("{.reg .pred p; setp.ne.u32 p,%4,0; @p st.global.u32 [%0],%2; @p st.global.u32 [%1],%3;}" ::"l"(to), "l"(to_odd), "r"(words[0]),
                   "r"(words[1]), "r"(wanted) : "memory");
    else
      asm volatile("{.reg .pred p; setp.ne.u32 p,%6,0; @p st.global.v2.u32 [%0],{%2,%3}; @p st.global.v2.u32 [%1],{%4,%5};}" ::"l"(to), "l"(to_odd),
                   "r"(words[0]), "r"(words[2]), "r"(words[1]), "r"(words[3]), "r"(wanted) : "memory");
  }
};

#endif

}  // namespace gpu
}  // namespace mpk
