/* Keys and values of a task's units, brought tile by tile into shared memory by the compute threads.
 *
 * Step i of a task multiplies with the keys of its tile i and the values of its tile i - 1; the two are brought together, as
 * pair i. Five buffers hold two pairs and a half. The second warpgroup runs half a step after the first; each of them brings
 * half of every pair. */
#pragma once

#include "gpu/barrier.cuh"
#include "tasks/attention_prefill/gpu_setup.cuh"
#include "tasks/attention_prefill/wgmma.cuh"

namespace mpk {
namespace gpu {
namespace attention_prefill {

/* A part of a unit as the warps see it. */
struct alignas(16) Part {
  Tile tile;
  uint32_t begin, end; /* tiles of keys */
  uint32_t partial;    /* number of the partial result, or kWhole */
};
constexpr uint32_t kWhole = 0xFFFFFFFFu;
constexpr uint32_t kNoRow = 0xFFFFFFFFu;
constexpr uint32_t kBuffers = 5;
constexpr uint32_t kBarriers = 4;

template <uint32_t Dim>
struct Layout {
  static constexpr uint32_t kTileBytes = kHalfTile * (Dim / 64);
  static constexpr uint32_t kFull = kBuffers * kTileBytes, kEmpty = kFull + kBarriers * 8;
  static constexpr uint32_t kControl = kEmpty + kBarriers * 8;
  static constexpr uint32_t kParts = kControl + 64;
  static constexpr uint32_t kMostParts = 128;
  static constexpr uint32_t kBytes = kParts + kMostParts * sizeof(Part);
  static_assert(kBytes <= kWorkBytes, "the work area is too small for attention_prefill");
};

__device__ __forceinline__ void mbarrier_wait(uint32_t address, uint32_t parity) {
  while (!mbarrier_test(address, parity)) {} /* copies and products end by themselves: this wait needs no way out */
}

template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize>
class Stream {
  using Places = Layout<Dim>;
  static constexpr uint32_t kRowChunks = Dim / 8;               /* 16 bytes each */
  static constexpr uint32_t kRowsAtOnce = 128 / kRowChunks;     /* by a warpgroup */
  static constexpr uint32_t kCopies = 32 / kRowsAtOnce;         /* of a thread, for its half of a tile */
  static constexpr bool kOnePage = PageSize % 32 == 0;          /* for that half */
  static constexpr uint32_t kLookups = kOnePage ? 1 : kCopies;

  struct Rows {
    uint32_t row[kLookups]; /* of the cache */
    int32_t left;           /* rows from the thread's first one on that are there */
  };

 public:
  /* `parts` are in shared memory, `num_parts` too; `steps` is the number of their tiles of keys. */
  __device__ __forceinline__ Stream(const Context& context, uint32_t warpgroup, uint32_t steps, const uint32_t& num_parts)
      : cache_(context.input(1)), num_parts_(num_parts), warpgroup_(warpgroup), steps_(steps) {
    work_ = shared_address(context.work());
    to_ = work_ + chunk() / 8 * kHalfTile + first_row() * 128 + ((chunk() % 8) ^ (first_row() % 8)) * 16;
    part_ = 0;
    tile_ = parts()[0].begin;
    look_up();
    advance();
    issue(0);
    issue(1);
  }

  static __device__ __forceinline__ const Part* parts() { return reinterpret_cast<const Part*>(work_area() + Places::kParts); }

  /* Until both warpgroups' copies of pair `step` are there. */
  __device__ __forceinline__ void wait(uint32_t step) const {
    mbarrier_wait(work_ + Places::kFull + step % kBarriers * 8, step / kBarriers & 1);
  }
  /* Around the products of step `step`. The first warpgroup is about half a step ahead: it brings the next pair before its
   * products, when the second one has released the step before. The second one brings the pair after that one as soon as it
   * has released the step itself. So both halves have a whole step on their way. */
  __device__ __forceinline__ void before(uint32_t step) const {
    if (step == 0) tell<1>(0);
    else if (warpgroup_ == 0) tell<0>(step);
  }
  __device__ __forceinline__ void bring_next(uint32_t step) {
    if (warpgroup_ == 0 && step != 0 && step < steps_) bring(step + 1);
  }
  /* The warp's first product of step `step`, and the second one of the step before, are done. */
  __device__ __forceinline__ void after(uint32_t step) {
    __syncwarp();
    if (kEveryLaneArrives || threadIdx.x % 32 == 0) mbarrier_arrive(work_ + Places::kEmpty + step % kBarriers * 8);
    if (warpgroup_ == 0) return;
    tell<0>(step + 1);
    if (step + 2 <= steps_) bring(step + 2);
  }

  /* Where the keys of a step lie, and the values of the tile before. */
  static __device__ __forceinline__ uint32_t keys_at(uint32_t work, uint32_t step) { return work + 2 * step % kBuffers * Places::kTileBytes; }
  static __device__ __forceinline__ uint32_t values_at(uint32_t work, uint32_t step) { return work + (2 * step + 1) % kBuffers * Places::kTileBytes; }

