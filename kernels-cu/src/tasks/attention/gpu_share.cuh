/* What a warp of an attention task works on: a slot's rows, a key-value head, and a share of the slot's pages. */
#pragma once

#include "gpu/loads.cuh"
#include "gpu/task.cuh"
#include "tasks/attention/cache_layout.cuh"
#include "tasks/attention/params.h"

namespace mpk {
namespace gpu {
namespace attention {

/* Number of a cache row, counted from the cache's start in rows of head_dim elements. */
constexpr uint32_t kNoRow = 0xFFFFFFFFu;
/* If there are at most this many new keys and values in the share, they are also kept in shared memory, for the
 * warps that wait for them. */
constexpr uint32_t kKeptRows = 8;

/* Row `row` of a view of `Element`s whose dimension 0 is rows. */
template <typename Element>
__device__ __forceinline__ Element* row_of(const mpk_operand& view, uint32_t row) {
  return reinterpret_cast<Element*>(view.addr) + static_cast<uint64_t>(row) * view.strides[0];
}

/* Hint: this line is needed soon. */
__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

/* Each warp keeps its copy at the start of the work area, because registers are for keys and values. */
template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize>
struct alignas(16) Share {
  static_assert(Dim % 2 == 0 && Dim > 0 && Dim <= 256 && PageSize > 0, "attention");
  using Element = typename Number<Dtype>::Type;

  /* Elements per row in shared memory: whole chunks of 32. */
  static constexpr uint32_t kPadded = (Dim + 31) / 32 * 32;
  /* Floats between rows of results in shared memory. */
  static constexpr uint32_t kOutPitch = (Dim + 63) / 64 * 64 + 4;

  Element* pages;
  const int32_t* page_table; /* of the slot */
  uint32_t num_pages, kv_heads, kv_head;
  uint32_t in_views; /* index of the head among those of the task */
  uint32_t first_row, rows, context, heads, queries; /* queries count row by row, and within a row head by head */
  uint32_t first, last;                              /* positions of the share */
  uint32_t first_new, num_new;                       /* new positions in it */
  float scale;
  uint32_t window; /* positions that a query sees; only tasks with a window have it */

  static constexpr uint32_t kShareBytes = 1024; /* of all warps */
  static constexpr uint32_t kKeptBytes = 2 * kKeptRows * kPadded * sizeof(Element); /* of a head */
  /* Of the cache. Kept rows are a block of it, whatever their positions are (cache_layout.cuh). */
  using Layout = CacheLayout<sizeof(Element), Dim, PageSize>;
  static_assert(kKeptRows == Layout::kBlockRows, "attention");
  static __device__ __forceinline__ uint32_t kept_row(uint32_t index) { return index * (Layout::kBlocks ? Layout::kOfRow : kPadded); }

  /* The kept rows. */
  __device__ __forceinline__ Element* new_keys() const { return reinterpret_cast<Element*>(work_area() + kShareBytes + in_views * kKeptBytes); }
  __device__ __forceinline__ Element* new_values() const { return new_keys() + kKeptRows * kPadded; }

  __device__ __forceinline__ uint32_t position_of(uint32_t query) const { return context + query / heads; }
  /* The end of the keys before `end` that a query sees. */
  __device__ __forceinline__ uint32_t keys_of(uint32_t query, uint32_t end) const {
    const uint32_t limit = position_of(query) + 1;
    return limit < end ? limit : end;
  }

  /* The first position that a query sees. */
  __device__ __forceinline__ uint32_t first_key(uint32_t query) const {
    const uint32_t position = position_of(query);
    return position < window ? 0 : position - window + 1;
  }

  /* The page of `position`, or an invalid page from `limit` on. Separate from row_in, so that time may pass between
   * the two. */
  __device__ __forceinline__ uint32_t page_at(uint32_t position, uint32_t limit) const {
    uint32_t page;
    asm volatile("{.reg .pred p; setp.lt.u32 p,%2,%3; mov.u32 %0,-1; @p ld.global.u32 %0,[%1];}"
                 : "=&r"(page) : "l"(page_table + position / PageSize), "r"(position), "r"(limit));
    return page;
  }
  /* The row of the key at `position`, which is in `page`; kNoRow if the page is invalid. */
  __device__ __forceinline__ uint32_t row_in(uint32_t page, uint32_t position) const {
    return page < num_pages ? (page * 2 * kv_heads + kv_head) * PageSize + position % PageSize : kNoRow;
  }
  __device__ __forceinline__ uint32_t row_at(uint32_t position, uint32_t limit) const { return row_in(page_at(position, limit), position); }
  /* Element 0 of the row, if chunks were not permuted. */
  __device__ __forceinline__ Element* key(uint32_t row) const { return pages + Layout::row(static_cast<uint64_t>(row)); }
  __device__ __forceinline__ Element* value(uint32_t row) const { return key(row + kv_heads * PageSize); }
  __device__ __forceinline__ bool kept() const { return num_new <= kKeptRows; }
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
