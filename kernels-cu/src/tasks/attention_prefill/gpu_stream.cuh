/* The fetch warp copies the keys and values of a task's units into the ring of stages, in the order in which the steps of gpu.cuh
 * take them: first the keys of tile 0, then for each tile i its keys and the values of tile i - 1, and last the values of the last tile.
 *
 * A stage has rows of 128 bytes, swizzled by 128, as rows of the cache are. With heads of 128 elements, a stage of keys has half of the
 * elements of all keys of a tile. A stage of values has half of the tile's values: first the first 64 elements of each, then the
 * others. With heads of 64 elements, a stage has a whole tile. */
#pragma once

#include "gpu/warp_loader.cuh"
#include "tasks/attention/cache_layout.cuh"
#include "tasks/attention_prefill/gpu_setup.cuh"

namespace mpk {
namespace gpu {
namespace attention_prefill {

/* A part of a unit, as the warps use it. */
struct alignas(16) Part {
  Tile tile;
  uint32_t begin, end; /* tiles of keys */
  uint32_t partial;    /* number of the partial result, or kWhole */
};
constexpr uint32_t kWhole = 0xFFFFFFFFu;
constexpr uint32_t kNoRow = 0xFFFFFFFFu;

/* Written by the compute warps, also read by the fetch warp. */
struct Control {
  prefill::Place next, end;  /* the rest of the task's share */
  uint32_t num_parts, steps; /* number of parts in the table, and of all their tiles of keys */
  uint32_t more;             /* 1: another table follows */
};

template <uint32_t Dim>
struct Layout {
  static constexpr uint32_t kTileStages = Dim / 64; /* of the keys of a tile, and of its values */
  static constexpr uint32_t kQueryBytes = kTileRows * Dim * 2;
  static constexpr uint32_t kControl = 2 * kQueryBytes; /* after the queries of two units */
  static constexpr uint32_t kParts = kControl + 64;
  static constexpr uint32_t kMostParts = 128;
  static constexpr uint32_t kBytes = kParts + kMostParts * sizeof(Part);
  static_assert(kBytes <= kWorkBytes, "the work area is too small for attention_prefill");
  static_assert(sizeof(Control) <= kParts - kControl, "attention_prefill");

  static __device__ __forceinline__ Control& control() { return *reinterpret_cast<Control*>(work_area() + kControl); }
  static __device__ __forceinline__ Part* parts() { return reinterpret_cast<Part*>(work_area() + kParts); }
};

#if __CUDA_ARCH__ >= 900

/* Used by all lanes of the fetch warp. */
template <uint32_t Dim, uint32_t PageSize>
class Stream {
  using Places = Layout<Dim>;
  static_assert(kStageBytes == kTileKeys * 128, "a stage has 64 elements of each key of a tile");
  static constexpr bool kPermuted = attention::CacheLayout<2, Dim, PageSize>::kPermuted;
  /* A piece is the rows of a tile that are adjacent in the cache. Lane l looks up pieces l, l + 32, ... */
  static constexpr uint32_t kPieceRows = PageSize < kTileKeys ? PageSize : kTileKeys;
  static constexpr uint32_t kPieces = kTileKeys / kPieceRows;
  static constexpr uint32_t kOfLane = (kPieces + 31) / 32;

  struct Rows {
    uint32_t row[kOfLane]; /* row of the cache at which a piece starts, or kNoRow */
    uint32_t count;        /* rows of the tile that exist. The others become zeros, because a weight of 0 times arbitrary memory may
                              not be a number */
  };

 public:
  __device__ __forceinline__ Stream(const mpk_operand& cache, WarpLoader& warp)
      : warp_(warp), lane_(threadIdx.x % 32), addr_(cache.addr), planes_(cache.dims[1]), num_pages_(cache.dims[0]),
        num_parts_(reread(Places::control().num_parts)) {
    tile_ = num_parts_ != 0 ? Places::parts()[0].begin : 0;
    look_up();
  }

  /* Returns false if the compute warps have left. */
  __device__ __forceinline__ bool run(uint32_t steps) {
    Rows keys = {}, values = {};
#pragma unroll 1
    for (uint32_t step = 0; step <= steps; ++step) {
      if (step != steps) {
        advance(keys);
#pragma unroll 1
        for (uint32_t half = 0; half < Places::kTileStages; ++half)
          if (!bring<8, 0>(keys, 0, half * 8)) return false;
      }
      if (step != 0) {
        if constexpr (Dim == 64) {
          if (!bring<8, 0>(values, planes_ / 2 * PageSize, 0)) return false;
        } else {
          if (!bring<16, 0>(values, planes_ / 2 * PageSize, 0)) return false;
          if (!bring<16, 64>(values, planes_ / 2 * PageSize, 0)) return false;
        }
      }
      values = keys;
    }
    return true;
  }

 private:
  /* Starts the loads from the page table for tile (part_, tile_). */
  __device__ __forceinline__ void look_up() {
    if (part_ == num_parts_) return;
    const Part& part = Places::parts()[part_];
    const int32_t* table = shared_state().batch.page_table + part.tile.pages;
    const uint32_t end = part.tile.position + part.tile.tokens;
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i) {
      const uint32_t piece = i * 32 + lane_, position = tile_ * kTileKeys + piece * kPieceRows;
      page_[i] = piece < kPieces && position < end ? static_cast<uint32_t>(table[position / PageSize]) : kNoRow;
    }
  }

