/* Left operands of the linear family: rows of x unchanged, normed, or gated, rounded once to the weight's type,
 * stored in shared memory as linear_product.cuh reads them. */
#pragma once

#include <utility>

#include "gpu/linear_product.cuh"
#include "gpu/row_numbers.cuh"
#include "gpu/walk.cuh"
#include "tasks/linear/params.h"

namespace mpk {
namespace gpu {

/* Where the rows come from, and how they are divided among the threads: in pieces of 16 bytes of x, adjacent for a
 * warp. Loads with gaps between a warp's pieces take up to three times as long, even if the thread itself fills the
 * gaps. MostK: maximum number of columns of the left operand, for what is held in registers. Their number is known
 * only at run time, so that products of many shapes share the code. Parts: x is so many summands, one after the other. All loads of
 * a piece's parts are issued before the first of them is used. */
template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t X, uint32_t Norm, uint32_t Parts = 1>
class LeftSide {
  static_assert(Parts == 1 || (Source == kRmsNorm && X == MPK_F32), "normed rows of f32 may be summands");
  static constexpr uint32_t kPiece = 16 / kNumberBytes<X>; /* numbers per piece */
  static constexpr uint32_t kMostPieces = MostK / kPiece;
  static constexpr uint32_t kPutBytes = kPiece * kNumberBytes<Weight>;
  static constexpr uint32_t kNormPieceBytes = kPiece * kNumberBytes<Norm>;
  using Piece = Numbers<X, kPiece>;
  using NormPiece = Numbers<Norm, kPiece>;
  /* The parts after the first; room for one if there are none, since an array has at least one element. */
  static constexpr uint32_t kOthers = Parts > 1 ? Parts - 1 : 1;
  /* The rows are x unchanged. */
  static constexpr bool kCopies = Source == kPlain && X == Weight;

 public:
  /* Pieces of a row that each thread of `Warps` warps holds in registers between the sum of squares and the norm. */
  template <uint32_t Warps>
  static constexpr uint32_t kHeld = (kMostPieces + Warps * 32 - 1) / (Warps * 32);
  /* In at most 64 registers. */
  template <uint32_t Warps>
  static constexpr bool kCanHold = kHeld<Warps> * Parts * sizeof(Piece) <= 256;
  /* Warps per row if there are many. */
  static constexpr uint32_t kFewWarps = kHeld<4> * Parts * sizeof(Piece) <= 128 ? 4 : 8;
  /* Bytes of shared memory for the norm weight of `k` columns, which is fetched before the task's events. */
  static __device__ __forceinline__ uint32_t norm_bytes(uint32_t k) { return Source == kRmsNorm && k % 16 == 0 ? k * kNumberBytes<Norm> : 0; }
  /* Shared floats for the norms of up to 32 rows: partial sums of squares, then the scales. */
  static constexpr uint32_t kNormFloats = 64;

  /* `weight`: the weight's index among the inputs. `shared`: kNormFloats floats. `norm`: norm_bytes(k) bytes, or
   * NULL. */
  __device__ __forceinline__ LeftSide(Context& context, uint32_t weight, float* shared, uint8_t* norm)
      : context_(context), weight_(weight), sums_(shared), scales_(shared + 32) {
    wide_ = k() % 16 == 0 && ((context.input(0).addr | static_cast<uint64_t>(context.input(0).strides[kRowDim]) * kNumberBytes<X>) & 15) == 0;
    if constexpr (Source == kRmsNorm) {
      const uint64_t address = context.input(1).addr;
      wide_ = wide_ && (address & 15) == 0;
      norm_ = norm != nullptr && wide_ ? norm : reinterpret_cast<const uint8_t*>(address);
    }
  }

