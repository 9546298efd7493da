/* Writes rows in MPK_LAYOUT_WIDE: unchanged, normed, or as silu(gate) * up; computed in f32 and rounded once.
 *
 * All warps share a row. Each thread copies and reads its own pieces of 16 bytes. The number of bytes in flight limits a task of many
 * rows, so the next rows, 64 KB of them, are copied to shared memory while the current row is computed. With loads into registers and
 * one row per warp, 2,048 rows of 4,096 columns took 40 us (H200), now 17; more loads in registers spill.
 *
 * A task runs this code once. The products before it have replaced most of it in the instruction cache, so the code is short. Rows that
 * are not aligned are rare and have a loop of their own. */
#pragma once

#include "gpu/linear_rows.cuh"
#include "gpu/wide_store.cuh"
#include "tasks/wide_rows/params.h"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Source: how a row is computed. X, Norm, Out: enum mpk_dtype of x, the norm weight and the output. Pieces: number of pieces of 16 bytes
 * of a row of x per thread. Columns: columns of a column tile. Stacked: x is two summands. */
template <uint32_t Source, uint32_t X, uint32_t Norm, uint32_t Out, uint32_t Pieces, uint32_t Columns = MPK_WIDE_COLUMNS, bool Stacked = false>
struct WideRows : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const Row row(context);
    /* If this holds, a piece is either completely inside the row or completely outside. */
    const uint64_t addresses = context.input(0).addr | row.bytes | row.apart | row.norm;
    const bool aligned = row.columns % kColumns == 0 && addresses % 16 == 0;
    return aligned && row.pieces <= Pieces * kComputeThreads ? make(context, row) : make_piecewise(context);
  }

 private:
  /* Columns of a piece, which has 16 bytes of x. */
  static constexpr uint32_t kColumns = 16 / sizeof(typename Number<X>::Type);
  /* Groups of 16 columns in a column tile. */
  static constexpr uint32_t kUnits = Columns / 16;
  /* Parts of a row of x: two summands, or gates and ups. */
  static constexpr uint32_t kParts = Stacked || Source == kSiluMul ? 2 : 1;
  /* Bytes of a row in shared memory, and the number of rows that are being copied or computed. */
  static constexpr uint32_t kRowBytes = kParts * Pieces * kComputeThreads * 16, kMost = 64 * 1024 / kRowBytes;
  static constexpr uint32_t kAhead = kMost > 1 ? kMost : 1, kSumsAt = kAhead * kRowBytes;
  static_assert(kSumsAt + 2 * kComputeWarps * 4 <= kWorkBytes, "the work area is too small for a row");

  struct Row {
    uint64_t bytes, apart, norm; /* from one row of x to the next, from its first part to the other; address of the norm weight */
    uint32_t columns, pieces;    /* pieces of whole column tiles */
    uint32_t inside, padded;     /* the thread's pieces inside the row, and inside its column tiles */

    __device__ __forceinline__ explicit Row(const Context& context) {
      constexpr uint32_t kBytes = sizeof(typename Number<X>::Type);
      const mpk_operand& x = context.input(0);
      bytes = static_cast<uint64_t>(x.strides[Stacked ? 1 : 0]) * kBytes;
      columns = context.params<mpk_wide_rows_params>().columns;
      apart = Stacked ? static_cast<uint64_t>(x.strides[0]) * kBytes : Source == kSiluMul ? columns * kBytes : 0;
      norm = Source == kRmsNorm ? context.input(1).addr : 0;
      pieces = (columns + MPK_WIDE_COLUMNS - 1) / MPK_WIDE_COLUMNS * (MPK_WIDE_COLUMNS / kColumns);
      inside = of_thread(columns / kColumns);
      padded = of_thread(pieces);
    }
  };

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
    /* Reads a piece of x from shared memory. */
    __device__ __forceinline__ void read(uint32_t from) {
      const uint4 v = load_shared16(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
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
  static_assert(!Stacked || X == MPK_F32, "sums are of f32");

  /* The other factor: the norm weight or the ups. */
  static constexpr uint32_t kOther = Source == kRmsNorm ? Norm : X;
  /* The number of the task's rows that are in use. */
  static __device__ __forceinline__ uint32_t count(const Context& context) {
    const mpk_wide_rows_params& params = context.params<mpk_wide_rows_params>();
    const int32_t* const args = context.slot->task.args;
    const uint32_t used = context.rows_in_use(params.rows_kind, params.rows), first = static_cast<uint32_t>(args[0]);
    return used > first ? min(used - first, static_cast<uint32_t>(args[2])) : 0;
  }
  /* The address in x of row `number` of the task. */
  static __device__ __forceinline__ uint64_t address(const Context& context, const Row& row, uint32_t number) {
    const int32_t* const args = context.slot->task.args;
    const bool gathers = context.params<mpk_wide_rows_params>().gather != 0;
    const uint32_t in_x = gathers ? static_cast<uint32_t>(context.batch()->sample_row[args[0] + number]) : static_cast<uint32_t>(args[1]) + number;
    return context.input(0).addr + in_x * row.bytes;
  }

  static __device__ __forceinline__ int make(Context& context, const Row& row) {
    Piece<kOther> others[Pieces];
    /* The norm weight is constant, so it is loaded before the inputs are ready. */
    if constexpr (Source == kRmsNorm) {
      const uint64_t from = row.norm + context.thread * (Piece<Norm>::kWords * 4);
#pragma unroll
      for (uint32_t p = 0; p < Pieces; ++p) others[p].load(from + p * (kComputeThreads * Piece<Norm>::kWords * 4), p < row.inside);
    }
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const uint32_t rows = count(context), buffer = shared_address(context.work()) + context.thread * 16;
#pragma unroll 1
    for (uint32_t number = 0; number < kAhead; ++number) fetch(context, row, buffer, number, rows);
    int code = MPK_OK;
#pragma unroll 1
    for (uint32_t number = 0; number < rows; ++number) {
      /* Waits for this row. */
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
      const uint32_t from = buffer + number % kAhead * kRowBytes;
      Piece<X> values[Pieces];
#pragma unroll
      for (uint32_t p = 0; p < Pieces; ++p) {
        values[p].read(from + p * (kComputeThreads * 16));
        if constexpr (Stacked) {
          Piece<X> second;
          second.read(from + (Pieces + p) * (kComputeThreads * 16));
          values[p].add(second);
        }
        if constexpr (Source == kSiluMul) others[p].read(from + (Pieces + p) * (kComputeThreads * 16));
      }
      float scale = 1.0f;
      if constexpr (Source == kRmsNorm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t p = 0; p < Pieces; ++p) squares += values[p].squares();
        code = find_scale(context, row, squares, scale, number % 2);
        if (code != MPK_OK) break;
      }
      const Place place(context, number);
      /* The distance between a thread's pieces is a whole number of column tiles. */
      static_assert(kComputeThreads * kColumns % Columns == 0, "column tiles");
      uint64_t to = place.of(context.thread);
#pragma unroll
      for (uint32_t p = 0; p < Pieces; ++p, to += kComputeThreads * kColumns / Columns * place.tile_bytes)
        store(to, p < row.padded, values[p], others[p], scale);
      fetch(context, row, buffer, number + kAhead, rows);
    }
    /* No copy may be in flight when the next task uses the memory. */
    asm volatile("cp.async.wait_all;" ::: "memory");
    return code;
  }

  /* Starts the copies of the thread's pieces of a row, as one group; values outside the row become 0. After the last row the group is
   * empty. */
  static __device__ __forceinline__ void fetch(const Context& context, const Row& row, uint32_t buffer, uint32_t number, uint32_t rows) {
    if (number < rows) {
      const uint64_t from = address(context, row, number) + context.thread * 16;
      const uint32_t to = buffer + number % kAhead * kRowBytes;
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
        for (uint32_t p = 0; p < Pieces; ++p)
          asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to + (part * Pieces + p) * (kComputeThreads * 16)),
                       "l"(from + part * row.apart + p * (kComputeThreads * 16)), "r"(p < row.inside ? 16u : 0u)
                       : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  /* Computes the row's factor from each thread's sum of squares. `turn` alternates, because slower threads may still read the sums of
   * the previous turn. */
  static __device__ __forceinline__ int find_scale(Context& context, const Row& row, float squares, float& scale, uint32_t turn) {
#pragma unroll
    for (uint32_t distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
    float* const sums = reinterpret_cast<float*>(context.work() + kSumsAt) + turn * kComputeWarps;
    if (context.lane == 0) sums[context.warp] = squares;
    if (const int code = context.sync(); code != MPK_OK) return code;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < kComputeWarps; ++warp) sum += sums[warp];
    scale = rsqrtf(fmaf(sum, reciprocal(static_cast<float>(row.columns)), context.params<mpk_wide_rows_params>().eps));
    return MPK_OK;
  }

  /* Piece by piece; with a norm each piece is loaded twice. This function gets a copy of the context and computes `Row` itself. If it took
   * references, both would lie in local memory in the caller, and each use would be a load. */
  static __device__ __noinline__ int make_piecewise(Context context) {
    const Row row(context);
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const uint32_t rows = count(context);
#pragma unroll 1
    for (uint32_t number = 0; number < rows; ++number) {
      const uint64_t from = address(context, row, number);
      float squares = 0.0f, scale = 1.0f;
      if constexpr (Source == kRmsNorm) {
#pragma unroll 1
        for (uint32_t piece = context.thread; piece < row.pieces; piece += kComputeThreads) squares += numbers_of(row, from, piece).squares();
        if (const int code = find_scale(context, row, squares, scale, number % 2); code != MPK_OK) return code;
      }
      const Place place(context, number);
#pragma unroll 1
      for (uint32_t piece = context.thread; piece < row.pieces; piece += kComputeThreads) {
        Piece<kOther> other;
        if constexpr (Source != kPlain) other.load_numbers(Source == kRmsNorm ? row.norm : from + row.apart, piece, row.columns);
        store(place.of(piece), true, numbers_of(row, from, piece), other, scale);
      }
    }
    return MPK_OK;
  }
  static __device__ __forceinline__ Piece<X> numbers_of(const Row& row, uint64_t from, uint32_t piece) {
    Piece<X> first, second;
    first.load_numbers(from, piece, row.columns);
    if constexpr (Stacked) {
      second.load_numbers(from + row.apart, piece, row.columns);
      first.add(second);
    }
    return first;
  }

  /* Where a row of the output is stored. */
  struct Place {
    uint64_t address, tile_bytes; /* of the row in its first column tile; from one column tile to the next */
    uint32_t number;              /* the row's number in its tensor */
    __device__ __forceinline__ Place(const Context& context, uint32_t row)
        : address(context.output(0).addr + row * (Columns * 2)), tile_bytes(static_cast<uint64_t>(context.output(0).strides[1]) * 2),
          number(static_cast<uint32_t>(context.slot->task.args[0]) + row) {}
    __device__ __forceinline__ uint64_t of(uint32_t piece) const {
      const uint32_t column = piece * kColumns, unit = column / 16, word = column % 16 / 4;
      const uint32_t in_row = Columns == MPK_WIDE_NARROW ? narrow_piece(number, unit % kUnits, 0) : wide_piece(number, unit % kUnits, 0);
      return address + unit / kUnits * tile_bytes + in_row + word * 4;
    }
  };

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
