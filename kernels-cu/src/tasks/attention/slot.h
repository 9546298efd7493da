// Attention of some queries of one slot and local key-value head over a share of the slot's positions. Compiled
// once for each level of vector instructions; all levels give the same bits.
//
// The arithmetic of a (row, query head) depends only on its position, the start of the share and the
// cache: keys are taken in blocks that end at multiples of BLOCK positions, each score is one dot product of 16
// lane sums in fixed order, and each output element is one chain over the keys. Neither the number of rows in
// the iteration nor the tile that computes them changes a bit. With a window, a query's blocks are the same as without; it
// leaves out those that it does not see, and the keys before its window in the first one.
#pragma once

#include "cpu/simd.h"
#include "cpu/task.h"
#include "cpu/wide.h"
#include "tasks/attention/tiles.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

constexpr uint32_t BLOCK = 64;         // keys of a block
constexpr uint32_t QUERIES = 64;       // (row, head) pairs that share a block's conversion to f32
constexpr uint32_t DIRECT_QUERIES = 8; // up to this number, keys and values are read from the pages without conversion

struct Bf16 {
  using Element = uint16_t;
  MPK_INLINE F32x16 load16(const uint16_t* p) { return from_bf16(p); }
  MPK_INLINE void store16(uint16_t* p, F32x16 a) { to_bf16(p, a); }
};
struct F16 {
  using Element = uint16_t;
  MPK_INLINE F32x16 load16(const uint16_t* p) { return from_f16(p); }
  MPK_INLINE void store16(uint16_t* p, F32x16 a) { to_f16(p, a); }
};
struct F32 {
  using Element = float;
  MPK_INLINE F32x16 load16(const float* p) { return load(p); }
  MPK_INLINE void store16(float* p, F32x16 a) { store(p, a); }
};

// dst[0..padded) = src[0..n), then zeros.
template <typename T>
MPK_INLINE void load_row(float* dst, const typename T::Element* src, uint32_t n, uint32_t padded) {
  uint32_t c = 0;
  for (; c + 16 <= n; c += 16) store(dst + c, T::load16(src + c));
  if (c < padded) {
    typename T::Element tail[16] = {};
    memcpy(tail, src + c, (n - c) * sizeof(tail[0]));
    store(dst + c, T::load16(tail));
  }
}
template <typename T>
MPK_INLINE void store_row(typename T::Element* dst, const float* src, uint32_t n) {
  uint32_t c = 0;
  for (; c + 16 <= n; c += 16) T::store16(dst + c, load(src + c));
  if (c < n) {
    typename T::Element tail[16];
    T::store16(tail, load(src + c));
    memcpy(dst + c, tail, (n - c) * sizeof(tail[0]));
  }
}

// The slot and key-value head of a task.
template <typename T>
class SlotAttention {
 protected:
  using Element = typename T::Element;

  SlotAttention(const mpk_kernel_args* args, const mpk_operand& cache, uint32_t dim, float scale, uint32_t window)
      : args_(args), dim_(dim), padded_((dim + 15) / 16 * 16), scale_(scale), window_(window == 0 ? UINT32_MAX : window) {
    pages_ = reinterpret_cast<Element*>(cache.addr);
    num_pages_ = cache.dims[0];
    kv_heads_ = cache.dims[1] / 2;
    page_size_ = cache.dims[2];
  }

  // Reads rows, context and pages of active slot `active`. False if its positions exceed its pages.
  bool take_slot(uint32_t active) {
    const mpk_batch* batch = args_->batch;
    first_row_ = static_cast<uint32_t>(batch->active_first_row[active]);
    rows_ = static_cast<uint32_t>(batch->active_num_rows[active]);
    context_ = static_cast<uint32_t>(batch->active_context[active]);
    const uint32_t pages_per_slot = args_->rank->batch_config->pages_per_slot;
    page_table_ = batch->page_table + static_cast<uint64_t>(batch->active_slot[active]) * pages_per_slot;
    return (context_ + rows_ + page_size_ - 1) / page_size_ <= pages_per_slot;
  }
  // Whether the page numbers of positions [first, last) are valid.
  bool has_pages(uint32_t first, uint32_t last) const {
    for (uint32_t page = first / page_size_; page * page_size_ < last; ++page)
      if (static_cast<uint32_t>(page_table_[page]) >= num_pages_) return false;
    return true;
  }

  // Returns the memory after it.
  uint8_t* lay_out_scratch() {
    float* at = reinterpret_cast<float*>(args_->scratch);
    const auto take = [&at](uint64_t floats) {
      float* start = at;
      at += floats;
      return start;
    };
    q_ = take(uint64_t{QUERIES} * padded_);
    o_ = take(uint64_t{QUERIES} * padded_);
    k_block_ = take(uint64_t{BLOCK} * padded_);
    v_block_ = take(uint64_t{BLOCK} * padded_);
    scores_ = take(uint64_t{QUERIES} * BLOCK);
    row_ = take(2 * uint64_t{padded_});
    rounded_ = reinterpret_cast<Element*>(take(padded_));
    max_ = take(QUERIES);
    sum_ = take(QUERIES);
    return reinterpret_cast<uint8_t*>(at);
  }

