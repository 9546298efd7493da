/* The work of a task of the prefill operators. One warp determines it before the task's inputs are ready. */
#pragma once

#include "gpu/loads.cuh"
#include "gpu/task.cuh"
#include "gpu/wide_layout.cuh"
#include "tasks/attention_prefill/params.h"
#include "tasks/attention_prefill/units.h"

namespace mpk {
namespace gpu {
namespace attention_prefill {

using prefill::kTileKeys;
using prefill::kTileRows;

/* The iteration's slots. The sums of the weights before each slot are in shared memory. */
class Slots {
 public:
  __device__ Slots(const Context& context, const uint64_t* before) : count_(context.slot->num_active), before_(before) {}
  __device__ __forceinline__ uint32_t count() const { return count_; }
  __device__ __forceinline__ prefill::Slot at(uint32_t a) const {
    const Context::Active numbers = Context::active(a);
    return {numbers.num_rows, numbers.context};
  }
  __device__ __forceinline__ uint64_t before(uint32_t a) const { return before_[a]; }

  /* By all lanes of one warp: writes the count() + 1 sums of weights. */
  __device__ __forceinline__ void fill(const prefill::Shape& shape, uint64_t* before, uint32_t lane) const {
    uint64_t sum = 0;
#pragma unroll 1
    for (uint32_t first = 0; first <= count_; first += 32) {
      const uint32_t a = first + lane;
      uint64_t own = a < count_ ? prefill::slot_weight(shape, at(a)) : 0, up_to = own;
#pragma unroll
      for (uint32_t step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
        if (lane >= step) up_to += other;
      }
      if (a <= count_) before[a] = sum + up_to - own;
      sum += __shfl_sync(0xFFFFFFFFu, up_to, 31);
    }
    __syncwarp();
  }

 private:
  uint32_t count_;
  const uint64_t* before_;
};

/* Position of a query tile in the tensors. */
struct Tile {
  uint32_t first_row; /* row of its first token */
  uint32_t tokens;
  uint32_t position; /* position of its first token */
  uint32_t head;     /* key-value head */
  uint32_t pages;    /* start of the slot's part of the page table */
};

__device__ __forceinline__ Tile tile_at(const Context& context, const prefill::Shape& shape, const prefill::Place& place) {
  const Context::Active numbers = Context::active(place.active);
  const uint32_t first = place.tile * shape.tokens, left = numbers.num_rows - first;
  return {numbers.first_row + first, left < shape.tokens ? left : shape.tokens, numbers.context + first, place.head,
          numbers.slot * context.pages_per_slot()};
}

/* Maps a row of a query tile to its token and query head. */
class RowMap {
 public:
  __device__ explicit RowMap(const mpk_attention_prefill_params& params)
      : group_(params.group), inverse_((65535 + params.group) / params.group), skipped_(params.skipped), queries_(params.queries) {}
  /* Exact, because rows and groups are at most kTileRows. */
  __device__ __forceinline__ uint32_t token(uint32_t row) const { return row * inverse_ >> 16; }
  /* The rank's query head; queries() or more if another rank has the head. */
  __device__ __forceinline__ uint32_t head(uint32_t kv_head, uint32_t row) const { return kv_head * group_ + row - token(row) * group_ - skipped_; }
  __device__ __forceinline__ uint32_t queries() const { return queries_; }
  /* Offset in elements of a row of `tile` in a tensor [rows, queries * dim] with this stride. False if the tensor has no such row. */
  __device__ __forceinline__ bool find(const Tile& tile, uint32_t row, uint32_t stride, uint32_t dim, uint64_t* at) const {
    const Found found = find(tile, row);
    *at = static_cast<uint64_t>(found.row) * stride + found.head * dim;
    return found.valid;
  }

  /* A row of the tensor and a query head; `valid`: both exist. */
  struct Found {
    uint32_t row, head;
    bool valid;
  };
  __device__ __forceinline__ Found find(const Tile& tile, uint32_t row) const {
    const uint32_t token_of = token(row), head_of = head(tile.head, row);
    return {tile.first_row + token_of, head_of, token_of < tile.tokens && head_of < queries_};
  }

