/* Norm and rope of queries and new keys, and new rows of the cache. */
#pragma once

#include "tasks/attention/gpu_mma.cuh"
#include "tasks/attention/gpu_share.cuh"

namespace mpk {
namespace gpu {
namespace attention {

/* The warps of a head process a list of rows in turn: `appended` new keys, then the queries from `first_query` on. A
 * warp processes several at a time, so that their loads overlap. Each of the `Heads` heads has the same number of
 * warps.
 *
 * The usual case, aligned rows of a 2-byte type, has shorter code of its own (prepare_aligned): a few lanes share a row, 16 bytes at a
 * time. On an H200, 8B takes 1.0 % less with it at batch 128, 0.3 % at batch 8, and the same at batch 1. */
template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, bool QkNorm, uint32_t Heads>
class Rows {
  using Shares = Share<Dtype, Dim, PageSize>;
  using Element = typename Shares::Element;
  using Layout = typename Shares::Layout;
  static constexpr uint32_t kHalf = Dim / 2;
  static constexpr uint32_t kPairs = (kHalf + 31) / 32;
  static constexpr uint32_t kBatch = Dim > 128 ? 1 : 2;
  static constexpr uint32_t kWarps = kComputeWarps / Heads, kThreads = kWarps * 32;
  /* Lanes that share a row: each has 8 elements of its first half, and the same of the second. Rows of a warp at a time. */
  static constexpr uint32_t kLanes = Dim >= 16 ? Dim / 16 : 1, kAtOnce = 32 / kLanes;

 public:
  /* Whether there is code for aligned rows. */
  static constexpr bool kAligned = sizeof(Element) == 2 && Dim >= 32 && (Dim & (Dim - 1)) == 0;

  __device__ explicit Rows(const Shares& share) : share_(share) {}

  /* Sets the list of a pass. */
  __device__ __forceinline__ void start(uint32_t appended, uint32_t first_query, uint32_t queries) {
    appended_ = appended;
    first_query_ = first_query;
    count_ = appended + queries;
  }

  /* Before the task's events: prefetches rope and norm weights of the warp's first rows. */
  __device__ __forceinline__ void hint(const Context& context) const {
    const uint32_t at = context.warp % kWarps + context.lane / 4 % kBatch * kWarps;
    if (at < count_)
      for (uint32_t d = context.lane % 4 * 32; d < Dim; d += 128) prefetch(row_of<float>(context.input(4), position_at(at)) + d);
    if (QkNorm && context.warp == 0 && context.lane < 2)
      for (uint32_t d = 0; d < Dim; d += 128 / sizeof(Element)) prefetch(reinterpret_cast<const Element*>(context.input(5 + context.lane).addr) + d);
  }