  Element* cache_row(uint32_t position, bool value) const {
    const uint64_t page = static_cast<uint32_t>(page_table_[position / page_size_]);
    const uint64_t plane = page * 2 * kv_heads_ + (value ? kv_heads_ : 0) + kv_head_;
    return pages_ + (plane * page_size_ + position % page_size_) * dim_;
  }

  const Element* view_row(uint32_t operand, uint32_t row) const {
    return reinterpret_cast<const Element*>(row_address(args_->inputs[operand], row));
  }

  // One query or key: norm, rope, rounded to the activations' type, in rounded_. `norm`: null, or the weight.
  void prepare(const Element* src, const mpk_operand* norm, float eps, const mpk_operand& rope, uint32_t position) {
    load_row<T>(row_, src, dim_, padded_);
    if (norm != nullptr) {
      F32x16 squares = zero();
      for (uint32_t c = 0; c < padded_; c += 16) {
        const F32x16 x = load(row_ + c);
        squares = fma(x, x, squares);
      }
      const float mean = sum_lanes(squares) / static_cast<float>(dim_);
      const F32x16 inverse = splat(1.0f / sqrtf(mean + eps));
      float* weight = row_ + padded_;
      load_row<T>(weight, reinterpret_cast<const Element*>(norm->addr), dim_, padded_);
      for (uint32_t c = 0; c < padded_; c += 16) store(row_ + c, mul(mul(load(row_ + c), inverse), load(weight + c)));
    }
    const float* cosine = reinterpret_cast<const float*>(row_address(rope, position));
    const uint32_t half = dim_ / 2;
    const float* sine = cosine + half;
    float* x = row_;
    float* y = row_ + half;
    for (uint32_t i = 0; i < half; ++i) {
      const float first = x[i], second = y[i];
      x[i] = __builtin_fmaf(first, cosine[i], -(second * sine[i]));
      y[i] = __builtin_fmaf(second, cosine[i], first * sine[i]);
    }
    store_row<T>(rounded_, row_, dim_);
  }

  // Writes a head of a row of the result, which may be in MPK_LAYOUT_WIDE.
  void store_head(const mpk_operand& out, uint32_t row, uint32_t head, const float* values) {
    if constexpr (sizeof(Element) == 2) {
      if (out.ndim == 4) {
        store_row<T>(rounded_, values, dim_);
        store_wide(out, row, head * dim_, rounded_, dim_);
        return;
      }
    }
    store_row<T>(reinterpret_cast<Element*>(row_address(out, row)) + uint64_t{head} * dim_, values, dim_);
  }

  uint32_t position_of(uint64_t query) const { return context_ + static_cast<uint32_t>(query / heads_); }

  // The first position that a query at `position` sees.
  uint32_t first_key(uint32_t position) const { return position < window_ ? 0 : position - window_ + 1; }

  // `count` queries, counted row by row and within a row head by head. `query(i)` returns the
  // elements of the i-th query; `write(i)` stores its result.
  template <typename Query, typename Write>
  void block(uint64_t first, uint32_t count, Query&& query, Write&& write) {
    for (uint32_t i = 0; i < count; ++i) {
      float* q = q_ + uint64_t{i} * padded_;
      load_row<T>(q, query(i), dim_, padded_);
      for (uint32_t c = 0; c < padded_; c += 16) store(q + c, mul(load(q + c), splat(scale_)));
      float* o = o_ + uint64_t{i} * padded_;
      for (uint32_t c = 0; c < padded_; c += 16) store(o + c, zero());
      max_[i] = -INFINITY;
      sum_[i] = 0.0f;
    }
    const uint32_t limit = position_of(first + count - 1) + 1;
    const uint32_t last = limit < share_last_ ? limit : share_last_;
    const bool direct = count <= DIRECT_QUERIES && dim_ == padded_;
    const uint32_t seen = first_key(position_of(first)) / BLOCK * BLOCK;
    for (uint32_t begin = seen > share_first_ ? seen : share_first_; begin < last;) {
      uint32_t end = (begin / BLOCK + 1) * BLOCK;
      if (end > last) end = last;
      keys(first, count, begin, end, direct);
      begin = end;
    }
    for (uint32_t i = 0; i < count; ++i) write(i);
  }