  /* Starts to bring the norm weight to the place given to the constructor. */
  __device__ __forceinline__ void fetch_norm() const {
    if constexpr (Source == kRmsNorm) {
      const uint64_t from = context_.input(1).addr;
      if (norm_ == reinterpret_cast<const uint8_t*>(from)) return;
      for (uint32_t at = context_.thread * 16; at < norm_bytes(k()); at += kComputeThreads * 16)
        asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(norm_ + at)), "l"(from + at) : "memory");
    }
  }
  /* The thread's part of it has arrived. Called before a barrier. */
  static __device__ __forceinline__ void norm_fetched() {
    if constexpr (Source == kRmsNorm) asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /* Puts complete rows [first, first + rows) at `to`, if a row of x fits the registers of the warps that share it;
   * `done` says so. Each x is read once. At most MostRows rows. */
  template <uint32_t MostRows>
  __device__ __forceinline__ int put_held(uint32_t first, uint32_t rows, uint8_t* to, uint32_t row_bytes, bool& done) {
    done = false;
    if constexpr (Source == kRmsNorm && kCanHold<kComputeWarps>) {
      if (!wide_ || k() == 0) return MPK_OK;
      done = true;
      if (rows == 1) return norm_held<8, 1, 1>(first, rows, to, row_bytes);
      return norm_held<kFewWarps, kFewWarps, MostRows>(first, rows, to, row_bytes);
    }
    return MPK_OK;
  }

  /* Computes what `put` needs for rows [first, first + rows), at most 32: each row's factor of the norm. */
  __device__ __forceinline__ int prepare(uint32_t first, uint32_t rows) {
    if constexpr (Source == kRmsNorm) {
      const uint32_t warps = rows > 4 ? 1 : rows > 2 ? 2 : rows == 2 ? 4 : 8; /* to a row */
      const Rows x = rows_of_x();
      for (uint32_t row = context_.warp / warps; row < rows; row += kComputeWarps / warps) {
        const float squares = sum_of_warp(squares_of(x.at(first + row), context_.warp % warps * 32 + context_.lane, warps * 32));
        if (context_.lane == 0) sums_[row * warps + context_.warp % warps] = squares;
      }
      norm_fetched();
      if (const int code = context_.sync(); code != MPK_OK) return code;
      if (context_.thread < rows) {
        float squares = 0.0f;
        for (uint32_t w = 0; w < warps; ++w) squares += sums_[context_.thread * warps + w];
        scales_[context_.thread] = scale_of(squares);
      }
      return context_.sync();
    }
    return MPK_OK;
  }

  /* Puts blocks [first_block, first_block + blocks) of rows [first, first + rows) at `to`. The next barrier makes
   * them visible to all threads. */
  __device__ __forceinline__ void put(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to, uint32_t row_bytes) const {
    if (!wide_)
      put_narrow(first, rows, first_block, blocks, to, row_bytes);
    else if constexpr (kCopies)
      copy(first, rows, first_block, blocks, to, row_bytes);
    else
      put_wide(first, rows, first_block, blocks, to, row_bytes);
  }

 private:
  /* The dimension of x that is rows. */
  static constexpr uint32_t kRowDim = Parts > 1 ? 1 : 0;
  /* Read from shared memory where needed, because the registers are for the rows. */
  __device__ __forceinline__ uint32_t k() const { return reread(context_.input(weight_).dims[1]); }
  /* Bytes from a row to the same row of the next summand. If a row is aligned, so are those of all summands. */
  __device__ __forceinline__ uint64_t to_next_part() const { return static_cast<uint64_t>(reread(context_.input(0).strides[0])) * kNumberBytes<X>; }
  __device__ __forceinline__ uint32_t num_pieces() const { return k() / kPiece; }

  /* Start addresses of rows of x. */
  struct Rows {
    uint64_t first, pitch;
    const int32_t* gathered; /* or NULL */

    __device__ __forceinline__ uint64_t at(uint32_t row) const {
      return first + (gathered != nullptr ? static_cast<uint32_t>(gathered[row]) : row) * pitch;
    }
  };
  __device__ __forceinline__ Rows rows_of_x() const {
    const mpk_operand& x = context_.input(0);
    const bool gathers = reread(context_.template params<mpk_linear_params>().gather_samples) != 0;
    return {reread(x.addr), static_cast<uint64_t>(reread(x.strides[kRowDim])) * kNumberBytes<X>, gathers ? context_.batch()->sample_row : nullptr};
  }

  __device__ __forceinline__ float scale_of(float squares) const {
    return rsqrtf(fmaf(squares, reciprocal(static_cast<float>(k())), context_.template params<mpk_linear_params>().eps));
  }

  /* Adds the other parts to the first, in order. */
  static __device__ __forceinline__ void add_parts(Piece& first, const Piece (&others)[kOthers]) {
    float sum[kPiece];
    first.values(sum);
#pragma unroll
    for (uint32_t part = 0; part + 1 < Parts; ++part) {
      float v[kPiece];
      others[part].values(v);
#pragma unroll
      for (uint32_t i = 0; i < kPiece; ++i) sum[i] += v[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < kPiece; ++i) first.words[i] = __float_as_uint(sum[i]);
  }

  static __device__ __forceinline__ float add_squares(float squares, const Piece& x) {
    float v[kPiece];
    x.values(v);
#pragma unroll
    for (uint32_t i = 0; i < kPiece; ++i) squares = fmaf(v[i], v[i], squares);
    return squares;
  }

  static __device__ __forceinline__ void put_normed(uint32_t address, const Piece& x, const NormPiece& norm, float scale, bool valid) {
    float v[kPiece], weights[kPiece];
    x.values(v);
    norm.values(weights);
#pragma unroll
    for (uint32_t i = 0; i < kPiece; ++i) v[i] = v[i] * scale * weights[i];
    put_numbers<Weight>(address, v, valid);
  }

  static __device__ __forceinline__ void clear_parts(Piece (&others)[kOthers]) {
#pragma unroll
    for (uint32_t part = 0; part < kOthers; ++part) others[part].clear();
  }
  /* The other parts of the piece at `from`. */
  __device__ __forceinline__ void load_parts(Piece (&others)[kOthers], uint64_t from) const {
    const uint64_t apart = to_next_part();
#pragma unroll
    for (uint32_t part = 0; part < kOthers; ++part) others[part].load(from + (part + 1) * apart);
  }
  /* Number `i` of the row at `from`. */
  __device__ __forceinline__ float number_of(uint64_t from, uint32_t i) const {
    float v = load_as_f32(reinterpret_cast<const void*>(from), X, i);
    if constexpr (Parts > 1) {
      const uint64_t apart = to_next_part();
#pragma unroll
      for (uint32_t part = 1; part < Parts; ++part) v += load_as_f32(reinterpret_cast<const void*>(from + part * apart), X, i);
    }
    return v;
  }

  /* One thread's part of a row's sum of squares: every `step`-th piece, or number, starting at `at`. */
  __device__ __forceinline__ float squares_of(uint64_t from, uint32_t at, uint32_t step) const {
    float squares = 0.0f;
    if (wide_) {
      constexpr uint32_t kBatch = 16 / Parts;
      for (uint32_t piece = at, pieces = num_pieces(); piece < pieces; piece += step * kBatch) {
        Piece x[kBatch];
        [[maybe_unused]] Piece others[kBatch][kOthers];
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
          x[j].clear();
          if constexpr (Parts > 1) clear_parts(others[j]);
          if (piece + j * step < pieces) {
            x[j].load(from + (piece + j * step) * sizeof(Piece));
            if constexpr (Parts > 1) load_parts(others[j], from + (piece + j * step) * sizeof(Piece));
          }
        }
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j) {
          if constexpr (Parts > 1) add_parts(x[j], others[j]);
          squares = add_squares(squares, x[j]);
        }
      }
    } else {
      for (uint32_t i = at; i < k(); i += step) {
        const float v = number_of(from, i);
        squares = fmaf(v, v, squares);
      }
    }
    return squares;
  }