  /* Queries go to shared memory at `queries`, tile by tile in the order of `Tile`. Keys go to the cache and, if they
   * are kept, to shared memory. */
  template <class Tile>
  __device__ __forceinline__ void prepare(const Context& context, float eps, Element* queries) const {
    float query_weight[2 * kPairs], key_weight[2 * kPairs];
    if constexpr (QkNorm) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * kPairs; ++i) {
        const uint32_t d = dim_at(context.lane, i);
        query_weight[i] = d < Dim ? Number<Dtype>::to_f32(reinterpret_cast<const Element*>(context.input(5).addr)[d]) : 0.0f;
        key_weight[i] = d < Dim ? Number<Dtype>::to_f32(reinterpret_cast<const Element*>(context.input(6).addr)[d]) : 0.0f;
      }
    }
#pragma unroll 1
    for (uint32_t begin = context.warp % kWarps; begin < count_; begin += kWarps * kBatch) {
      float x[kBatch][2 * kPairs] = {}, turn[kBatch][2 * kPairs] = {}; /* see nvshmem_copy/gpu.cuh */
      uint32_t pages[kBatch]; /* of new keys */
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t at = begin + b * kWarps;
        pages[b] = kNoRow;
        if (at >= count_) continue;
        if (at < appended_) pages[b] = share_.page_at(share_.first_new + at, share_.last);
        const Element* source = source_of(context, at);
        const float* rope = row_of<float>(context.input(4), position_at(at));
#pragma unroll
        for (uint32_t i = 0; i < 2 * kPairs; ++i) {
          const uint32_t d = dim_at(context.lane, i);
          x[b][i] = d < Dim ? Number<Dtype>::to_f32(source[d]) : 0.0f;
          turn[b][i] = d < Dim ? rope[d] : 0.0f;
        }
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t at = begin + b * kWarps;
        if (at >= count_) continue;
        if constexpr (QkNorm) {
          float squares = 0.0f;
#pragma unroll
          for (uint32_t i = 0; i < 2 * kPairs; ++i) squares = fmaf(x[b][i], x[b][i], squares);
#pragma unroll
          for (uint32_t s = 16; s > 0; s /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, s);
          const float inverse = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(Dim), eps));
#pragma unroll
          for (uint32_t i = 0; i < 2 * kPairs; ++i) x[b][i] = x[b][i] * inverse * (at < appended_ ? key_weight[i] : query_weight[i]);
        }
        finish<Tile>(context, queries, at, pages[b], x[b], turn[b]);
      }
    }
  }

  /* Whether prepare_aligned may be called. */
  static __device__ __forceinline__ bool aligned(const Context& context) {
    uint64_t all = context.input(4).addr | static_cast<uint64_t>(context.input(4).strides[0]) * 4;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) all |= context.input(i).addr | static_cast<uint64_t>(context.input(i).strides[0]) * sizeof(Element);
    if constexpr (QkNorm) all |= context.input(5).addr | context.input(6).addr;
    return (all & 15) == 0;
  }

  /* Does what append_values and then `prepare` do. The list has the new keys, the new values, and the queries. */
  template <class Tile>
  __device__ __forceinline__ void prepare_aligned(const Context& context, float eps, Element* queries) const {
    const uint32_t of_keys = appended_, of_new = 2 * appended_, all = appended_ + count_;
    const uint32_t chunk = context.lane % kLanes * 8; /* the lane's first element in each half */
#pragma unroll 1
    for (uint32_t begin = context.warp % kWarps; begin < all; begin += kWarps * kAtOnce) {
      const uint32_t wanted = begin + context.lane / kLanes * kWarps;
      const bool valid = context.lane < kAtOnce * kLanes && wanted < all;
      const uint32_t item = valid ? wanted : begin; /* the other lanes load what is there, and store nothing */
      const bool is_new = item < of_new, is_value = is_new && item >= of_keys;
      const uint32_t number = is_new ? item - (is_value ? of_keys : 0) : item - of_new; /* among the new rows, or the pass's queries */
      const uint32_t query = first_query_ + number, of_query = quotient(query, share_.heads);
      const uint32_t position = is_new ? share_.first_new + number : share_.context + of_query;
      const uint32_t row = share_.first_row + (is_new ? position - share_.context : of_query);
      const uint32_t head = is_new ? share_.in_views : share_.in_views * share_.heads + query - of_query * share_.heads;
      const uint32_t page = share_.page_at(position, is_new && valid ? share_.last : 0);
      const Element* const from = row_of<const Element>(context.input(is_value ? 2 : is_new ? 1 : 0), row) + head * Dim + chunk;
      const float* const rope = row_of<const float>(context.input(4), position) + chunk;
      uint4 raw[2], weights[2] = {};
      float4 turn[2][2]; /* cosines, sines */
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        raw[h] = *reinterpret_cast<const uint4*>(from + h * kHalf);
        if constexpr (QkNorm) weights[h] = reinterpret_cast<const uint4*>(context.input(is_new ? 6 : 5).addr)[(chunk + h * kHalf) / 8];
#pragma unroll
        for (uint32_t part = 0; part < 2; ++part) turn[h][part] = *reinterpret_cast<const float4*>(rope + h * kHalf + part * 4);
      }
      float x[2][8];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) unpack(x[h], raw[h]);
      if constexpr (QkNorm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 16; ++i) squares = fmaf(x[i / 8][i % 8], x[i / 8][i % 8], squares);
#pragma unroll
        for (uint32_t s = kLanes / 2; s > 0; s /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, s);
        const float inverse = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(Dim), eps));
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          float weight[8];
          unpack(weight, weights[h]);
#pragma unroll
          for (uint32_t i = 0; i < 8; ++i) x[h][i] = x[h][i] * inverse * weight[i];
        }
      }
      uint32_t words[2][4];
