/* Norm and rope of the queries and keys of some rows and one key-value head. Keys and values go to their pages. Queries
 * go to a separate tensor.
 *
 * A lane has 8 elements of the first half of a head and the 8 elements that the rope pairs with them. So the rope needs no
 * shuffles, and the sum of squares three. A warp processes several heads in a pass: the queries of a row, or the keys and values of
 * two rows. The next rows are copied to shared memory meanwhile. All addresses are computed before the loop over rows. With 8
 * elements per lane, a row took 520 instructions and 50 shuffles (8B, H200: 25 us for 2,048 rows), now 310 and 14. */
#pragma once

#include "tasks/attention/cache_layout.cuh"
#include "tasks/attention_append/params.h"
#include "tasks/attention_prefill/gpu_setup.cuh"

namespace mpk {
namespace gpu {

template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, bool QkNorm>
struct AttentionAppend : TaskCode {
  static_assert(Dim == 64 || Dim == 128, "attention_append");
  using Element = typename Number<Dtype>::Type;

  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t first = static_cast<uint32_t>(context.slot->task.args[0]);
    const uint32_t in_use = context.slot->num_rows, most = context.input(0).dims[0];
    const uint32_t rows = in_use <= first ? 0 : in_use - first < most ? in_use - first : most;
    const uint32_t queries = context.input(0).dims[1] / Dim;
    /* The places of a warp's first rows, one per lane. */
    Places places = find(context, first, rows, 0);
    /* They are constant, so their loads need not wait for the task's events. */
    uint4 norms[2][2] = {};
    if constexpr (QkNorm) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) norms[i / 2][i % 2] = load_global16(context.input(4 + i / 2).addr + i % 2 * Dim + context.lane % kLanes * 16);
    }
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    float weights[2][2][8] = {};
    if constexpr (QkNorm) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) unpack(norms[i / 2][i % 2], weights[i / 2][i % 2]);
    }
    const float eps = context.params<mpk_attention_append_params>().eps;
    /* The thread's index is that of `context`. Values of threadIdx would be kept in registers from the kernel's start, through all
     * tasks. */
    Rows ahead(context);
    const Results results(context, ahead);
