/* Writes rows in MPK_LAYOUT_WIDE: unchanged, normed, or as silu(gate) * up; computed in f32 and rounded once.
 *
 * All warps share a row. Each thread copies and reads its own pieces of 16 bytes. The number of bytes in flight limits a task of many
 * rows, so the next rows, 64 KB of them, are copied to shared memory while the current row is computed. With loads into registers and
 * one row per warp, 2,048 rows of 4,096 columns took 40 us (H200), now 17; more loads in registers spill.
 *
 * A task runs this code once. The products before it have replaced most of it in the instruction cache, so the code is short. Rows that
 * are not aligned are rare and have a loop of their own. */
#pragma once

#include "gpu/task.cuh"
#include "gpu/wide_row.cuh"

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
  using Wide = WideRow<Source, X, Norm, Out, Columns>;
  template <uint32_t Dtype>
  using Piece = typename Wide::template Piece<Dtype>;
  using Place = typename Wide::Place;
  static constexpr uint32_t kColumns = Wide::kColumns, kOther = Wide::kOther;
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
      inside = Wide::of_thread(columns / kColumns);
      padded = Wide::of_thread(pieces);
    }
  };

  static_assert(!Stacked || X == MPK_F32, "sums are of f32");

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

  static __device__ __forceinline__ Place place_of(const Context& context, uint32_t number) {
    return Place(context.output(0), static_cast<uint32_t>(context.slot->task.args[0]), number);
  }
  static __device__ __forceinline__ int find_scale(Context& context, float squares, float& scale, uint32_t turn) {
    float* const sums = reinterpret_cast<float*>(context.work() + kSumsAt);
    return Wide::find_scale(context, context.params<mpk_wide_rows_params>(), sums, squares, scale, turn);
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
        code = find_scale(context, squares, scale, number % 2);
        if (code != MPK_OK) break;
      }
      Wide::store_pieces(context, place_of(context, number), row.padded, values, others, scale);
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
        if (const int code = find_scale(context, squares, scale, number % 2); code != MPK_OK) return code;
      }
      const Place place = place_of(context, number);
#pragma unroll 1
      for (uint32_t piece = context.thread; piece < row.pieces; piece += kComputeThreads) {
        Piece<kOther> other;
        if constexpr (Source != kPlain) other.load_numbers(Source == kRmsNorm ? row.norm : from + row.apart, piece, row.columns);
        Wide::store(place.of(piece), true, numbers_of(row, from, piece), other, scale);
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
};

#endif

}  // namespace gpu
}  // namespace mpk
