/* Stores the sums of two warpgroups that have shared the k of a tile of all tokens, 64 or 32 rows of the weight at a time. Two or four
 * warps have a part of every sum of the same 16 rows. Each of them adds up and stores its share of the tokens. So they need only a barrier
 * of their own. Each lane keeps the rows and tokens that the products give it: two neighbouring tokens of one row of the weight, and of the
 * row 8 below.
 *
 * Two warps: w and w + 4. Four warps (wide_narrow.cuh): w, w + 2, w + 4 and w + 6. The second and the fourth have their sums in the
 * second half of their registers. */
#pragma once

#include "gpu/push.cuh"
#include "gpu/wide_linear.cuh"

namespace mpk {
namespace gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <uint32_t Weight, uint32_t N, uint32_t Warps = 2>
class SharedSums {
  static constexpr uint32_t kSums = Warps == 2 ? N / 2 : N; /* of a lane */

 public:
  /* All compute threads. */
  __device__ __forceinline__ SharedSums(Context& context, uint32_t tokens)
      : context_(context), out_(context.output(0)), tokens_(tokens), own_(Warps == 2 ? context.warp / 4 : context.warp / 2), tile_(context.warp % kTiles),
        gated_(wide::params_of(*context.slot).gated != 0), adds_(wide::is_first(context) && wide::residual_of(context) != nullptr),
        wide_(wide::params_of(*context.slot).wide_output != 0),
        buffer_(shared_address(work_area()) + kPlaces * kPlaceBytes + tile_ * kBufferBytes) {}

  /* Stores part `part` of the tile: 64 rows, or 32 if four warps have them. */
  __device__ __forceinline__ void store(const float (&sums)[kSums], uint32_t part) {
    const uint32_t tile = part * kTiles + tile_; /* of 16 rows of the weight */
    /* Tiles in MPK_LAYOUT_WIDE are written whole. */
    if (!wide_ && tile * 16 >= context_.input(wide::kWeight).dims[0]) return;
    float bias[2];
    wide::load_bias(context_, gated_, tile, bias);
    if constexpr (Warps == 2) {
#pragma unroll
      for (uint32_t from = 0; from < kKept; from += kAtOnce) {
        Block blocks[kAtOnce];
        add_up(blocks, sums, from);
        finish(blocks, from, tile, bias);
      }
    } else {
      Block blocks[1];
      add_up_four(blocks[0], sums);
      /* With 16 tokens, two of the warps have none. */
      if (own_ < kBlocks) finish(blocks, 0, tile, bias);
    }
  }

 private:
  /* A lane's sums of 8 tokens and 16 rows: two tokens of its first row, the same two of its second row. */
  struct Block {
    float of[4];
  };
  static_assert(Warps == 2 || (Warps == 4 && (N == 16 || N == 32)), "the warps' shares of the tokens");
  static constexpr uint32_t kTiles = 8 / Warps;              /* of 16 rows that the warps have together */
  static constexpr uint32_t kBlocks = N / 8;
  static constexpr uint32_t kKept = Warps == 2 ? kBlocks / 2 : 1; /* blocks that a warp stores */
  static constexpr uint32_t kAtOnce = kKept < 2 ? kKept : 2;      /* as many as the buffer of two warps holds */
  static constexpr uint32_t kHalfBytes = kAtOnce * 512;           /* what one of two warps gives the other */
  static constexpr uint32_t kBufferBytes = Warps == 2 ? 2 * kHalfBytes : 4 * 1024;
  static_assert(kTiles * kBufferBytes <= kComputeWarps * kTurnBytes, "the buffers");

  /* The first token of kept block `number`. */
  __device__ __forceinline__ uint32_t first_token(uint32_t number) const { return (own_ * kKept + number) * 8; }
  /* The lane's tokens are this one and the next one. */
  __device__ __forceinline__ uint32_t token_of(uint32_t first) const { return first + context_.lane % 4 * 2; }
  /* The lane's first row of a tile. */
  __device__ __forceinline__ uint32_t row_of(uint32_t tile) const { return tile * 16 + context_.lane / 4; }

  /* Barrier of the warps with the same rows. Neighbouring warps use the same barriers in other tasks (wide::pair_sync). */
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0,%1;" ::"r"(4 + tile_), "n"(Warps * 32) : "memory"); }