#pragma unroll
      for (uint32_t pair = 0; pair < 4; ++pair) {
        float low[2], high[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t at = 2 * pair + i;
          const float cosine = (&turn[0][at / 4].x)[at % 4], sine = (&turn[1][at / 4].x)[at % 4];
          low[i] = fmaf(x[0][at], cosine, -(x[1][at] * sine));
          high[i] = fmaf(x[1][at], cosine, x[0][at] * sine);
        }
        words[0][pair] = is_value ? (&raw[0].x)[pair] : packed<Dtype>(low[0], low[1]);
        words[1][pair] = is_value ? (&raw[1].x)[pair] : packed<Dtype>(high[0], high[1]);
      }
      if (!valid) continue;
      if (is_new) {
        const uint32_t in_cache = share_.row_in(page, position);
        Element* const kept = (is_value ? share_.new_values() : share_.new_keys()) + Shares::kept_row(number);
        Element* const cached = is_value ? share_.value(in_cache) : share_.key(in_cache);
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const uint4 piece = {words[h][0], words[h][1], words[h][2], words[h][3]};
          const uint32_t place = Layout::element(chunk + h * kHalf, position);
          if (share_.kept()) *reinterpret_cast<uint4*>(kept + place) = piece;
          if (in_cache != kNoRow) *reinterpret_cast<uint4*>(cached + place) = piece;
        }
      } else {
        Element* const tile = queries + number / Tile::kQueries * Tile::kQueryElements;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) /* adjacent pairs are adjacent in a tile */
          *reinterpret_cast<uint32_t*>(tile + Tile::query_index(number % Tile::kQueries, chunk + i / 4 * kHalf + i % 4 * 2)) = words[i / 4][i % 4];
      }
    }
  }

  /* Copies the new values to the cache and, if they are kept, to shared memory. */
  __device__ __forceinline__ void append_values(const Context& context) const {
    const mpk_operand& view = context.input(2);
    constexpr uint32_t kWide = Dim * sizeof(Element) % 16 == 0 ? 16 / sizeof(Element) : 1;
    const bool wide = ((view.addr | static_cast<uint64_t>(view.strides[0]) * sizeof(Element)) & 15) == 0;
    if (kWide > 1 && wide) copy_values<kWide, uint4>(context, view);
    else copy_values<1, Element>(context, view);
  }

 private:
  static __device__ __forceinline__ void unpack(float (&x)[8], const uint4& piece) {
    const Element* const elements = reinterpret_cast<const Element*>(&piece);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x[i] = Number<Dtype>::to_f32(elements[i]);
  }

  /* Element i of a lane: first halves of the pairs, then second halves; Dim if there is none. */
  static __device__ __forceinline__ uint32_t dim_at(uint32_t lane, uint32_t i) {
    const uint32_t pair = lane + i % kPairs * 32;
    return pair < kHalf ? pair + i / kPairs * kHalf : Dim;
  }

  __device__ __forceinline__ uint32_t position_at(uint32_t at) const {
    return at < appended_ ? share_.first_new + at : share_.position_of(first_query_ + at - appended_);
  }

  __device__ __forceinline__ const Element* source_of(const Context& context, uint32_t at) const {
    if (at < appended_) {
      const uint32_t row = share_.first_row + share_.first_new - share_.context + at;
      return row_of<const Element>(context.input(1), row) + share_.in_views * Dim;
    }
    const uint32_t query = first_query_ + at - appended_;
    return row_of<const Element>(context.input(0), share_.first_row + query / share_.heads) + (share_.in_views * share_.heads + query % share_.heads) * Dim;
  }

  /* `turn`: the cosines of the pairs, then the sines. */
  template <class Tile>
  __device__ __forceinline__ void finish(const Context& context, Element* queries, uint32_t at, uint32_t page,
                                         const float (&x)[2 * kPairs], const float (&turn)[2 * kPairs]) const {
    const bool is_key = at < appended_;
    const uint32_t q = (at - appended_) % Tile::kQueries;
    Element* tile = queries + (at - appended_) / Tile::kQueries * Tile::kQueryElements;
    Element* kept = share_.new_keys() + Shares::kept_row(at);
    const uint32_t position = share_.first_new + at, row = share_.row_in(page, position);
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      const uint32_t pair = context.lane + 32 * i;
      if (pair >= kHalf) continue;
      const float first = x[i], second = x[kPairs + i], cosine = turn[i], sine = turn[kPairs + i];
      const Element rounded[2] = {Number<Dtype>::from_f32(fmaf(first, cosine, -(second * sine))),
                                  Number<Dtype>::from_f32(fmaf(second, cosine, first * sine))};
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t d = pair + h * kHalf;
        if (!is_key) tile[Tile::query_index(q, d)] = rounded[h];
        const uint32_t place = Layout::element(d, position);
        if (is_key && share_.kept()) kept[place] = rounded[h];
        if (row != kNoRow) share_.key(row)[place] = rounded[h];
      }
    }
    /* The products cover whole chunks of 32. */
    if (Dim % 32 != 0 && !is_key && Dim + context.lane < Shares::kPadded)
      tile[Tile::query_index(q, Dim + context.lane)] = Number<Dtype>::from_f32(0.0f);
  }

  /* Starts with the last warps, because the first ones have rows to prepare. */
  template <uint32_t Wide, typename Piece>
  __device__ __forceinline__ void copy_values(const Context& context, const mpk_operand& view) const {
    constexpr uint32_t kPieces = Dim / Wide;
    for (uint32_t i = kThreads - 1 - context.thread % kThreads; i < share_.num_new * kPieces; i += kThreads) {
      const uint32_t at = i / kPieces, d = i % kPieces * Wide;
      const uint32_t row = share_.first_row + share_.first_new - share_.context + at;
      const uint32_t to = share_.row_at(share_.first_new + at, share_.last);
      const Piece piece = *reinterpret_cast<const Piece*>(row_of<const Element>(view, row) + share_.in_views * Dim + d);
      const uint32_t place = Layout::element(d, share_.first_new + at);
      if (share_.kept()) *reinterpret_cast<Piece*>(share_.new_values() + Shares::kept_row(at) + place) = piece;
      if (to != kNoRow) *reinterpret_cast<Piece*>(share_.value(to) + place) = piece;
    }
  }

  const Shares& share_;
  uint32_t appended_ = 0, first_query_ = 0, count_ = 0;
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