  /* Gives each row `Warps` warps, so a round has kRound rows. The loads of several rounds are issued at once: as many as
   * 128 registers hold, up to `Rounds`. At most MostRows rows. */
  template <uint32_t Warps, uint32_t Rounds, uint32_t MostRows>
  __device__ __forceinline__ int norm_held(uint32_t first, uint32_t rows, uint8_t* to, uint32_t row_bytes) {
    constexpr uint32_t kCount = kHeld<Warps>, kRound = kComputeWarps / Warps;
    constexpr uint32_t kFitting = 512 / (kCount * Parts * sizeof(Piece));
    constexpr uint32_t kTogether = kFitting < 1 ? 1 : kFitting >= Rounds ? Rounds : kFitting < 4 ? kFitting : 4;
    constexpr bool kOneSet = kTogether * kRound >= MostRows;
    static_assert((kOneSet ? 1 : 2) * kTogether * kComputeWarps <= kNormFloats, "the sums of two sets of rounds");
    using Counts = std::make_integer_sequence<uint32_t, kCount>;
    /* Read again: otherwise the compiler would compute what depends on the thread's index before the loops over
     * rows, and spill it. */
    const uint32_t thread = Context::thread_index(), warp = thread / 32;
    const uint32_t at = thread % (Warps * 32), pieces = num_pieces();
    uint32_t set = 0;
    for (uint32_t begin = 0; begin < rows; begin += kTogether * kRound, ++set) {
      const uint32_t first_row = begin + warp / Warps;
      Piece x[kTogether][kCount];
      [[maybe_unused]] Piece others[kTogether][kOthers][kCount];
      const Rows source = rows_of_x();
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        const uint32_t row = first_row + r * kRound;
        load_row<Warps>(x[r], source.at(first + min(row, rows - 1)) + at * sizeof(Piece), at, row < rows ? pieces : 0, Counts());
        if constexpr (Parts > 1) {
          const uint64_t from = source.at(first + min(row, rows - 1)) + at * sizeof(Piece), apart = to_next_part();
#pragma unroll
          for (uint32_t part = 0; part < kOthers; ++part)
            load_row<Warps>(others[r][part], from + (part + 1) * apart, at, row < rows ? pieces : 0, Counts());
        }
      }
      /* Sets alternate between two parts of the sums: one barrier per set. */
      float* const sums = sums_ + (kOneSet ? 0 : set % 2 * kTogether * kComputeWarps);
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < kCount; ++j) {
          if constexpr (Parts > 1) {
            Piece of_piece[kOthers];
#pragma unroll
            for (uint32_t part = 0; part < kOthers; ++part) of_piece[part] = others[r][part][j];
            add_parts(x[r][j], of_piece);
          }
          squares = add_squares(squares, x[r][j]);
        }
        squares = sum_of_warp(squares);
        if (thread % 32 == 0) sums[r * kComputeWarps + warp] = squares;
      }
      norm_fetched();
      if (const int code = context_.sync(); code != MPK_OK) return code;
      float scales[kTogether];
      uint32_t limits[kTogether];