  /* Adds bias and residual to the sums of kAtOnce kept blocks from `from` on, and stores them. */
  __device__ __forceinline__ void finish(Block (&blocks)[kAtOnce], uint32_t from, uint32_t tile, const float (&bias)[2]) const {
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) blocks[b].of[i] += bias[i / 2];
    if (adds_) add_residual(blocks, from, tile);
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b) {
      const uint32_t token = first_token(from + b);
      if (token >= tokens_) break;
      if (gated_) store_gated(blocks[b], token, tile);
      else if (out_.dtype == MPK_F32) store_floats(blocks[b], token, tile);
      else if (out_.dtype == MPK_F32_FLAGGED) push(blocks[b], token, tile);
      else store_rows(blocks[b], token, tile);
    }
  }

  /* Four warps: all parts of block `own_`, in the order of the warps. Two blocks at a time go through the buffer. */
  __device__ __forceinline__ void add_up_four(Block& block, const float (&sums)[kSums]) {
    const bool lower = own_ % 2 != 0; /* its sums are in the second half */
    const uint32_t at = buffer_ + context_.lane * 16;
#pragma unroll
    for (uint32_t from = 0; from < kBlocks; from += 2) {
      /* Everybody has read the blocks before. */
      if (used_) sync();
      used_ = true;
#pragma unroll
      for (uint32_t b = 0; b < 2; ++b) {
        float given[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) given[i] = lower ? sums[(kBlocks + from + b) * 4 + i] : sums[(from + b) * 4 + i];
        store_shared16(at + (own_ * 2 + b) * 512, given);
      }
      sync();
      if (own_ / 2 != from / 2) continue;
#pragma unroll
      for (uint32_t warp = 0; warp < 4; ++warp) {
        const uint4 part = load_shared16(at + (warp * 2 + own_ % 2) * 512);
        const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) block.of[i] = warp == 0 ? __uint_as_float(words[i]) : block.of[i] + __uint_as_float(words[i]);
      }
    }
  }

  /* Two warps: the sums of kAtOnce kept blocks from `from` on, the first warpgroup's plus the second's. */
  __device__ __forceinline__ void add_up(Block (&blocks)[kAtOnce], const float (&sums)[kSums], uint32_t from) {
    const bool is_second = own_ != 0;
    const uint32_t mine = buffer_ + (is_second ? kHalfBytes : 0) + context_.lane * 16, others = buffer_ + (is_second ? 0 : kHalfBytes) + context_.lane * 16;
    /* The other warp has read what this warp gave it before. */
    if (used_) sync();
    used_ = true;
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b) {
      float given[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float first = sums[(from + b) * 4 + i], second = sums[(kKept + from + b) * 4 + i];
        given[i] = is_second ? first : second;
        blocks[b].of[i] = is_second ? second : first;
      }
      store_shared16(mine + b * 512, given);
    }
    sync();
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b) {
      const uint4 other = load_shared16(others + b * 512);
      const uint32_t words[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) blocks[b].of[i] += __uint_as_float(words[i]);
    }
  }

  /* Adds the residual, which may be two summands (three dimensions). All loads run at the same time. */
  __device__ __forceinline__ void add_residual(Block (&blocks)[kAtOnce], uint32_t from, uint32_t tile) const {
    const mpk_operand& residual = *wide::residual_of(context_);
    const uint32_t dim = residual.ndim - 2, columns = out_.dims[out_.ndim - 1], row = row_of(tile);
    const uint64_t apart = dim != 0 ? static_cast<uint64_t>(residual.strides[0]) * 4 : 0;
    Block first[kAtOnce], second[kAtOnce];
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t token = token_of(first_token(from + b)) + i % 2, column = row + i / 2 * 8;
        const uint64_t at = residual.addr + (static_cast<uint64_t>(token) * residual.strides[dim] + column) * 4;
        const bool used = token < tokens_ && column < columns;
        load_global4_if<0>(first[b].of[i], at, used);
        load_global4_if<0>(second[b].of[i], at + apart, used && apart != 0);
      }