#pragma unroll 1
    for (uint32_t begin = 0; begin < rows; begin += 32 * kComputeWarps) {
      if (begin != 0) places = find(context, first, rows, begin);
      const uint32_t count = rows > begin + context.warp ? min((rows - begin - context.warp + kComputeWarps - 1) / kComputeWarps, 32u) : 0;
#pragma unroll 1
      for (uint32_t head = 0; head == 0 || head < queries; head += kHeads) {
        ahead.start(context, begin + context.warp, head, queries);
        const auto fetch = [&](uint32_t group) {
#pragma unroll
          for (uint32_t r = 0; r < kGroup; ++r) {
            const uint32_t i = group * kGroup + r, position = __shfl_sync(0xFFFFFFFFu, places.position, i % 32);
            if (i < count) ahead.fetch(i, position);
          }
          asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll 1
        for (uint32_t group = 0; group < kDepth; ++group) fetch(group);
#pragma unroll 1
        for (uint32_t group = 0; group * kGroup < count; ++group) {
          /* Waits for the group, in all lanes, because a lane reads what others have copied. */
          asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
          __syncwarp();
          const uint32_t i = group * kGroup;
#pragma unroll
          for (uint32_t r = 0; r < kGroup; ++r) {
            if (i + r < count) finish_queries(ahead, results, i + r, begin + context.warp + (i + r) * kComputeWarps, head, queries, weights[0], eps);
          }
          if (head == 0) finish_key_values(ahead, results, i, count, __shfl_sync(0xFFFFFFFFu, places.row, (i + ahead.group_row()) % 32), weights[1], eps);
          __syncwarp();
          fetch(group + kDepth);
        }
      }
    }
    /* No copy may be in flight when the next task uses the memory. */
    asm volatile("cp.async.wait_all;" ::: "memory");
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kLanes = Dim / 16;     /* of a head */
  static constexpr uint32_t kHeads = 32 / kLanes;  /* of a pass */
  static constexpr uint32_t kGroup = 2;            /* rows whose keys and values are one pass */
  static constexpr uint32_t kHeadBytes = Dim * 2;
  static constexpr uint32_t kRopeAt = (kHeads + 2) * kHeadBytes, kRowBytes = kRopeAt + Dim * 4;
  static constexpr uint32_t kMostDepth = kWorkBytes / (kGroup * kRowBytes * kComputeWarps);
  static constexpr uint32_t kDepth = kMostDepth < 3 ? kMostDepth : 3; /* a warp's groups that are being copied or processed */
  static_assert(kDepth > 0, "the work area is too small for a group of rows of each warp");
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;

  struct Places {
    uint32_t position, row; /* in the sequence, in the cache */
  };

  /* A warp's rows in shared memory: up to kHeads queries, the key, the value, and the rope of the position. */
  class Rows {
   public:
    __device__ __forceinline__ explicit Rows(const Context& context)
        : work_(shared_address(context.work()) + context.warp * (kDepth * kGroup * kRowBytes)), lane_(context.lane),
          rope_(context.input(3).addr + context.lane * 16), rope_stride_(context.input(3).strides[0] * 4) {}

    /* The warp's rows are `first` and every kComputeWarps-th after it. Their heads: queries from `head` on, and with the first of them
     * key and value. */
    __device__ __forceinline__ void start(const Context& context, uint32_t first, uint32_t head, uint32_t queries) {
#pragma unroll
      for (uint32_t b = 0; b < kLoads; ++b) {
        const uint32_t chunk = b * 32 + lane_, item = chunk / kChunks;
        const mpk_operand& from = context.input(item < kHeads ? 0 : item == kHeads ? 1 : 2);
        const uint64_t stride = static_cast<uint64_t>(from.strides[0]) * 2;
        from_[b] = from.addr + first * stride + (item < kHeads ? head + item : 0) * kHeadBytes + chunk % kChunks * 16;
        step_[b] = from.strides[0] * (2 * kComputeWarps);
        valid_[b] = item < kHeads ? head + item < queries : item < kHeads + 2 && head == 0;
      }
    }
    __device__ __forceinline__ void fetch(uint32_t i, uint32_t position) const {
      const uint32_t to = row(i) + lane_ * 16;
#pragma unroll
      for (uint32_t b = 0; b < kLoads; ++b) copy(to + b * 512, from_[b] + static_cast<uint64_t>(i) * step_[b], valid_[b]);
      copy(to + kRopeAt, rope_ + static_cast<uint64_t>(position) * rope_stride_, lane_ < Dim / 4);
    }
    __device__ __forceinline__ uint32_t row(uint32_t i) const { return work_ + i % (kDepth * kGroup) * kRowBytes; }

    /* The lane's head in a pass, its chunk of 8 elements in each half of the head; its row in a pass of keys and values. */
    __device__ __forceinline__ uint32_t head() const { return lane_ / kLanes; }
    __device__ __forceinline__ uint32_t chunk() const { return lane_ % kLanes; }
    __device__ __forceinline__ uint32_t group_row() const { return head() / 2 % kGroup; }
    __device__ __forceinline__ uint32_t lane() const { return lane_; }

   private:
    static constexpr uint32_t kChunks = Dim / 8; /* of 16 bytes, of a head */
    static constexpr uint32_t kLoads = ((kHeads + 2) * kChunks + 31) / 32;

    static __device__ __forceinline__ void copy(uint32_t to, uint64_t from, bool valid) {
      asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; @p cp.async.cg.shared.global [%0],[%1],16;}" ::"r"(to), "l"(from),
                   "r"(static_cast<uint32_t>(valid))
                   : "memory");
    }

    uint32_t work_, lane_;
    uint64_t rope_;
    uint32_t rope_stride_;
    uint64_t from_[kLoads] = {};
    uint32_t step_[kLoads] = {};
    bool valid_[kLoads] = {};
  };

  /* Where results go: the first bytes that a lane writes of a row of the queries, and the first row of the cache. */
  struct Results {
    __device__ __forceinline__ Results(const Context& context, const Rows& rows)
        : queries(context.output(0).addr + rows.head() * kHeadBytes + rows.chunk() * 16), stride(context.output(0).strides[0] * 2),
          cache(context.output(1).addr) {
      if (rows.head() % 2 != 0) cache += static_cast<uint64_t>(context.output(1).dims[1] / 2) * PageSize * kHeadBytes; /* values */
    }
    uint64_t queries;
    uint32_t stride;
    uint64_t cache;
  };

  /* The places of row begin + warp + 8 lane of the task. */
  static __device__ __forceinline__ Places find(Context& context, uint32_t first, uint32_t rows, uint32_t begin) {
    const uint32_t at = begin + context.warp + context.lane * kComputeWarps;
    if (at >= rows) return {0, kNoRow};
    const mpk_batch* batch = context.batch();
    const uint32_t active = static_cast<uint32_t>(batch->row_active[first + at]), position = static_cast<uint32_t>(batch->row_position[first + at]);
    const mpk_operand& cache = context.output(1);
    const uint32_t planes = cache.dims[1], page_in_slot = position / PageSize;
    uint32_t page = kNoRow;
    if (active < context.slot->num_active && page_in_slot < context.pages_per_slot())
      page = static_cast<uint32_t>(batch->page_table[static_cast<uint64_t>(Context::active(active).slot) * context.pages_per_slot() + page_in_slot]);
    if (page >= cache.dims[0] || position >= context.input(3).dims[0]) {
      context.fail(MPK_ABORT_KERNEL);
      return {0, kNoRow};
    }
    return {position, (page * planes + static_cast<uint32_t>(context.slot->task.args[1])) * PageSize + position % PageSize};
  }

  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[8]) {
    const Element* e = reinterpret_cast<const Element*>(&v);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) x[i] = Number<Dtype>::to_f32(e[i]);
  }

  /* Norm and rope of the lane's elements of a head at `from`, both in shared memory. */
  static __device__ __forceinline__ void turn(uint32_t from, uint32_t rope, const float (&weights)[2][8], float eps, uint4 (&raw)[2], uint32_t (&turned)[2][4]) {
    uint4 sines[4];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) raw[half] = load_shared16(from + half * Dim);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sines[i] = load_shared16(rope + i / 2 * (Dim * 2) + i % 2 * 16);
    float x[2][8];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) unpack(raw[half], x[half]);
    if constexpr (QkNorm) {
      float squares[2] = {};
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) squares[half] = fmaf(x[half][i], x[half][i], squares[half]);
      float sum = squares[0] + squares[1];