 private:
  uint32_t group_, inverse_, skipped_, queries_;
};

/* Relative error about 2^-22; 0 for -infinity. */
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

/* Transposes the words of four lanes: lane i gets word i of each. */
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], uint32_t lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t a = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[2] : w[3], 1);
  if (odd) w[0] = a, w[2] = b;
  else w[1] = a, w[3] = b;
  const uint32_t c = __shfl_xor_sync(0xFFFFFFFFu, high ? w[0] : w[2], 2), d = __shfl_xor_sync(0xFFFFFFFFu, high ? w[1] : w[3], 2);
  if (high) w[0] = c, w[1] = d;
  else w[2] = c, w[3] = d;
}

/* Where the result of a row of a query tile is stored. `Columns`: of a column tile if the tensor is in MPK_LAYOUT_WIDE; 0: it has rows. */
template <uint32_t Dim, uint32_t Columns>
struct Result {
  static_assert(Dim % Columns == 0, "a head has whole column tiles");
  WideHead<Columns> head;
  bool valid;

  __device__ __forceinline__ Result(const RowMap::Found& at, const mpk_operand& out) : head(out, at.row, at.head * Dim), valid(at.valid) {}
  /* Writes four blocks of 8 columns, starting at column `column` of the head. A lane has columns 2t and 2t + 1 of each block. Of 16
   * columns, the even pairs are adjacent, and so are the odd pairs. Lanes t and t + 2 have them, and each stores those of one group of
   * 16. */
  template <uint32_t Dtype>
  __device__ __forceinline__ void store(uint32_t column, const float (&low)[4], const float (&high)[4], float factor, uint32_t lane) const {
    uint32_t w[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) w[i] = packed<Dtype>(low[i] * factor, high[i] * factor);
    const bool second = lane & 2;
    const uint32_t a = __shfl_xor_sync(0xFFFFFFFFu, second ? w[0] : w[2], 2), b = __shfl_xor_sync(0xFFFFFFFFu, second ? w[1] : w[3], 2);
    const uint4 piece = second ? make_uint4(a, w[2], b, w[3]) : make_uint4(w[0], a, w[1], b);
    if (valid) *reinterpret_cast<uint4*>(head.piece(column + (second ? 16 : 0), lane & 1)) = piece;
  }
};

template <uint32_t Dim>
struct Result<Dim, 0> {
  uint64_t address;
  bool valid;

  __device__ __forceinline__ Result(const RowMap::Found& at, const mpk_operand& out)
      : address(out.addr + (static_cast<uint64_t>(at.row) * out.strides[0] + at.head * Dim) * 2), valid(at.valid) {}
  template <uint32_t Dtype>
  __device__ __forceinline__ void store(uint32_t column, const float (&low)[4], const float (&high)[4], float factor, uint32_t lane) const {
    uint32_t w[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) w[i] = packed<Dtype>(low[i] * factor, high[i] * factor);
    transpose_quad(w, lane);
    if (valid) reinterpret_cast<uint4*>(address)[column / 8 + lane % 4] = make_uint4(w[0], w[1], w[2], w[3]);
  }
};

/* Sums of a partial result, in the layout of the products' fragments: 4 floats per lane for 16 rows and 8 columns. */
__device__ __forceinline__ float4* partial_sums(const mpk_operand& partial, uint32_t index, uint32_t dim, uint32_t sixteen, uint32_t block, uint32_t lane) {
  const uint64_t at = (static_cast<uint64_t>(index) * (kTileRows / 16) + sixteen) * (dim / 8) + block;
  return reinterpret_cast<float4*>(partial.addr) + at * 32 + lane;
}
/* (maximum in powers of 2, sum) of a row. */
__device__ __forceinline__ float2* partial_state(const mpk_operand& state, uint32_t index, uint32_t row) {
  return reinterpret_cast<float2*>(state.addr) + static_cast<uint64_t>(index) * kTileRows + row;
}

}  // namespace attention_prefill
}  // namespace gpu
}  // namespace mpk