#pragma unroll
    for (uint32_t b = 0; b < kAtOnce; ++b)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) blocks[b].of[i] += first[b].of[i] + second[b].of[i];
  }

  /* Row `token` of the output. With two summands (three dimensions), the view has one of them. */
  __device__ __forceinline__ uint64_t row_at(uint32_t token, uint32_t bytes) const {
    return out_.addr + static_cast<uint64_t>(token) * out_.strides[out_.ndim - 2] * bytes;
  }

  /* 8 columns are a sector of 32 bytes. */
  __device__ __forceinline__ void store_floats(const Block& block, uint32_t first, uint32_t tile) const {
    const uint32_t columns = out_.dims[out_.ndim - 1], row = row_of(tile);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t token = token_of(first) + i % 2, column = row + i / 2 * 8;
      store_global4_if<0>(row_at(token, 4) + column * 4, block.of[i], token < tokens_ && column < columns);
    }
  }

  /* All lanes of a warp. 8 columns are adjacent words. */
  __device__ __forceinline__ void push(const Block& block, uint32_t first, uint32_t tile) const {
    const uint32_t columns = out_.dims[out_.ndim - 1], row = row_of(tile);
#pragma unroll 1
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t token = token_of(first) + i % 2, column = row + i / 2 * 8;
      const float value = i == 0 ? block.of[0] : i == 1 ? block.of[1] : i == 2 ? block.of[2] : block.of[3];
      if (token < tokens_ && column < columns) push_flagged(context_, reinterpret_cast<uint64_t*>(row_at(token, 8)) + column, value);
      __syncwarp();
    }
  }

  /* All lanes of a warp. A lane has a value of two tokens and one column, and lane ^ 4 has those of a neighbouring column. An even column's
   * lane gets both columns of the first token, an odd column's lane those of the second one. */
  __device__ __forceinline__ uint32_t exchange(float first, float second) const {
    const bool odd = (context_.lane & 4u) != 0;
    const float other = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 4);
    return odd ? pair_of<Weight>(other, second) : pair_of<Weight>(first, other);
  }
  /* The token of which `exchange` has returned a pair. */
  __device__ __forceinline__ uint32_t token_of_pair(uint32_t first) const { return token_of(first) + context_.lane / 4 % 2; }

  /* Stores two columns of a row, from an even `column` on. */
  __device__ __forceinline__ void store_pair(uint32_t token, uint32_t column, uint32_t columns, uint32_t pair) const {
    if (token >= tokens_ || column >= columns) return;
    const uint64_t row = row_at(token, 2);
    uint16_t* const to = reinterpret_cast<uint16_t*>(row) + column;
    if ((row & 3) == 0 && column + 1 < columns) {
      *reinterpret_cast<uint32_t*>(to) = pair;
    } else {
      to[0] = static_cast<uint16_t>(pair);
      if (column + 1 < columns) to[1] = static_cast<uint16_t>(pair >> 16);
    }
  }

  __device__ __forceinline__ void store_rows(const Block& block, uint32_t first, uint32_t tile) const {
    const uint32_t columns = out_.dims[out_.ndim - 1], column = row_of(tile) / 2 * 2, token = token_of_pair(first);
    const uint32_t upper = exchange(block.of[0], block.of[1]), lower = exchange(block.of[2], block.of[3]);
    store_pair(token, column, columns, upper);
    store_pair(token, column + 8, columns, lower);
  }

  /* A tile has 8 gates and then their ups, so a lane has both. */
  __device__ __forceinline__ void store_gated(const Block& block, uint32_t first, uint32_t tile) const {
    const uint32_t columns = context_.input(wide::kWeight).dims[0] / 2, own = tile * MPK_PAIR_ROWS + context_.lane / 4;
    float value[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float gate = rounded_to(Weight, block.of[i]), up = rounded_to(Weight, block.of[2 + i]);
      value[i] = own < columns ? up * silu(gate) : 0.0f;
    }
    const uint32_t pair = exchange(value[0], value[1]), column = own / 2 * 2, token = token_of_pair(first);
    if (!wide_) {
      store_pair(token, column, out_.dims[1], pair);
      return;
    }
    /* Column tiles are whole, and the view's first row is a multiple of 8. The weight's last rows may be fewer than the task's. */
    if (token >= tokens_ || column / MPK_WIDE_NARROW >= out_.dims[1]) return;
    const uint32_t in_tile = column % MPK_WIDE_NARROW; /* 16 columns */
    const uint64_t to = out_.addr + static_cast<uint64_t>(column / MPK_WIDE_NARROW) * out_.strides[1] * 2 + token * kNarrowBytes +
                        narrow_piece(token, in_tile / 2 % 2) + in_tile / 4 * 4;
    *reinterpret_cast<uint32_t*>(to) = pair;
  }

  Context& context_;
  const mpk_operand& out_;
  const uint32_t tokens_;
  const uint32_t own_;  /* number of the warp among those with the same rows */
  const uint32_t tile_; /* of the warp */
  const bool gated_, adds_, wide_; /* has a residual; the output is in MPK_LAYOUT_WIDE */
  const uint32_t buffer_;
  bool used_ = false;
};

#endif

}  // namespace gpu
}  // namespace mpk
