/* Attention of a warp on the tensor cores, for 2-byte types: a tile of 8 x NT queries against units of 16 keys.
 *
 * Keys and values go from memory to registers, 16 bytes per load, and never through shared memory. The two products are
 * (mma.m16n8k16, lane = 4 g + t)
 *
 *   scores [16 queries x 8 keys] = Q K^T, twice,      output^T [head_dim x 8 queries] += V^T [head_dim x 16 keys] P^T,
 *
 * and dimensions are permuted to the order in which a 16-byte load brings them:
 * - K, dimensions in chunks of 32: lane (g, t) loads dimensions 8t .. 8t+7 of keys g and 8+g. Words 2s and 2s+1 of a load
 *   together form a right operand of step s: k = 2t, 2t+1 and k = 2t+8, 2t+9. Q is in shared memory as fragments of the
 *   left operand in this order (query_index).
 * - V, dimensions in chunks of 64: lane (g, t) loads dimensions 8g .. 8g+7 of keys 2t, 2t+1, 2t+8, 2t+9. Row g of
 *   tile j is dimension 8g + 2j, row g+8 is 8g + 2j + 1; byte permutations form pairs of keys. So a lane ends with 8
 *   adjacent outputs.
 * The scores' accumulators hold keys 2t, 2t+1 of queries g and g+8, which is exactly the layout of the second product's right
 * operand. Each probability enters that product as a sum of two numbers of the 2-byte type, so its rounding does not matter. */
#pragma once

#include <utility>

#include "tasks/attention/gpu_share.cuh"

namespace mpk {
namespace gpu {
namespace attention {

template <uint32_t Dtype>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (Dtype == MPK_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* What remains of the two numbers after `pair` = packed(low, high). */
template <uint32_t Dtype>
__device__ __forceinline__ uint32_t packed_rest(uint32_t pair, float low, float high) {
  const float2 kept = Dtype == MPK_BF16 ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair))
                                        : __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return packed<Dtype>(low - kept.x, high - kept.y);
}

template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, uint32_t NT, bool Window>
class MmaTile {
  using Shares = Share<Dtype, Dim, PageSize>;
  using Element = typename Shares::Element;
  using Layout = typename Shares::Layout;

 protected:
  static constexpr uint32_t kKeyChunks = (Dim + 31) / 32;
  static constexpr uint32_t kValueChunks = (Dim + 63) / 64;

 private:
  /* Keys and values of the next unit are in flight while this unit is computed. A larger tile has no registers for
   * that: there the values replace the keys, and the next keys replace the values. */
  using ValueChunks = std::make_integer_sequence<uint32_t, kValueChunks>;
  static constexpr bool kHoldValues = Dim * NT <= 128;

 public:
  static constexpr uint32_t kQueries = 8 * NT;
  static constexpr uint32_t kKeys = 16;
  /* Elements of a tile in shared memory. */
  static constexpr uint32_t kQueryElements = 16 * Shares::kPadded;

  /* Index of element `d` of a tile's query `q`: for each step of 16 dimensions, the lanes' fragments are adjacent.
   * Rows of the products without a query may hold anything, because rows, and columns of the second product, do not
   * mix. */
  static __device__ __forceinline__ uint32_t query_index(uint32_t q, uint32_t d) {
    const uint32_t step = d / 32 * 2 + d % 8 / 4, owner = q % 8 * 4 + d % 32 / 8;
    return (step * 32 + owner) * 8 + (d % 4 / 2 * 2 + q / 8) * 2 + d % 2;
  }

  __device__ MmaTile(const Shares& share, uint32_t lane) : share_(share), lane_(lane), g_(lane / 4), t_(lane % 4) {}

  /* `queries`: the tile in shared memory. `last`: end of the keys that any of its queries sees. */
  __device__ __forceinline__ void start(const Element* queries, uint32_t first_query, uint32_t last) {
    queries_ = queries;
    first_query_ = first_query;
    last_ = last;
  }

