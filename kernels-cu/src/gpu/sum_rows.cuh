/* Sums rows, and norms them as `wide_rows` does. The sum and its norm are the same bits as those of two tasks.
 *
 * All warps share a row. Each thread copies and reads its own pieces of 4 columns, so the next rows are on their way to shared memory
 * while this one is computed, and the sum stays in registers until it is normed. Rows that do not fit are rare and have a loop of their
 * own.
 *
 * Flagged words are polled until they have arrived, so they do not pass through shared memory. A thread polls the words of several pieces
 * at a time. One piece after the other took 8 us for a row of 4,096 columns of two ranks (H200). */
#pragma once

#include "gpu/task.cuh"
#include "gpu/wide_row.cuh"
#include "gpu/words.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Summands: where the rows of the summands are, and the parameters. It has
 *   kFlagged                       the summands are flagged words
 *   kCount, kResidual, kDtype      the number of summands, whether a residual (f32) comes after them, their enum mpk_dtype
 *   Summands(context)              the addresses
 *   of(number, row), rest(row)     the address of a row of a summand, and of the residual
 *   addresses(), rest_addresses()  all addresses and distances between rows, joined by `or`
 *   kNorm                          the index of the norm weight among the inputs
 *   rows(context)                  the parameters of `wide_rows`
 *   used(context)                  the number of the task's rows that are in use
 * Norm, Out: enum mpk_dtype of the norm weight and the normed rows. Pieces: number of pieces of a row per thread. Columns: columns of a
 * column tile. */