#pragma unroll
      for (uint32_t s = kLanes / 2; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
      const float inverse = rsqrtf(fmaf(sum, 1.0f / static_cast<float>(Dim), eps));
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) x[half][i] = x[half][i] * inverse * weights[half][i];
    }
    const uint32_t cosine[8] = {sines[0].x, sines[0].y, sines[0].z, sines[0].w, sines[1].x, sines[1].y, sines[1].z, sines[1].w};
    const uint32_t sine[8] = {sines[2].x, sines[2].y, sines[2].z, sines[2].w, sines[3].x, sines[3].y, sines[3].z, sines[3].w};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const float c = __uint_as_float(cosine[i]), s = __uint_as_float(sine[i]), low = x[0][i], high = x[1][i];
      x[0][i] = fmaf(low, c, -(high * s));
      x[1][i] = fmaf(high, c, low * s);
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) turned[half][i] = packed<Dtype>(x[half][2 * i], x[half][2 * i + 1]);
  }

  /* The queries of row `row`, the warp's row `number`, from `first` on. */
  static __device__ __forceinline__ void finish_queries(const Rows& rows, const Results& results, uint32_t number, uint32_t row, uint32_t first,
                                                        uint32_t queries, const float (&weights)[2][8], float eps) {
    const uint32_t at = rows.row(number);
    uint4 raw[2];
    uint32_t turned[2][4];
    turn(at + rows.head() * kHeadBytes + rows.chunk() * 16, at + kRopeAt + rows.chunk() * 32, weights, eps, raw, turned);
    const uint64_t to = results.queries + static_cast<uint64_t>(row) * results.stride + first * kHeadBytes;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (first + rows.head() < queries)
        *reinterpret_cast<uint4*>(to + half * Dim) = make_uint4(turned[half][0], turned[half][1], turned[half][2], turned[half][3]);
    }
  }

  /* Keys and values of the warp's rows from `first` on, of a group. `cache_row`: of the lane's row. */
  static __device__ __forceinline__ void finish_key_values(const Rows& rows, const Results& results, uint32_t first, uint32_t count, uint32_t cache_row,
                                                           const float (&weights)[2][8], float eps) {
    const bool is_key = rows.head() % 2 == 0;
    const uint32_t at = rows.row(first + rows.group_row());
    uint4 raw[2];
    uint32_t turned[2][4];
    turn(at + (is_key ? kHeads : kHeads + 1) * kHeadBytes + rows.chunk() * 16, at + kRopeAt + rows.chunk() * 32, weights, eps, raw, turned);
    using Layout = attention::CacheLayout<sizeof(Element), Dim, PageSize>;
    const uint64_t to = results.cache + Layout::row(static_cast<uint64_t>(cache_row)) * sizeof(Element);
    if (rows.head() / 2 >= kGroup || first + rows.group_row() >= count || cache_row == kNoRow) return;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(to + Layout::element(half * (Dim / 2) + rows.chunk() * 8, cache_row) * sizeof(Element)) =
          is_key ? make_uint4(turned[half][0], turned[half][1], turned[half][2], turned[half][3]) : raw[half];
  }
};

}  // namespace gpu
}  // namespace mpk
