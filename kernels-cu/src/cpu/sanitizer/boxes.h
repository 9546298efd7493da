// The bytes of an operand as the region sanitizer compares them with accesses.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "cpu/task.h"

namespace mpk {
namespace sanitizer {

// Runs of `run` bytes, one at every index of up to four dimensions, widest stride first.
struct Box {
  uintptr_t start = 0, end = 0;
  uint64_t run = 0;
  uint32_t dims = 0;
  uint64_t count[MPK_MAX_DIMS], stride[MPK_MAX_DIMS];
  bool write = false;
  // For the pages of a slot: its page table, the number of its pages, and the planes [first_plane, last_plane) of each half of a
  // page.
  const int32_t* pages = nullptr;
  uint32_t num_pages = 0, planes = 0, first_plane = 0, last_plane = 0;

  // Number of adjacent bytes of the box from `at` on, and before it; 0: `at` is not in the box.
  uint64_t from(uintptr_t at, uint64_t* before) const {
    if (at < start || at >= end) return 0;
    uint64_t rest = at - start;
    if (pages != nullptr) {
      const uint64_t page = rest / stride[0];
      rest %= stride[0];
      const uint64_t plane = rest / stride[1] % (planes / 2);
      rest %= stride[1];
      if (plane < first_plane || plane >= last_plane) return 0;
      *before = rest;
      for (uint32_t i = 0; i < num_pages; ++i)
        if (pages[i] >= 0 && static_cast<uint64_t>(pages[i]) == page) return stride[1] - rest;
      return 0;
    }
    for (uint32_t d = 0; d < dims; ++d) {
      const uint64_t index = rest / stride[d];
      if (index >= count[d]) return 0;
      rest -= index * stride[d];
    }
    *before = rest;
    return rest < run ? run - rest : 0;
  }
};

// The box of a view, `shift` bytes further on; `lo` and `hi` may narrow it, in elements. False if it is empty.
inline bool view_box(const mpk_operand& o, const uint32_t* lo, const uint32_t* hi, int64_t shift, Box* box) {
  const uint64_t bytes = element_bytes(o.dtype);
  box->start = static_cast<uintptr_t>(o.addr) + static_cast<uintptr_t>(shift);
  box->dims = 0;
  box->run = bytes;
  if (o.layout == MPK_LAYOUT_TILED) {
    // The view may have some of a tile's columns, which are adjacent.
    const uint64_t tiles = (o.dims[0] + MPK_TILE_ROWS - 1) / MPK_TILE_ROWS, columns = (o.dims[1] + MPK_TILE_K - 1) / MPK_TILE_K * MPK_TILE_K;
    if (tiles * columns == 0) return false;
    box->run = columns * MPK_TILE_ROWS * bytes;
    box->dims = 1;
    box->count[0] = tiles;
    box->stride[0] = uint64_t{o.strides[0]} * MPK_TILE_ROWS * bytes;
    box->end = box->start + (tiles - 1) * box->stride[0] + box->run;
    if (box->run == box->stride[0]) box->run *= tiles, box->dims = 0;
    return true;
  }
  struct Dim {
    uint64_t count, stride;
  } dims[MPK_MAX_DIMS];
  uint32_t n = 0;
  for (uint32_t d = 0; d < o.ndim; ++d) {
    const uint32_t first = lo != nullptr ? lo[d] : 0, last = hi != nullptr ? hi[d] : o.dims[d];
    if (first >= last) return false;
    box->start += uint64_t{first} * o.strides[d] * bytes;
    if (last - first > 1) dims[n++] = {last - first, o.strides[d] * bytes};
  }
  std::sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  while (n > 0 && dims[n - 1].stride == box->run) box->run *= dims[--n].count;
  box->end = box->start + box->run;
  box->dims = n;
  for (uint32_t d = 0; d < n; ++d) {
    box->count[d] = dims[d].count;
    box->stride[d] = dims[d].stride;
    box->end += (dims[d].count - 1) * dims[d].stride;
  }
  return true;
}

} // namespace sanitizer
} // namespace mpk