  /* Sets `rows` to the tile whose pages have been looked up, and starts the look-up of the next one. */
  __device__ __forceinline__ void advance(Rows& rows) {
    const Part& part = Places::parts()[part_];
    const uint32_t first = tile_ * kTileKeys, end = part.tile.position + part.tile.tokens;
    rows.count = end - first < kTileKeys ? end - first : kTileKeys;
#pragma unroll
    for (uint32_t i = 0; i < kOfLane; ++i) {
      const uint32_t piece = i * 32 + lane_;
      if (piece < kPieces && piece * kPieceRows < rows.count && page_[i] >= num_pages_) {
        Context::fail(MPK_ABORT_KERNEL);
        rows.count = 0;
      }
      rows.row[i] = page_[i] < num_pages_ ? (page_[i] * planes_ + part.tile.head) * PageSize + (first + piece * kPieceRows) % PageSize : kNoRow;
    }
    rows.count = __reduce_min_sync(0xFFFFFFFFu, rows.count);
    if (++tile_ == part.end && ++part_ != num_parts_) tile_ = Places::parts()[part_].begin;
    look_up();
  }

  /* Fills the next stage with rows of the tile, starting with row `First`, as many as fit. Copies `Chunks` times 16 bytes of each
   * row, starting with chunk `chunk`. `offset` is the offset of the plane in rows of the cache. */
  template <uint32_t Chunks, uint32_t First>
  __device__ __forceinline__ bool bring(const Rows& rows, uint32_t offset, uint32_t chunk) {
    if (!warp_.wait_free()) return false;
    if (rows.count == kTileKeys) copy<Chunks, First, true>(warp_.address(), rows, offset, chunk);
    else copy<Chunks, First, false>(warp_.address(), rows, offset, chunk);
    warp_.copies_begun();
    return true;
  }
  template <uint32_t Chunks, uint32_t First, bool Whole>
  __device__ __forceinline__ void copy(uint32_t stage, const Rows& rows, uint32_t offset, uint32_t chunk) const {
    constexpr uint32_t kAtOnce = 32 / Chunks;
    const uint32_t of_lane = lane_ / Chunks, own = lane_ % Chunks;
    const uint64_t base = addr_ + (chunk + own) * 16;
    const uint32_t to = stage + own / 8 * (kStageBytes / (Chunks / 8)) + of_lane * 128;
    uint32_t row = kNoRow;
    uint64_t from = 0;
    /* Tiles that are not whole are rare. Unrolled, their loop would need more registers than the warp has. */
    constexpr uint32_t kUnrolled = Whole || kOfLane > 1 ? 32 : 4;
#pragma unroll kUnrolled
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t first = First + i * kAtOnce; /* first of the rows that are copied at once */
      if (i == 0 || first % kPieceRows == 0 || kPieceRows < kAtOnce) {
        row = __shfl_sync(0xFFFFFFFFu, rows.row[first / kPieceRows / 32], static_cast<int>((first / kPieceRows + of_lane / kPieceRows) % 32));
        from = base + static_cast<uint64_t>(Whole || row != kNoRow ? row + offset + (first + of_lane) % kPieceRows : 0) * (Dim * 2);
      }
      const uint32_t place = to + i * kAtOnce * 128 + (own % 8 ^ (kPermuted ? 0 : (i * kAtOnce + of_lane) % 8)) * 16;
      copy16<Whole>(place, from, first + of_lane < rows.count);
      from += kAtOnce * Dim * 2;
    }
  }
  template <bool Whole>
  static __device__ __forceinline__ void copy16(uint32_t to, uint64_t from, bool valid) {
    if constexpr (Whole) asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(valid ? 16u : 0u) : "memory");
  }

  WarpLoader& warp_;
  const uint32_t lane_;
  const uint64_t addr_;
  const uint32_t planes_, num_pages_, num_parts_;
  uint32_t part_ = 0, tile_; /* the tile that is being looked up */
  uint32_t page_[kOfLane] = {};
};

/* Copies all that the compute warps take in a task. Returns false if they have left. */
template <uint32_t Dim, uint32_t PageSize>
__device__ __forceinline__ bool bring_all(const TaskSlot& slot) {
  using Places = Layout<Dim>;
  WarpLoader warp;
  bool go_on = warp.borrow();
  for (bool more = true; go_on && more;) {
    go_on = warp.wait_begun();
    if (!go_on) break;
    const Control& control = Places::control();
    const uint32_t steps = reread(control.steps);
    more = reread(control.more) != 0;
    if (steps != 0) {
      go_on = Stream<Dim, PageSize>(slot.operands[1], warp).run(steps);
    } else {
      /* An empty stage. By waiting for it, the compute warps keep the work area until this warp has read the table. */
      go_on = warp.wait_free();
      if (go_on) warp.copies_begun();
    }
    warp.brought();
  }
  if (go_on) warp.give_back();
  else warp.stop();
  return go_on;
}

#endif

}  // namespace attention_prefill
}  // namespace gpu
}  // namespace mpk