#pragma unroll
      for (uint32_t r = 0; r < kTogether; ++r) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < Warps; ++w) squares += sums[r * kComputeWarps + warp / Warps * Warps + w];
        scales[r] = scale_of(squares);
        limits[r] = first_row + r * kRound < rows ? pieces : 0;
      }
      const uint32_t place = shared_address(to) + first_row * row_bytes + at * kPutBytes;
#pragma unroll
      for (uint32_t j = 0; j < kCount; ++j) {
        const uint32_t piece = at + j * Warps * 32;
        NormPiece norm;
        norm.clear();
        if (piece < pieces) norm.load_generic(norm_ + piece * kNormPieceBytes);
#pragma unroll
        for (uint32_t r = 0; r < kTogether; ++r)
          put_normed(place + r * kRound * row_bytes + j * Warps * 32 * kPutBytes, x[r][j], norm, scales[r], piece < limits[r]);
      }
    }
    return MPK_OK;
  }
  /* Loads the pieces `at`, `at` + Warps * 32, ... of a row that are below `pieces`; `from` is the address of the
   * first. */
  template <uint32_t Warps, uint32_t Count, uint32_t... J>
  static __device__ __forceinline__ void load_row(Piece (&x)[Count], uint64_t from, uint32_t at, uint32_t pieces, std::integer_sequence<uint32_t, J...>) {
    (load_global16_if<J * Warps * 32 * sizeof(Piece)>(x[J].words[0], x[J].words[1], x[J].words[2], x[J].words[3], from, at + J * Warps * 32 < pieces), ...);
  }

  /* Copies from memory to the rows' places, without registers. */
  __device__ __forceinline__ void copy(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to, uint32_t row_bytes) const {
    const Rows x = rows_of_x();
#pragma unroll 1
    for (Walk walk(context_.thread, rows, blocks * (16 / kPiece)); walk.row < rows; walk.next()) {
      const uint64_t from = x.at(first + walk.row) + first_block * kRowBlockBytes<X> + walk.at * sizeof(Piece);
      asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(to + walk.row * row_bytes + walk.at * sizeof(Piece))), "l"(from) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /* Issues all loads of a thread's batch, in at most 96 registers, before the first use. */
  __device__ __forceinline__ void put_wide(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to, uint32_t row_bytes) const {
    constexpr uint32_t kItemBytes = sizeof(Piece) * (Source == kSiluMul ? 2 : Parts) + (Source == kRmsNorm ? sizeof(NormPiece) : 0);
    constexpr uint32_t kBatch = 384 / kItemBytes < 16 ? 384 / kItemBytes : 16;
    const uint32_t first_piece = first_block * (16 / kPiece);
    const Rows source = rows_of_x();
    Walk walk(context_.thread, rows, blocks * (16 / kPiece));
#pragma unroll 1
    while (walk.row < rows) {
      Piece x[kBatch], up[Source == kSiluMul ? kBatch : 1];
      NormPiece norm[Source == kRmsNorm ? kBatch : 1];
      [[maybe_unused]] Piece others[kBatch][kOthers];
      Walk ahead = walk;
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        /* Registers that are written on only one path would stay alive through all loops. */
        x[j].clear();
        if constexpr (Source == kSiluMul) up[j].clear();
        if constexpr (Source == kRmsNorm) norm[j].clear();
        if constexpr (Parts > 1) clear_parts(others[j]);
        if (ahead.row < rows) {
          const uint32_t piece = first_piece + ahead.at;
          const uint64_t from = source.at(first + ahead.row) + piece * sizeof(Piece);
          x[j].load(from);
          if constexpr (Parts > 1) load_parts(others[j], from);
          if constexpr (Source == kSiluMul) up[j].load(from + k() * kNumberBytes<X>);
          if constexpr (Source == kRmsNorm) norm[j].load_generic(norm_ + piece * kNormPieceBytes);
        }
        ahead.next();
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const bool valid = walk.row < rows;
        const uint32_t address = shared_address(to) + walk.row * row_bytes + walk.at * kPutBytes;
        if constexpr (Parts > 1) add_parts(x[j], others[j]);
        if constexpr (Source == kRmsNorm) {
          put_normed(address, x[j], norm[j], scales_[valid ? walk.row : 0], valid);
        } else {
          float v[kPiece];
          x[j].values(v);
          if constexpr (Source == kSiluMul) {
            float other[kPiece];
            up[j].values(other);
            silu_mul<Weight>(v, other);
          }
          put_numbers<Weight>(address, v, valid);
        }
        walk.next();
      }
    }
  }

  /* For any K and any alignment. */
  __device__ __forceinline__ void put_narrow(uint32_t first, uint32_t rows, uint32_t first_block, uint32_t blocks, uint8_t* to,
                                             uint32_t row_bytes) const {
    const uint32_t columns = blocks * 16;
    const Rows x = rows_of_x();
    for (uint32_t i = context_.thread; i < rows * columns; i += kComputeThreads) {
      const uint32_t row = i / columns, column = i - row * columns, at = first_block * 16 + column;
      float v = 0.0f;
      if (at < k()) {
        const uint64_t from = x.at(first + row);
        v = number_of(from, at);
        if constexpr (Source == kRmsNorm) v = v * scales_[row] * load_as_f32(norm_, Norm, at);
        if constexpr (Source == kSiluMul) v = silu(v) * number_of(from, k() + at);
      }
      reinterpret_cast<typename Number<Weight>::Type*>(to + row * row_bytes)[column] = Number<Weight>::from_f32(v);
    }
  }

  Context& context_;
  uint32_t weight_;
  float *sums_, *scales_;
  const uint8_t* norm_ = nullptr; /* in global or shared memory */
  bool wide_;
};

}  // namespace gpu
}  // namespace mpk