 private:
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kRowChunks; }
  /* Of a tile; the thread's others are kRowsAtOnce apart. */
  static __device__ __forceinline__ uint32_t first_row() { return threadIdx.x / 128 * 32 + threadIdx.x % 128 / kRowChunks; }
  __device__ __forceinline__ bool has_part() const { return part_ < reread(num_parts_); }

  /* Tells that the thread's copies of pair `pair` have arrived, of which `After` more have begun since. */
  template <uint32_t After>
  __device__ __forceinline__ void tell(uint32_t pair) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(After) : "memory");
    /* The products read through the async proxy. */
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (kEveryLaneArrives || threadIdx.x % 32 == 0) mbarrier_arrive(work_ + Places::kFull + pair % kBarriers * 8);
  }
  /* Begins the copies of pair `pair`, once its buffers are free: both warpgroups have released step `pair` - 2. */
  __device__ __forceinline__ void bring(uint32_t pair) {
    mbarrier_wait(work_ + Places::kEmpty + (pair - 2) % kBarriers * 8, (pair - 2) / kBarriers & 1);
    issue(pair);
  }

  /* Begins the page table's loads for the rows of tile (part_, tile_). */
  __device__ __forceinline__ void look_up() {
    if (!has_part()) return;
    const Part& part = parts()[part_];
    const int32_t* page_table = reread(shared_state().batch.page_table) + part.tile.pages;
#pragma unroll
    for (uint32_t i = 0; i < kLookups; ++i) {
      const uint32_t position = tile_ * kTileKeys + first_row() + i * kRowsAtOnce;
      const bool valid = position < part.tile.position + part.tile.tokens;
      asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; mov.u32 %0,-1; @p ld.global.u32 %0,[%1];}"
                   : "=&r"(page_[i]) : "l"(page_table + position / PageSize), "r"(static_cast<uint32_t>(valid)));
    }
  }

  /* The tile whose pages are known becomes the one whose keys are next. */
  __device__ __forceinline__ void advance() {
    values_ = keys_;
    keys_.left = 0;
    if (!has_part()) return;
    const Part& part = parts()[part_];
    const uint32_t first = tile_ * kTileKeys + first_row();
    keys_.left = static_cast<int32_t>(part.tile.position + part.tile.tokens - first);
    const uint32_t num_pages = reread(cache_.dims[0]), planes = 2 * kv_heads();
#pragma unroll
    for (uint32_t i = 0; i < kLookups; ++i) {
      const bool wanted = static_cast<int32_t>(i * kRowsAtOnce) < keys_.left;
      if (wanted && page_[i] >= num_pages) Context::fail(MPK_ABORT_KERNEL);
      keys_.row[i] = page_[i] < num_pages ? (page_[i] * planes + part.tile.head) * PageSize + (first + i * kRowsAtOnce) % PageSize : kNoRow;
    }
    if (++tile_ == part.end && (++part_, has_part())) tile_ = parts()[part_].begin;
    look_up();
  }

  __device__ __forceinline__ void copy(const Rows& rows, uint32_t offset, uint32_t buffer) const {
    const uint32_t to = to_ + buffer * Places::kTileBytes;
    const uint64_t base = reread(cache_.addr) + chunk() * 16;
    uint64_t from = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCopies; ++i) {
      const bool first = i == 0 || !kOnePage;
      const uint32_t row = rows.row[kOnePage ? 0 : i];
      if (first) from = base + (row != kNoRow ? static_cast<uint64_t>(row + offset) * (Dim * 2) : 0);
      const uint32_t ahead = kOnePage ? i * kRowsAtOnce * Dim * 2 : 0;
      const bool valid = static_cast<int32_t>(i * kRowsAtOnce) < rows.left && row != kNoRow;
      /* Zeros where there is no key: a weight of 0 times what memory held may not be a number. */
      asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to + i * kRowsAtOnce * 128), "l"(from + ahead), "r"(valid ? 16u : 0u)
                   : "memory");
    }
  }

  __device__ __forceinline__ void issue(uint32_t pair) {
    if (pair < steps_) copy(keys_, 0, 2 * pair % kBuffers);
    if (pair > 0) copy(values_, kv_heads() * PageSize, (2 * pair + 1) % kBuffers);
    asm volatile("cp.async.commit_group;" ::: "memory");
    advance();
  }

  __device__ __forceinline__ uint32_t kv_heads() const { return reread(cache_.dims[1]) / 2; }

  /* In shared memory: read when they are needed, since registers are scarce. */
  const mpk_operand& cache_;
  const uint32_t& num_parts_;
  const uint32_t warpgroup_, steps_;
  uint32_t to_, work_;
  uint32_t part_, tile_; /* whose pages are being looked up */
  uint32_t page_[kLookups] = {};
  Rows keys_ = {}, values_ = {}; /* of the next pair */
};

}  // namespace attention_prefill
}  // namespace gpu
}  // namespace mpk