  /* Loads the keys and values of the unit at `begin` whose positions are below `limit`; zeros for the others. */
  __device__ __forceinline__ void fetch(uint32_t begin, uint32_t limit) {
    row_ = row_at(begin, limit);
    uint32_t of_keys[2], of_values[4];
    key_rows(of_keys, row_);
    if constexpr (kHoldValues) value_rows(of_values, row_);
    load_keys(of_keys);
    if constexpr (kHoldValues) load_values(of_values, ValueChunks());
  }
  /* The rest of a unit whose part below `from` was brought by `fetch`: new rows, after the barrier that follows
   * their writers. */
  __device__ __forceinline__ void fetch_rest(uint32_t begin, uint32_t from) {
    if (begin + kKeys <= from || begin >= last_) return;
    if (!share_.kept()) return fetch(begin, last_);
    row_ = row_at(begin, last_);
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h)
#pragma unroll
      for (uint32_t c = 0; c < kKeyChunks; ++c) load_kept(keys_[h][c], share_.new_keys(), begin + g_ + 8 * h, from, 32 * c + 8 * t_);
    if constexpr (kHoldValues) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
        for (uint32_t c = 0; c < kValueChunks; ++c)
          load_kept(values_[c][i], share_.new_values(), begin + 2 * t_ + i % 2 + i / 2 * 8, from, 64 * c + 8 * g_);
    }
  }

  /* Computes all units from `begin`, which has been fetched, to the end, `step` positions apart. */
  __device__ __forceinline__ void run(uint32_t begin, uint32_t step) {
    clear();
    if (begin >= last_) return;
    const uint32_t all_see = share_.keys_of(first_query_, last_);
    uint32_t next_page = share_.page_at(begin + step + lane_ % kKeys, last_);
    for (;;) {
      const bool more = begin + step < last_;
      const uint32_t next = share_.row_in(next_page, begin + step + lane_ % kKeys);
      next_page = share_.page_at(begin + 2 * step + lane_ % kKeys, last_);
      float s[2][4];
      scores(s);
      if constexpr (kHoldValues) {
        if (more) fetch_keys(next);
      } else {
        fetch_values(row_);
      }
      probabilities(begin, all_see, s);
      add_values(s);
      if (!more) return;
      if constexpr (kHoldValues) fetch_values(next);
      else fetch_keys(next);
      row_ = next;
      begin += step;
    }
  }