  // The queries against the keys at positions [begin, end), which are in one block.
  void keys(uint64_t first, uint32_t count, uint32_t begin, uint32_t end, bool direct) {
    // Earlier queries may end before this block, and the windows of later ones may begin after it.
    uint32_t start = 0;
    while (start < count && position_of(first + start) < begin) ++start;
    while (count > start && first_key(position_of(first + count - 1)) >= end) --count;
    if (start == count) return;
    if (direct) {
      for_segments(begin, end, [&](uint32_t at, uint32_t n) {
        dots<T>(q_ + uint64_t{start} * padded_, count - start, padded_, cache_row(at, false), n,
                scores_ + uint64_t{start} * BLOCK + (at - begin), BLOCK);
      });
    } else {
      for_segments(begin, end, [&](uint32_t at, uint32_t n) {
        for (uint32_t j = 0; j < n; ++j) {
          const uint64_t to = uint64_t{at - begin + j} * padded_;
          load_row<T>(k_block_ + to, cache_row(at, false) + uint64_t{j} * dim_, dim_, padded_);
          load_row<T>(v_block_ + to, cache_row(at, true) + uint64_t{j} * dim_, dim_, padded_);
        }
      });
      dots<F32>(q_ + uint64_t{start} * padded_, count - start, padded_, k_block_, end - begin,
                scores_ + uint64_t{start} * BLOCK, BLOCK);
    }
    for (uint32_t i = start; i < count; ++i) probabilities(i, hidden(first + i, begin), keys_of(first + i, begin, end));
    for (uint32_t i = start; i < count;) {
      // Queries in groups: the keys that all of them see, and each one's own keys before and after.
      uint32_t group = count - i < QUERY_TILE ? count - i : QUERY_TILE;
      const uint32_t common = keys_of(first + i, begin, end);
      while (hidden(first + i + group - 1, begin) >= common) --group; // at least one remains, since it sees a key
      const uint32_t from = hidden(first + i + group - 1, begin);
      for (uint32_t g = 0; g + 1 < group; ++g) {
        const uint32_t own = hidden(first + i + g, begin);
        if (own < from) values(i + g, 1, begin, own, from, direct);
      }
      values(i, group, begin, from, common, direct);
      for (uint32_t g = 1; g < group; ++g) {
        const uint32_t own = keys_of(first + i + g, begin, end);
        if (own > common) values(i + g, 1, begin, common, own, direct);
      }
      i += group;
    }
  }

  // Number of keys from `begin` on that come before a query's window. A later query never has fewer.
  uint32_t hidden(uint64_t query, uint32_t begin) const {
    const uint32_t from = first_key(position_of(query));
    return from > begin ? from - begin : 0;
  }

  // Number of keys at [begin, end) that a query sees. A later query never sees fewer.
  uint32_t keys_of(uint64_t query, uint32_t begin, uint32_t end) const {
    const uint32_t limit = position_of(query) + 1;
    return (limit < end ? limit : end) - begin;
  }

  template <typename F>
  void for_segments(uint32_t begin, uint32_t end, F&& each) const {
    while (begin < end) {
      uint32_t stop = (begin / page_size_ + 1) * page_size_;
      if (stop > end) stop = end;
      each(begin, stop - begin);
      begin = stop;
    }
  }

  // Turns scores [from, n) into exp(score - maximum so far), and rescales the sums made under the old maximum.
  void probabilities(uint32_t i, uint32_t from, uint32_t n) {
    float* s = scores_ + uint64_t{i} * BLOCK;
    for (uint32_t j = 0; j < from; ++j) s[j] = -INFINITY;
    const uint32_t whole = (n + 15) / 16 * 16;
    for (uint32_t j = n; j < whole; ++j) s[j] = -INFINITY;
    F32x16 highest = load(s);
    for (uint32_t j = 16; j < whole; j += 16) highest = max(load(s + j), highest);
    const float before = max_[i];
    const float block_max = max_lanes(highest);
    const float now = block_max > before ? block_max : before;
    F32x16 sum = zero();
    for (uint32_t j = 0; j < whole; j += 16) {
      const F32x16 p = exp(sub(load(s + j), splat(now)));
      store(s + j, p);
      sum = add(sum, p);
    }
    if (now != before) {
      float lanes[16];
      store(lanes, exp(sub(splat(before), splat(now))));
      float* o = o_ + uint64_t{i} * padded_;
      for (uint32_t c = 0; c < padded_; c += 16) store(o + c, mul(load(o + c), splat(lanes[0])));
      sum_[i] *= lanes[0];
      max_[i] = now;
    }
    sum_[i] += sum_lanes(sum);
  }

  // Adds the values of keys [from, to), counted from position `begin`, to the outputs of `group` queries.
  void values(uint32_t i, uint32_t group, uint32_t begin, uint32_t from, uint32_t to, bool direct) {
    float* o = o_ + uint64_t{i} * padded_;
    const float* p = scores_ + uint64_t{i} * BLOCK;
    if (direct) {
      for_segments(begin + from, begin + to, [&](uint32_t at, uint32_t n) {
        weighted<T>(o, group, padded_, p + (at - begin), BLOCK, cache_row(at, true), n);
      });
    } else {
      weighted<F32>(o, group, padded_, p + from, BLOCK, v_block_ + uint64_t{from} * padded_, to - from);
    }
  }

  const mpk_kernel_args* args_;
  const uint32_t dim_, padded_; // head_dim, and rounded up to whole vectors
  const float scale_;
  const uint32_t window_; // positions that a query sees
  uint32_t kv_head_, heads_, first_row_, rows_, context_; // heads_: query heads
  uint32_t num_pages_, kv_heads_, page_size_, share_first_, share_last_;
  const int32_t* page_table_;
  Element* pages_;
  float *q_, *o_, *k_block_, *v_block_, *scores_, *row_, *max_, *sum_;
  Element* rounded_;
};

} // namespace
} // namespace MPK_ISA
} // namespace mpk