template <class Summands, uint32_t Norm, uint32_t Out, uint32_t Pieces, uint32_t Columns>
struct SumRows : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    if constexpr (kAhead > 0) {
      const Views views(context);
      if (views.aligned && views.pieces <= Pieces * kComputeThreads) return make(context, views);
    }
    return make_piecewise(context);
  }

 private:
  static constexpr uint32_t In = Summands::kDtype, kCount = Summands::kCount;
  static constexpr bool kResidual = Summands::kResidual, kFlagged = Summands::kFlagged;
  using Wide = WideRow<kRmsNorm, MPK_F32, Norm, Out, Columns>;
  template <uint32_t Dtype>
  using Piece = typename Wide::template Piece<Dtype>;
  using Place = typename Wide::Place;
  static constexpr uint32_t kColumns = Wide::kColumns;
  /* Bytes of a piece of a summand, and of the residual or the sum. */
  static constexpr uint32_t kInBytes = Piece<In>::kWords * 4, kSumBytes = Piece<MPK_F32>::kWords * 4;
  /* Bytes of a row in shared memory: the summands, then the residual. The number of rows that are being copied or computed. */
  static constexpr uint32_t kRestAt = kFlagged ? 0 : kCount * Pieces * kComputeThreads * kInBytes;
  static constexpr uint32_t kRowBytes = kRestAt + (kResidual ? Pieces * kComputeThreads * kSumBytes : 0);
  static constexpr uint32_t kSumsBytes = 2 * kComputeWarps * 4, kMost = kRowBytes == 0 ? 4 : (kWorkBytes - kSumsBytes) / kRowBytes;
  static constexpr uint32_t kAhead = kMost < 4 ? kMost : 4;
  /* Pieces whose words are polled together: as many as 64 registers hold. */
  static constexpr uint32_t kFitting = 64 / (kCount * kColumns * 2), kPolled = kFitting < 1 ? 1 : kFitting < Pieces ? kFitting : Pieces;

  struct Views {
    Summands summands;
    uint64_t sum, norm; /* addresses of the first row, and of the norm weight */
    uint32_t sum_row;   /* bytes from one row to the next */
    uint32_t columns, pieces; /* pieces of whole column tiles */
    uint32_t inside, padded;  /* the thread's pieces inside the row, and inside its column tiles */
    bool aligned;             /* a piece is either completely inside the row or completely outside */

    __device__ __forceinline__ explicit Views(const Context& context) : summands(context) {
      const mpk_operand& out = context.output(0);
      sum = out.addr, sum_row = out.strides[0] * 4;
      norm = context.input(Summands::kNorm).addr;
      columns = Summands::rows(context).columns;
      pieces = (columns + MPK_WIDE_COLUMNS - 1) / MPK_WIDE_COLUMNS * (MPK_WIDE_COLUMNS / kColumns);
      inside = Wide::of_thread(columns / kColumns);
      padded = Wide::of_thread(pieces);
      const uint64_t wide = summands.rest_addresses() | sum | sum_row | norm;
      aligned = columns % kColumns == 0 && summands.addresses() % kInBytes == 0 && wide % 16 == 0;
    }
  };

  static __device__ __forceinline__ Place place_of(const Context& context, uint32_t number) {
    return Place(context.output(1), static_cast<uint32_t>(context.slot->task.args[1]), number);
  }
  static __device__ __forceinline__ int find_scale(Context& context, float squares, float& scale, uint32_t turn) {
    float* const sums = reinterpret_cast<float*>(context.work() + kWorkBytes - kSumsBytes);
    return Wide::find_scale(context, Summands::rows(context), sums, squares, scale, turn);
  }
  static __device__ __forceinline__ void add(Piece<MPK_F32>& sum, const Piece<In>& summand, bool first) {
#pragma unroll
    for (uint32_t c = 0; c < kColumns; ++c) sum.words[c] = __float_as_uint(first ? summand.at(c) : sum.at(c) + summand.at(c));
  }

  static __device__ __forceinline__ int make(Context& context, const Views& views) {
    Piece<Norm> norms[Pieces];
    /* The norm weight is constant, so it is loaded before the inputs are ready. */
    constexpr uint32_t kNormBytes = Piece<Norm>::kWords * 4;
#pragma unroll
    for (uint32_t p = 0; p < Pieces; ++p) norms[p].load(views.norm + (context.thread + p * kComputeThreads) * kNormBytes, p < views.inside);
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const uint32_t rows = Summands::used(context), buffer = shared_address(context.work());
#pragma unroll 1
    for (uint32_t number = 0; number < kAhead; ++number) fetch(context, views, buffer, number, rows);
    int code = MPK_OK;
#pragma unroll 1
    for (uint32_t number = 0; number < rows; ++number) {
      /* Waits for this row. */
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
      const uint32_t from = buffer + number % kAhead * kRowBytes;
      Piece<MPK_F32> values[Pieces];
      float squares = 0.0f;
      if constexpr (kFlagged) {
#pragma unroll
        for (uint32_t p = 0; p < Pieces; p += kPolled) receive(context, views, number, values, p);
      }
#pragma unroll
      for (uint32_t p = 0; p < Pieces; ++p) {
        const uint32_t piece = context.thread + p * kComputeThreads;
        if constexpr (!kFlagged) {
#pragma unroll
          for (uint32_t r = 0; r < kCount; ++r) {
            Piece<In> summand;
            summand.read(from + (r * Pieces * kComputeThreads + piece) * kInBytes);
            add(values[p], summand, r == 0);
          }
        }
        if constexpr (kResidual) {
          Piece<MPK_F32> rest;
          rest.read(from + kRestAt + piece * kSumBytes);
          values[p].add(rest);
        }
        squares += values[p].squares();
      }
      /* The thread has read its pieces of this row, and no other thread reads them. */
      fetch(context, views, buffer, number + kAhead, rows);
      const uint64_t sum = views.sum + static_cast<uint64_t>(number) * views.sum_row + context.thread * kSumBytes;
#pragma unroll
      for (uint32_t p = 0; p < Pieces; ++p) store_sum(sum + p * (kComputeThreads * kSumBytes), p < views.inside, values[p]);
      float scale;
      code = find_scale(context, squares, scale, number % 2);
      if (code != MPK_OK) break;
      Wide::store_pieces(context, place_of(context, number), views.padded, values, norms, scale);
    }
    /* No copy may be in flight when the next task uses the memory. */
    asm volatile("cp.async.wait_all;" ::: "memory");
    return code;
  }

  static __device__ __forceinline__ void store_sum(uint64_t to, bool valid, const Piece<MPK_F32>& sum) {
    asm volatile("{.reg .pred p; setp.ne.u32 p,%5,0; @p st.global.v4.u32 [%0],{%1,%2,%3,%4};}" ::"l"(to), "r"(sum.words[0]), "r"(sum.words[1]),
                 "r"(sum.words[2]), "r"(sum.words[3]), "r"(static_cast<uint32_t>(valid)) : "memory");
  }

  /* The sums of the thread's kPolled pieces from `first` on, of flagged words. Values outside the row become 0. */
  static __device__ __forceinline__ void receive(const Context& context, const Views& views, uint32_t number, Piece<MPK_F32> (&values)[Pieces], uint32_t first) {
    const uint32_t tag = context.slot->tag;
    const auto words_of = [&](uint32_t rank, uint32_t p) {
      return reinterpret_cast<const uint64_t*>(views.summands.of(rank, number)) + (context.thread + p * kComputeThreads) * kColumns;
    };
    uint64_t seen[kPolled][kCount][kColumns];
    bool all = false;
#pragma unroll 1
    for (uint32_t polls = 0; polls <= kQuickPolls && !all; ++polls) {
      if (polls == kQuickPolls) {
        /* The bounded wait, word by word. Then they are read once more. */
#pragma unroll 1
        for (uint32_t p = first; p < min(first + kPolled, views.inside); ++p)
#pragma unroll 1
          for (uint32_t word = 0; word < kCount * kColumns; ++word) context.wait_flagged(words_of(word / kColumns, p) + word % kColumns);
      }
      /* All these words are in flight before the first one is tested. */
#pragma unroll
      for (uint32_t i = 0; i < kPolled; ++i)
#pragma unroll
        for (uint32_t r = 0; r < kCount; ++r)
#pragma unroll
          for (uint32_t c = 0; c < kColumns; c += 2) {
            seen[i][r][c] = seen[i][r][c + 1] = static_cast<uint64_t>(tag) << 32;
            if (first + i < views.inside && !kWithoutAllreduces) load_words(seen[i][r][c], seen[i][r][c + 1], words_of(r, first + i) + c);
          }
      all = true;
#pragma unroll
      for (uint32_t i = 0; i < kPolled; ++i)
#pragma unroll
        for (uint32_t r = 0; r < kCount; ++r)
#pragma unroll
          for (uint32_t c = 0; c < kColumns; ++c) all = all && mpk_flagged_arrived(seen[i][r][c], tag);
      if constexpr (kWithoutWaits) all = all || Summands::used(context) <= kMostRowsWithoutWaits;
    }
#pragma unroll
    for (uint32_t i = 0; i < kPolled; ++i) {
      if (first + i >= Pieces) break;
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t r = 0; r < kCount; ++r) {
          const float part = __uint_as_float(static_cast<uint32_t>(seen[i][r][c]));
          sum = r == 0 ? part : sum + part;
        }
        values[first + i].words[c] = __float_as_uint(sum);
      }
    }
  }

  /* Starts the copies of the thread's pieces of a row, as one group; values outside the row become 0. After the last row the group is
   * empty. */
  static __device__ __forceinline__ void fetch(const Context& context, const Views& views, uint32_t buffer, uint32_t number, uint32_t rows) {
    if (number < rows) {
      const uint32_t to = buffer + number % kAhead * kRowBytes;
#pragma unroll
      for (uint32_t r = 0; r < (kFlagged ? 0 : kCount); ++r)
        copy<kInBytes>(to + (r * Pieces * kComputeThreads + context.thread) * kInBytes, views.summands.of(r, number) + context.thread * kInBytes, views.inside);
      if constexpr (kResidual)
        copy<kSumBytes>(to + kRestAt + context.thread * kSumBytes, views.summands.rest(number) + context.thread * kSumBytes,
                        views.inside);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  /* The thread's pieces, `Bytes` each. Copies of 8 bytes pass through the first-level cache, which the wait for the inputs has emptied. */
  template <uint32_t Bytes>
  static __device__ __forceinline__ void copy(uint32_t to, uint64_t from, uint32_t inside) {
#pragma unroll
    for (uint32_t p = 0; p < Pieces; ++p) {
      const uint32_t at = p * kComputeThreads * Bytes, bytes = p < inside ? Bytes : 0;
      if constexpr (Bytes == 8) asm volatile("cp.async.ca.shared.global [%0],[%1],8,%2;" ::"r"(to + at), "l"(from + at), "r"(bytes) : "memory");
      else asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to + at), "l"(from + at), "r"(bytes) : "memory");
    }
  }

  /* Piece by piece; the sum is read again for its norm. This function gets a copy of the context, see `wide_rows`. */
  static __device__ __noinline__ int make_piecewise(Context context) {
    const Views views(context);
    if (const int code = context.wait_inputs(); code != MPK_OK) return code;
    const uint32_t rows = Summands::used(context);
#pragma unroll 1
    for (uint32_t number = 0; number < rows; ++number) {
      const uint64_t sum = views.sum + static_cast<uint64_t>(number) * views.sum_row;
      float squares = 0.0f, scale;
#pragma unroll 1
      for (uint32_t piece = context.thread; piece < views.pieces; piece += kComputeThreads) {
        Piece<MPK_F32> value;
#pragma unroll
        for (uint32_t r = 0; r < kCount; ++r) {
          Piece<In> summand;
          if constexpr (kFlagged) {
            const uint64_t* const words = reinterpret_cast<const uint64_t*>(views.summands.of(r, number)) + piece * kColumns;
#pragma unroll
            for (uint32_t c = 0; c < kColumns; ++c)
              summand.words[c] = piece * kColumns + c < views.columns ? __float_as_uint(context.wait_flagged(words + c)) : 0u;
          } else {
            summand.load_numbers(views.summands.of(r, number), piece, views.columns);
          }
          add(value, summand, r == 0);
        }
        if constexpr (kResidual) {
          Piece<MPK_F32> rest;
          rest.load_numbers(views.summands.rest(number), piece, views.columns);
          value.add(rest);
        }
        squares += value.squares();
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c)
          if (piece * kColumns + c < views.columns) reinterpret_cast<uint32_t*>(sum)[piece * kColumns + c] = value.words[c];
      }
      if (const int code = find_scale(context, squares, scale, number % 2); code != MPK_OK) return code;
      const Place place = place_of(context, number);
#pragma unroll 1
      for (uint32_t piece = context.thread; piece < views.pieces; piece += kComputeThreads) {
        Piece<MPK_F32> value;
        Piece<Norm> norm;
        value.load_numbers(sum, piece, views.columns);
        norm.load_numbers(views.norm, piece, views.columns);
        Wide::store(place.of(piece), true, value, norm, scale);
      }
    }
    return MPK_OK;
  }
};

#endif

}  // namespace gpu
}  // namespace mpk