  /* Stores this warp's results in shared memory: `out` has kQueries rows of kOutPitch, `state` the maximum and sum
   * of each. */
  __device__ __forceinline__ void store(float* out, float* state) {
    store_state(state);
#pragma unroll
    for (uint32_t n = 0; n < NT; ++n) {
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e)
#pragma unroll
        for (uint32_t c = 0; c < kValueChunks; ++c)
#pragma unroll
          for (uint32_t j = 0; j < 4; j += 2) {
            const float4 v = {out_[4 * c + j][n][e], out_[4 * c + j][n][2 + e], out_[4 * c + j + 1][n][e], out_[4 * c + j + 1][n][2 + e]};
            *reinterpret_cast<float4*>(out + (8 * n + 2 * t_ + e) * Shares::kOutPitch + 64 * c + 8 * g_ + 2 * j) = v;
          }
    }
  }

 protected:
  __device__ __forceinline__ void store_state(float* state) const {
#pragma unroll
    for (uint32_t n = 0; n < NT; ++n) {
      float sum = sum_[n];
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
      if (t_ == 0) {
        state[2 * (8 * n + g_)] = max_[n];
        state[2 * (8 * n + g_) + 1] = sum;
      }
    }
  }

  /* Resets the state to no keys. */
  __device__ __forceinline__ void clear() {
    if constexpr (Window) all_from_ = share_.first_key(first_query_ + kQueries - 1);
#pragma unroll
    for (uint32_t n = 0; n < NT; ++n) {
      limit_[n] = share_.keys_of(first_query_ + 8 * n + g_, last_);
      if constexpr (Window) from_[n] = share_.first_key(first_query_ + 8 * n + g_);
      max_[n] = -INFINITY;
      sum_[n] = 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < kValueChunks * 4; ++i)
#pragma unroll
      for (uint32_t n = 0; n < NT; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) out_[i][n][e] = 0.0f;
  }

  /* The cache rows of the unit's keys, starting at `begin`: lane i (and i + 16) has the row of key i. */
  __device__ __forceinline__ uint32_t row_at(uint32_t begin, uint32_t limit) {
    return share_.row_at(begin + lane_ % kKeys, limit);
  }

  /* Elements d + Offset .. d + Offset + 7 of a row; `from` points to its element d, of the first 64. Zeros past the row's end, and if it
   * is not valid. */
  template <uint32_t Offset>
  static __device__ __forceinline__ void load8(uint4& to, const Element* from, bool valid, uint32_t d) {
    if constexpr (Dim % 8 == 0) {
      const bool inside = valid && (Offset + (Dim % 64 == 0 ? 63 : 31) < Dim || d + Offset < Dim);
      constexpr uint32_t kAt = Layout::kBlocks ? Offset / 64 * Layout::kNext64 + Offset % 64 : Offset;
      load_global16_if<kAt * 2>(to.x, to.y, to.z, to.w, reinterpret_cast<uint64_t>(from), inside);
    } else {
      load2<Offset>(to.x, from, valid && d + Offset < Dim);
      load2<Offset + 2>(to.y, from, valid && d + Offset + 2 < Dim);
      load2<Offset + 4>(to.z, from, valid && d + Offset + 4 < Dim);
      load2<Offset + 6>(to.w, from, valid && d + Offset + 6 < Dim);
    }
  }
  template <uint32_t Offset>
  static __device__ __forceinline__ void load2(uint32_t& to, const Element* from, bool valid) {
    asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; mov.u32 %0,0; @p ld.global.u32 %0,[%1+%3];}"
                 : "=&r"(to) : "l"(from), "r"(static_cast<uint32_t>(valid)), "n"(Offset * 2));
  }
  /* From the kept rows, if `position` is one of them. Nothing may be read past the end of a row of an odd size. */
  __device__ __forceinline__ void load_kept(uint4& to, const Element* kept, uint32_t position, uint32_t from, uint32_t d) {
    if (position < from || position >= last_ || d >= Dim) return;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(kept + Shares::kept_row(position - share_.first_new) + Layout::element(d, position));
    if constexpr (Dim % 8 == 0) {
      to = *reinterpret_cast<const uint4*>(words);
    } else {
      to.x = words[0];
      if (d + 2 < Dim) to.y = words[1];
      if (d + 4 < Dim) to.z = words[2];
      if (d + 6 < Dim) to.w = words[3];
    }
  }

  /* Shuffles come before all loads: ptxas may put a path for diverged warps next to each shuffle, and where the paths
   * meet again it would move the loaded data. */
  __device__ __forceinline__ void key_rows(uint32_t (&rows)[2], uint32_t row) const {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) rows[j] = __shfl_sync(0xFFFFFFFFu, row, g_ + 8 * j);
  }
  __device__ __forceinline__ void load_keys(const uint32_t (&rows)[2]) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t flipped = Layout::flipped(rows[j]);
      /* In a permuted row, chunks of 32 may have changed places in pairs. */
      const Element* const own = share_.key(rows[j]) + ((8 * t_) ^ (flipped & 24));
      load_chunks(keys_[j], own + (flipped & 32), own - (flipped & 32), rows[j] != kNoRow, std::make_integer_sequence<uint32_t, kKeyChunks>());
    }
  }
  template <uint32_t... Chunk>
  __device__ __forceinline__ void load_chunks(uint4 (&to)[kKeyChunks], const Element* even, const Element* odd, bool valid,
                                              std::integer_sequence<uint32_t, Chunk...>) {
    (load8<32 * Chunk>(to[Chunk], Chunk % 2 == 0 ? even : odd, valid, 8 * t_), ...);
  }

  /* The rows of the unit's keys 2t, 2t+1, 2t+8, 2t+9. */
  __device__ __forceinline__ void value_rows(uint32_t (&rows)[4], uint32_t row) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) rows[i] = __shfl_sync(0xFFFFFFFFu, row, 2 * t_ + i % 2 + i / 2 * 8);
  }
  template <uint32_t... Chunk>
  __device__ __forceinline__ void load_values(const uint32_t (&rows)[4], std::integer_sequence<uint32_t, Chunk...>) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      (load8<64 * Chunk>(values_[Chunk][i], share_.value(rows[i]) + ((8 * g_) ^ Layout::flipped(rows[i])), rows[i] != kNoRow, 8 * g_), ...);
  }

  __device__ __forceinline__ void fetch_keys(uint32_t row) {
    uint32_t rows[2];
    key_rows(rows, row);
    load_keys(rows);
  }
  __device__ __forceinline__ void fetch_values(uint32_t row) {
    uint32_t rows[4];
    value_rows(rows, row);
    load_values(rows, ValueChunks());
  }

  /* s[j] has the scores of keys 8j .. 8j+7. */
  __device__ __forceinline__ void scores(float (&s)[2][4]) {
    /* Odd steps are separate from even ones: two shorter chains of dependent products. */
    float odd[2][4];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) s[j][e] = odd[j][e] = 0.0f;
