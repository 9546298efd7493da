/* The fetch warp copies the keys and values of a task's units into the ring of stages, in the order in which the steps of gpu.cuh
 * take them: first the keys of tile 0, then for each tile i its keys and the values of tile i - 1, and last the values of the last tile.
 *
 * A tile has the blocks of adjacent positions as they are in the cache (cache_layout.cuh). With heads of 128 elements it has two stages,
 * with heads of 64 elements one. They are adjacent in memory, because tiles begin at an even stage if they have two. The last stage's
 * barrier stands for the whole tile. */
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
  static constexpr uint32_t kRowBytes = Dim * 2;
  static_assert(Places::kTileStages * kStageBytes == kTileKeys * kRowBytes, "a tile fills its stages");
  static_assert(attention::CacheLayout<2, Dim, PageSize>::kBlocks, "the graph builder uses this task type only for such caches");
  static constexpr uint32_t kBlockRows = attention::CacheLayout<2, Dim, PageSize>::kBlockRows;
  /* A piece is the rows of a tile that are adjacent in the cache. Lane l has piece l. */
  static constexpr uint32_t kPieceRows = PageSize < kTileKeys ? PageSize : kTileKeys;
  static constexpr uint32_t kPieces = kTileKeys / kPieceRows;
  static_assert(kPieces <= 32 && (PageSize & (PageSize - 1)) == 0, "attention_prefill");

  struct Rows {
    uint32_t row;   /* row of the cache at which the lane's piece starts, or kNoRow */
    uint32_t count; /* rows of the tile that exist */
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
    Rows keys = {kNoRow, 0}, values = {kNoRow, 0};
#pragma unroll 1
    for (uint32_t step = 0; step <= steps; ++step) {
      if (step != steps) {
        advance(keys);
        if (!bring<false>(keys, 0)) return false;
      }
      if (step != 0 && !bring<true>(values, planes_ / 2 * PageSize)) return false;
      values = keys;
    }
    return true;
  }

 private:
  /* Starts the load from the page table for tile (part_, tile_). */
  __device__ __forceinline__ void look_up() {
    if (part_ == num_parts_) return;
    const Part& part = Places::parts()[part_];
    const int32_t* table = shared_state().batch.page_table + part.tile.pages;
    const uint32_t position = tile_ * kTileKeys + lane_ * kPieceRows;
    page_ = lane_ < kPieces && position < part.tile.position + part.tile.tokens ? static_cast<uint32_t>(table[position / PageSize]) : kNoRow;
  }

  /* Sets `rows` to the tile whose pages have been looked up, and starts the look-up of the next one. */
  __device__ __forceinline__ void advance(Rows& rows) {
    const Part& part = Places::parts()[part_];
    const uint32_t first = tile_ * kTileKeys, end = part.tile.position + part.tile.tokens;
    uint32_t count = end - first < kTileKeys ? end - first : kTileKeys;
    if (lane_ < kPieces && lane_ * kPieceRows < count && page_ >= num_pages_) {
      Context::fail(MPK_ABORT_KERNEL);
      count = 0;
    }
    rows.row = page_ < num_pages_ ? (page_ * planes_ + part.tile.head) * PageSize + (first + lane_ * kPieceRows) % PageSize : kNoRow;
    rows.count = __reduce_min_sync(0xFFFFFFFFu, count);
    if (++tile_ == part.end && ++part_ != num_parts_) tile_ = Places::parts()[part_].begin;
    look_up();
  }

  /* Fills the next tile. `offset`: of the plane, in rows of the cache. `Zeros`: rows that do not exist become zeros, because a weight of 0
   * times arbitrary memory may not be a number. The scores of other keys are replaced. */
  template <bool Zeros>
  __device__ __forceinline__ bool bring(const Rows& rows, uint32_t offset) {
    if (!warp_.wait_free(Places::kTileStages)) return false;
    const uint32_t to = warp_.address();
    /* Whole blocks are copied; with `Zeros`, lanes write the others. */
    const uint32_t copied = (Zeros ? rows.count : rows.count + kBlockRows - 1) / kBlockRows * kBlockRows;
    if (Zeros && copied != kTileKeys) write_rest(to, rows, offset, copied);
    const uint32_t barrier = warp_.begin_copies(Places::kTileStages, copied * kRowBytes);
    const uint32_t first = lane_ * kPieceRows; /* of the lane's piece */
    if (lane_ < kPieces && first < copied)
      bulk_copy(to + first * kRowBytes, address(rows.row + offset), min(copied - first, kPieceRows) * kRowBytes, barrier);
    return true;
  }
  /* Writes the tile's rows from `from` on, the start of a block; those that do not exist are zeros. */
  __device__ __forceinline__ void write_rest(uint32_t to, const Rows& rows, uint32_t offset, uint32_t from) const {
    constexpr uint32_t kChunks = kRowBytes / 16; /* of a row */
    const uint32_t piece = from / kPieceRows, row = __shfl_sync(0xFFFFFFFFu, rows.row, static_cast<int>(piece));
    const uint64_t source = address(row + offset) - piece * kPieceRows * kRowBytes;
#pragma unroll 1
    for (uint32_t chunk = from * kChunks + lane_; chunk < kTileKeys * kChunks; chunk += 32) {
      const uint32_t row_in_tile = chunk / (kBlockRows * kChunks) * kBlockRows + chunk / 8 % kBlockRows;
      uint4 v;
      load_global16_if<0>(v.x, v.y, v.z, v.w, source + chunk * 16, row_in_tile < rows.count);
      store_shared16(to + chunk * 16, v);
    }
    WarpLoader::show_writes();
  }
  /* Of a row that is the start of a block. */
  __device__ __forceinline__ uint64_t address(uint32_t row) const { return addr_ + static_cast<uint64_t>(row) * kRowBytes; }

  WarpLoader& warp_;
  const uint32_t lane_;
  const uint64_t addr_;
  const uint32_t planes_, num_pages_, num_parts_;
  uint32_t part_ = 0, tile_; /* the tile that is being looked up */
  uint32_t page_ = kNoRow;   /* of the lane's piece */
};

/* Copies all that the compute warps take in a task. Returns false if they have left. */
template <uint32_t Dim, uint32_t PageSize>
__device__ __forceinline__ bool bring_all(const TaskSlot& slot) {
  using Places = Layout<Dim>;
  WarpLoader warp;
  bool go_on = warp.borrow();
  /* A stage without data. */
  const auto pass = [&] {
    if (!warp.wait_free(1)) return false;
    warp.begin_copies(1, 0);
    return true;
  };
  for (bool more = true; go_on && more;) {
    go_on = warp.wait_begun();
    if (!go_on) break;
    const Control& control = Places::control();
    const uint32_t steps = reread(control.steps);
    more = reread(control.more) != 0;
    if (steps == 0) {
      go_on = pass(); /* by waiting for it, the compute warps keep the work area until this warp has read the table */
    } else {
      if (warp.index() % Places::kTileStages != 0) go_on = pass(); /* the stages of a tile must be adjacent */
      go_on = go_on && Stream<Dim, PageSize>(slot.operands[1], warp).run(steps);
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
