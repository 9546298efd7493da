/* Norm and rope of the queries and keys of some rows and one key-value head. Keys and values go to their pages. Queries
 * go to a separate tensor, in the order of the fragments of `attention_prefill`.
 *
 * A head takes 16 bytes of each of some lanes, so a warp processes several heads of a row at a time. The next rows are copied to
 * shared memory while it processes the current row. With one row ahead, in registers, 2,048 rows took 41 us, now 25 (8B, H200). */
#pragma once

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
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    float weights[2][8] = {};
    if constexpr (QkNorm) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) unpack(load_global16(context.input(4 + i).addr + context.lane % kLanes * 16), weights[i]);
    }
    const float eps = context.params<mpk_attention_append_params>().eps;
    const Rows ahead(context);
#pragma unroll 1
    for (uint32_t begin = 0; begin < rows; begin += 32 * kComputeWarps) {
      if (begin != 0) places = find(context, first, rows, begin);
      const uint32_t count = rows > begin + context.warp ? min((rows - begin - context.warp + kComputeWarps - 1) / kComputeWarps, 32u) : 0;
#pragma unroll 1
      for (uint32_t item = 0; item < queries + 2; item += kAtOnce * kBatch) {
        const auto fetch = [&](uint32_t i) {
          const uint32_t position = __shfl_sync(0xFFFFFFFFu, places.position, i % 32);
          if (i < count) ahead.fetch(context, i, begin + context.warp + i * kComputeWarps, position, queries, item);
          asm volatile("cp.async.commit_group;" ::: "memory");
        };
#pragma unroll 1
        for (uint32_t i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
          /* Waits for row i, in all lanes, because they share the row of the rope. */
          asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
          __syncwarp();
          finish(context, ahead, i, begin + context.warp + i * kComputeWarps, __shfl_sync(0xFFFFFFFFu, places.row, i), queries, item, weights, eps);
          __syncwarp();
          fetch(i + kAhead);
        }
      }
    }
    /* No copy may be in flight when the next task uses the memory. */
    asm volatile("cp.async.wait_all;" ::: "memory");
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kLanes = Dim / 8;      /* of a head */
  static constexpr uint32_t kAtOnce = 32 / kLanes; /* heads of a load */
  static constexpr uint32_t kBatch = 4;            /* loads at a time */
  static constexpr uint32_t kRowBytes = kBatch * 512 + Dim * 4;
  static constexpr uint32_t kMostAhead = kWorkBytes / (kRowBytes * kComputeWarps);
  static constexpr uint32_t kAhead = kMostAhead < 4 ? kMostAhead : 4; /* a warp's rows that are being copied or processed */
  static_assert(kAhead > 0, "the work area is too small for a row of each warp");
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;

  struct Places {
    uint32_t position, row; /* in the sequence, in the cache */
  };

  /* A warp's rows in shared memory: the items of a batch, where each lane reads what it copied itself, and the rope of the position. */
  class Rows {
   public:
    __device__ __forceinline__ explicit Rows(const Context& context)
        : base_(shared_address(context.work()) + context.warp * (kAhead * kRowBytes)), lane_(context.lane) {}

    /* The items of a row are its queries, its key and its value. */
    __device__ __forceinline__ void fetch(const Context& context, uint32_t i, uint32_t row, uint32_t position, uint32_t queries, uint32_t first) const {
      const uint32_t to = base_ + i % kAhead * kRowBytes + lane_ * 16;
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t item = first + b * kAtOnce + lane_ / kLanes;
        if (item >= queries + 2) break;
        const mpk_operand& from = context.input(item < queries ? 0 : item == queries ? 1 : 2);
        const uint64_t at = static_cast<uint64_t>(row) * from.strides[0] + (item < queries ? item * Dim : 0) + lane_ % kLanes * 8;
        copy(to + b * 512, from.addr + at * 2);
      }
      const mpk_operand& rope = context.input(3);
      if (lane_ < Dim / 4) copy(to + kBatch * 512, rope.addr + static_cast<uint64_t>(position) * rope.strides[0] * 4 + lane_ * 16);
    }
    __device__ __forceinline__ uint4 value(uint32_t i, uint32_t b) const { return load_shared16(base_ + i % kAhead * kRowBytes + b * 512 + lane_ * 16); }
    /* Cosine and sine of the lane's 8 elements. Two elements that are half a head apart have the same. */
    __device__ __forceinline__ void rope(uint32_t i, float (&cosine)[8], float (&sine)[8]) const {
      const uint32_t from = base_ + i % kAhead * kRowBytes + kBatch * 512 + lane_ % (kLanes / 2) * 32;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint4 c = load_shared16(from + half * 16), s = load_shared16(from + Dim * 2 + half * 16);
        const uint32_t cw[4] = {c.x, c.y, c.z, c.w}, sw[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
          cosine[4 * half + e] = __uint_as_float(cw[e]);
          sine[4 * half + e] = __uint_as_float(sw[e]);
        }
      }
    }

   private:
    static __device__ __forceinline__ void copy(uint32_t to, uint64_t from) {
      asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
    }

    uint32_t base_, lane_;
  };

  /* Of row begin + warp + 8 lane of the task. */
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

  static __device__ __forceinline__ void finish(const Context& context, const Rows& rows, uint32_t number, uint32_t row, uint32_t cache_row,
                                                uint32_t queries, uint32_t first, const float (&weights)[2][8], float eps) {
    const uint32_t lane = context.lane, chunk = lane % kLanes;
    float cosine[8], sine[8];
    rows.rope(number, cosine, sine);
    const mpk_operand &out = context.output(0), &cache = context.output(1);
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      if (first + b * kAtOnce >= queries + 2) break;
      const uint32_t item = first + b * kAtOnce + lane / kLanes;
      const uint4 value = rows.value(number, b);
      float x[8];
      unpack(value, x);
      if constexpr (QkNorm) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
#pragma unroll
        for (uint32_t s = kLanes / 2; s > 0; s /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, s);
        const float inverse = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(Dim), eps));
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) x[i] = x[i] * inverse * (item < queries ? weights[0][i] : weights[1][i]);
      }
      uint32_t w[4], turned[8];
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], kLanes / 2);
        const float side = other * sine[i];
        turned[i] = __float_as_uint(fmaf(x[i], cosine[i], chunk < kLanes / 2 ? -side : side));
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) w[i] = attention_prefill::packed<Dtype>(__uint_as_float(turned[2 * i]), __uint_as_float(turned[2 * i + 1]));
      const uint4 natural = item == queries ? make_uint4(w[0], w[1], w[2], w[3]) : value;
      /* Four lanes have 32 elements; a lane of the product has pairs t, t + 4, t + 8, t + 12 of them. */
      attention_prefill::transpose_quad(w, lane);
      if (item < queries) {
        const uint64_t at = static_cast<uint64_t>(row) * out.strides[0] + item * Dim + chunk * 8;
        *reinterpret_cast<uint4*>(out.addr + at * 2) = make_uint4(w[0], w[1], w[2], w[3]);
      } else if (item < queries + 2 && cache_row != kNoRow) {
        const uint64_t to = cache_row + (item == queries ? 0 : static_cast<uint64_t>(cache.dims[1] / 2) * PageSize);
        *reinterpret_cast<uint4*>(cache.addr + (to * Dim + chunk * 8) * 2) = natural;
      }
    }
  }
};

}  // namespace gpu
}  // namespace mpk