#pragma unroll
    for (uint32_t c = 0; c < kKeyChunks; ++c) {
      const uint4 first = *reinterpret_cast<const uint4*>(queries_ + (2 * c * 32 + lane_) * 8);
      const uint4 second = *reinterpret_cast<const uint4*>(queries_ + ((2 * c + 1) * 32 + lane_) * 8);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint4& key = keys_[j][c];
        mma<Dtype>(s[j], first.x, first.y, first.z, first.w, key.x, key.y);
        mma<Dtype>(odd[j], second.x, second.y, second.z, second.w, key.z, key.w);
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) s[j][e] += odd[j][e];
  }

  /* Turns scores into exp(score - maximum so far), and rescales the sums made under the old maximum. */
  __device__ __forceinline__ void probabilities(uint32_t begin, uint32_t all_see, float (&s)[2][4]) {
    const bool masked = begin + kKeys > all_see || (Window && begin < all_from_);
    float factor[NT];
    bool changed = false;
#pragma unroll
    for (uint32_t n = 0; n < NT; ++n) {
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          s[j][2 * n + e] *= share_.scale;
          if (masked && (begin + 8 * j + 2 * t_ + e >= limit_[n] || (Window && begin + 8 * j + 2 * t_ + e < from_[n]))) s[j][2 * n + e] = -INFINITY;
        }
      float highest = fmaxf(fmaxf(s[0][2 * n], s[0][2 * n + 1]), fmaxf(s[1][2 * n], s[1][2 * n + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2));
      const float now = fmaxf(max_[n], highest);
      const float base = now == -INFINITY ? 0.0f : now;
      factor[n] = fast_exp(max_[n] - base);
      changed |= now != max_[n];
      max_[n] = now;
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) s[j][2 * n + e] = fast_exp(s[j][2 * n + e] - base);
      sum_[n] = sum_[n] * factor[n] + ((s[0][2 * n] + s[0][2 * n + 1]) + (s[1][2 * n] + s[1][2 * n + 1]));
    }
    if (__any_sync(0xFFFFFFFFu, changed)) {
#pragma unroll
      for (uint32_t n = 0; n < NT; ++n)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          /* The outputs' columns are queries 2t and 2t+1. */
          const float of_query = __shfl_sync(0xFFFFFFFFu, factor[n], (2 * t_ + e) * 4);
#pragma unroll
          for (uint32_t i = 0; i < kValueChunks * 4; ++i) {
            out_[i][n][e] *= of_query;
            out_[i][n][2 + e] *= of_query;
          }
        }
    }
  }

  /* The probabilities as right operands, and what their rounding leaves. */
  static __device__ __forceinline__ void pack(const float (&p)[2][4], uint32_t (&b)[NT][2], uint32_t (&rest)[NT][2]) {
#pragma unroll
    for (uint32_t n = 0; n < NT; ++n)
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        b[n][j] = packed<Dtype>(p[j][2 * n], p[j][2 * n + 1]);
        rest[n][j] = packed_rest<Dtype>(b[n][j], p[j][2 * n], p[j][2 * n + 1]);
      }
  }

  __device__ __forceinline__ void add_values(const float (&p)[2][4]) {
    uint32_t b[NT][2], rest[NT][2];
    pack(p, b, rest);
#pragma unroll
    for (uint32_t c = 0; c < kValueChunks; ++c) add_chunk(c, values_[c], b, rest);
  }

  __device__ __forceinline__ void add_chunk(uint32_t c, const uint4 (&v)[4], const uint32_t (&b)[NT][2], const uint32_t (&rest)[NT][2]) {
    const uint32_t words[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w}, {v[1].x, v[1].y, v[1].z, v[1].w},
                                  {v[2].x, v[2].y, v[2].z, v[2].w}, {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t a0 = __byte_perm(words[0][j], words[1][j], 0x5410), a1 = __byte_perm(words[0][j], words[1][j], 0x7632);
      const uint32_t a2 = __byte_perm(words[2][j], words[3][j], 0x5410), a3 = __byte_perm(words[2][j], words[3][j], 0x7632);
#pragma unroll
      for (uint32_t n = 0; n < NT; ++n) {
        mma<Dtype>(out_[4 * c + j][n], a0, a1, a2, a3, b[n][0], b[n][1]);
        mma<Dtype>(out_[4 * c + j][n], a0, a1, a2, a3, rest[n][0], rest[n][1]);
      }
    }
  }

  const Shares& share_;
  uint32_t lane_, g_, t_;
  const Element* queries_ = nullptr;
  uint32_t first_query_ = 0, last_ = 0, row_ = kNoRow;
  /* For query 8n + g; the sum covers only this lane's keys. */
  uint32_t limit_[NT];
  uint32_t from_[NT], all_from_; /* only with a window: the first keys of these queries, and of the tile's last one */
  float max_[NT], sum_[NT];
  float out_[kValueChunks * 4][NT][4];
  uint4 keys_[2][kKeyChunks];
  uint4 values_[kValueChunks][4];
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
