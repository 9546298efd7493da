/* The linear family: x, prepared as rows (linear_rows.cuh), times a weight in MPK_LAYOUT_FRAGMENT that the loader
 * warp streams (linear_product.cuh), plus bias and residual. A gated product has its weight in MPK_LAYOUT_PAIRED: a tile has
 * 8 gates and then their ups, and gives 8 columns of the output.
 *
 * Order of the stages, the same in `load` and `run`: blocks of output rows; groups of tiles; segments of k whose
 * rows fit into shared memory; tiles; stages. If K has more than one segment, the sums of a group's tiles are
 * carried from segment to segment in shared memory. */
#pragma once

#include "gpu/linear_rows.cuh"
#include "gpu/push.cuh"

namespace mpk {
namespace gpu {

/* Weight, X, Norm: enum mpk_dtype of weight, x and norm weight. MostK: maximum number of the weight's columns on this
 * rank. N8: rows that are multiplied at a time, in units of eight. Everything else is known only at run time, so that the
 * products of a layer share one or two kernel variants. That keeps compilation short and the kernel small.
 *
 * Parts above 1: several tasks share the k of a tile, in this product or in those before it. A normed x is so many summands
 * [Parts, rows, k]. Other sources have 2: the task may have a part of k (some of the weight's columns) and leave out bias or residual,
 * and the residual may be summands. */
template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t N8, uint32_t X, uint32_t Norm, uint32_t Parts = 1>
struct Linear : TaskCode {
  static constexpr bool kInlined = true;
  static __device__ int run(Context& context);
  static __device__ bool load(Loader& loader);

 private:
  using Left = LeftSide<Weight, Source, MostK, X, Norm, Source == kRmsNorm ? Parts : 1>;
  /* Whether the task may have a part of k, and the residual may be summands. */
  static constexpr bool kShares = Parts > 1 && Source != kRmsNorm;
  static constexpr uint32_t kWeight = Source == kRmsNorm ? 2 : 1;
  static constexpr uint32_t kColumns = N8 * 8; /* rows of the output, columns of the product */
  static constexpr uint32_t kPasses = (kColumns * 16 + kComputeThreads - 1) / kComputeThreads;

  /* The work area: norms, the plan, shares of the sums, rows; the carried sums are at its end. */
  static constexpr uint32_t kShareFloats = kColumns * 16; /* of a warp */
  static constexpr uint32_t kShareBuffers = N8 == 1 ? 2 : 1;
  static constexpr uint32_t kPlanAt = Left::kNormFloats * 4, kPlanBytes = 64;
  static constexpr uint32_t kSharesAt = kPlanAt + kPlanBytes;
  static constexpr uint32_t kRowsAt = kSharesAt + kShareBuffers * kComputeWarps * kShareFloats * 4;
  static constexpr uint32_t kRoom = kWorkBytes - kRowsAt;
  static constexpr uint32_t kCarriedBytes = 16 * 4; /* of a tile's row */
  static constexpr uint32_t kLeastSegment = 2 * kStageBlocks<Weight>;

  /* Bytes between rows. For 2-byte types they are such that 8 rows use all banks. */
  static __host__ __device__ constexpr uint32_t row_bytes(uint32_t blocks) {
    return (Weight == MPK_F32 ? blocks : (blocks + 2) / 4 * 4 + 1) * kRowBlockBytes<Weight>;
  }
  static_assert(kWorkBytes % 16 == 0, "the norm weight's place must be aligned");
  static_assert(kColumns * (row_bytes(kLeastSegment) + 2 * kCarriedBytes) <= kRoom, "the work area is too small for the rows of a segment");

  static __device__ __forceinline__ const mpk_linear_params& params_of(const TaskSlot& slot) {
    return *reinterpret_cast<const mpk_linear_params*>(slot.params);
  }

  /* Read from shared memory where needed, because the registers are for the rows. */
  struct Plan {
    uint32_t traits;    /* Traits */
    uint32_t blocks;    /* of k */
    uint32_t rows, tiles; /* tiles of the weight */
    uint32_t row_block; /* rows at once */
    uint32_t group;     /* tiles whose sums are carried */
    uint32_t segment;   /* blocks of k */
  };

  enum Traits : uint32_t { kGated = 1, kHasBias = 2, kAddsBias = 4, kAddsResidual = 8, kCarries = 16 };

  static __device__ __forceinline__ Plan plan(const TaskSlot& slot) {
    Plan p;
    const mpk_linear_params& params = params_of(slot);
    const uint32_t kind = params.rows_kind;
    const uint32_t capacity = slot.operands[slot.task.num_inputs].dims[0];
    p.rows = kind == 0 ? slot.num_rows : kind == 1 ? slot.num_samples : capacity;
    p.rows = min(p.rows, capacity);
    p.blocks = (slot.operands[kWeight].dims[1] + 15) / 16;
    p.tiles = (slot.operands[kWeight].dims[0] + 15) / 16;
    p.row_block = p.rows;
    if (p.rows > kColumns) {
      const uint32_t row_blocks = (p.rows + kColumns - 1) / kColumns;
      p.row_block = (p.rows + row_blocks - 1) / row_blocks;
    }
    p.group = p.tiles;
    p.segment = p.blocks;
    if (p.row_block * row_bytes(p.blocks) > kRoom) choose_segment(p);
    p.traits = params.gated * kGated | params.has_bias * kHasBias | (params.has_bias & params.add_bias) * kAddsBias |
               params.has_residual * kAddsResidual | (p.segment != p.blocks ? kCarries : 0u);
    if constexpr (kShares) {
      const int32_t* const leaves_out = slot.task.args;
      if (leaves_out[0] != 0) p.traits &= ~static_cast<uint32_t>(kAddsBias);
      if (leaves_out[1] != 0) p.traits &= ~static_cast<uint32_t>(kAddsResidual);
    }
    return p;
  }

  /* Blocks from one tile of the weight to the next. */
  static __device__ __forceinline__ uint32_t tile_blocks(const TaskSlot& slot, const Plan& p) {
    if constexpr (kShares) return reread(slot.operands[kWeight].strides[0]) / 16;
    else return p.blocks;
  }

  /* A residual that may be summands [parts, rows, columns]. */
  static __device__ __forceinline__ float sum_of_residual(const mpk_operand& operand, uint32_t row, uint32_t column) {
    const bool stacked = operand.ndim == 3;
    const float* const first = reinterpret_cast<const float*>(operand.addr) + static_cast<uint64_t>(row) * operand.strides[stacked ? 1 : 0] + column;
    float sum = *first;
    for (uint32_t part = 1, parts = stacked ? operand.dims[0] : 1; part < parts; ++part) sum += first[static_cast<uint64_t>(part) * operand.strides[0]];
    return sum;
  }

  /* The longest segment with which all tiles form one group; if that is too short, the shortest segment and more
   * groups. */
  static __device__ __forceinline__ void choose_segment(Plan& p) {
    const uint32_t room_of_row = kRoom / p.row_block;
    p.group = min(p.tiles, room_of_row / kCarriedBytes);
    const uint32_t blocks = (room_of_row - p.group * kCarriedBytes) / kRowBlockBytes<Weight>;
    constexpr uint32_t kPadding = 3; /* blocks of row_bytes, at most */
    p.segment = blocks < kPadding ? 0 : (blocks - kPadding) / kStageBlocks<Weight> * kStageBlocks<Weight>;
    if (p.segment < kLeastSegment) {
      p.segment = kLeastSegment;
      p.group = (room_of_row - row_bytes(kLeastSegment)) / kCarriedBytes;
    }
  }

  /* The norm weight comes after the rows, if there is room for it and no sums are carried. */
  static __device__ __forceinline__ Left left_side(Context& context, const Plan& p) {
    const uint32_t norm_bytes = Left::norm_bytes(context.input(kWeight).dims[1]);
    const bool room = (p.traits & kCarries) == 0 && p.row_block * row_bytes(p.blocks) + norm_bytes <= kRoom;
    return Left(context, kWeight, reinterpret_cast<float*>(work_area()), norm_bytes != 0 && room ? work_area() + (kWorkBytes - norm_bytes) : nullptr);
  }

  static __device__ __forceinline__ Plan& kept() { return *reinterpret_cast<Plan*>(work_area() + kPlanAt); }
  static_assert(sizeof(Plan) <= kPlanBytes, "the plan's place");

  static __device__ __forceinline__ int multiply(Context& context, StageReader& reader);
};

template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t N8, uint32_t X, uint32_t Norm, uint32_t Parts>
__device__ inline bool Linear<Weight, Source, MostK, N8, X, Norm, Parts>::load(Loader& loader) {
  const Plan p = plan(*loader.slot);
  for (uint32_t row = 0; row < p.rows; row += p.row_block) {
    for (uint32_t group = 0; group < p.tiles; group += p.group) {
      const uint32_t group_end = min(group + p.group, p.tiles);
      for (uint32_t from = 0, blocks; from != p.blocks; from += blocks) {
        blocks = min(p.segment, p.blocks - from);
        for (uint32_t tile = group; tile < group_end; ++tile) {
          const uint8_t* at = reinterpret_cast<const uint8_t*>(loader.slot->operands[kWeight].addr) +
                              (static_cast<uint64_t>(tile) * tile_blocks(*loader.slot, p) + from) * kBlockBytes<Weight>;
          /* A single call, because it is inlined. */
          for (uint32_t left = blocks * kBlockBytes<Weight>, bytes; left != 0; left -= bytes, at += bytes) {
            bytes = min(left, kStageBytes);
            if (!loader.stream(at, bytes)) return false;
          }
        }
      }
    }
  }
  return true;
}

template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t N8, uint32_t X, uint32_t Norm, uint32_t Parts>
__device__ inline int Linear<Weight, Source, MostK, N8, X, Norm, Parts>::run(Context& context) {
  {
    const Plan p = plan(*context.slot);
    if (p.rows != 0) left_side(context, p).fetch_norm();
    if (context.thread == 0) kept() = p;
  }
  if (const int code = context.wait_inputs(); code != MPK_OK) return code;
  StageReader reader(context.lane);
  const int code = multiply(context, reader);
  if (context.thread == 0) reader.leave();
  return code;
}

template <uint32_t Weight, uint32_t Source, uint32_t MostK, uint32_t N8, uint32_t X, uint32_t Norm, uint32_t Parts>
__device__ __forceinline__ int Linear<Weight, Source, MostK, N8, X, Norm, Parts>::multiply(Context& context, StageReader& reader) {
  const Plan& p = kept();
  uint8_t* const work = work_area();
  float* const shares = reinterpret_cast<float*>(work + kSharesAt);
  uint8_t* const rows_at = work + kRowsAt;
  Left left = left_side(context, p);
  const mpk_operand& out = context.output(0);
  uint32_t buffer = 0;

  for (uint32_t first_row = 0; first_row < reread(p.rows); first_row += reread(p.row_block)) {
    const uint32_t rows = min(reread(p.row_block), reread(p.rows) - first_row), stride = row_bytes(reread(p.segment));
    bool done = false;
    if constexpr (N8 <= 2) {
      if ((reread(p.traits) & kCarries) == 0) {
        if (const int code = left.template put_held<kColumns>(first_row, rows, rows_at, stride, done); code != MPK_OK) return code;
      }
    }
    if (!done) {
      if (const int code = left.prepare(first_row, rows); code != MPK_OK) return code;
    }
    for (uint32_t group = 0; group < reread(p.tiles); group += reread(p.group)) {
      const uint32_t group_end = min(group + reread(p.group), reread(p.tiles));
      uint32_t from = 0;
      do { /* segments: at least one, also if K is 0 */
        const uint32_t blocks = min(reread(p.segment), reread(p.blocks) - from);
        if (!done) left.put(first_row, rows, from, blocks, rows_at, stride);
        if (const int code = context.sync(); code != MPK_OK) return code;
        const bool last = from + blocks == reread(p.blocks);
        const uint32_t num_columns = reread(context.input(kWeight).dims[0]);
        tell_state(kTakesStages);
        Product<Weight, N8> product(context, rows_at, rows, stride);
        for (uint32_t tile = group; tile < group_end; ++tile) {
          const uint32_t traits = reread(p.traits), gated = traits & kGated;
          /* The assignment of sums to threads. It rotates, so that with few rows the warps share the work. A warp has whole rows of the
           * tile: in a gated product, the sum of an up is eight lanes after that of its gate. */
          const uint32_t turned = (context.thread + tile % kComputeWarps * 32) % kComputeThreads;
          float bias[kPasses], residual[kPasses];
#pragma unroll
          for (uint32_t pass = 0; pass < kPasses; ++pass) {
            const uint32_t sum = turned + pass * kComputeThreads, row = sum / 16, column = tile * 16 + sum % 16;
            bias[pass] = residual[pass] = 0.0f;
            if (last && row < rows && column < num_columns) {
              if ((traits & kAddsBias) != 0) {
                /* Of gates and ups, each has its own bias. */
                const mpk_operand& operand = context.input(kWeight + 1 + (gated != 0 ? sum / MPK_PAIR_ROWS % 2 : 0));
                const uint32_t at = gated != 0 ? tile * MPK_PAIR_ROWS + sum % MPK_PAIR_ROWS : column;
                bias[pass] = load_as_f32(reinterpret_cast<const void*>(operand.addr), operand.dtype, at);
              }
              if ((traits & kAddsResidual) != 0) {
                const mpk_operand& operand = context.input(kWeight + 1 + ((traits & kHasBias) != 0 ? 1 : 0));
                if constexpr (kShares) residual[pass] = sum_of_residual(operand, first_row + row, column);
                else residual[pass] = reinterpret_cast<const float*>(row_address(operand, first_row + row))[column];
              }
            }
          }

          product.clear();
          uint32_t block = 0;
          for (; block + kStageBlocks<Weight> <= blocks; block += kStageBlocks<Weight>)
            if (!product.template stage<true>(reader, block, kStageBlocks<Weight>)) break;
          if (block < blocks) product.template stage<false>(reader, block, min(blocks - block, kStageBlocks<Weight>));

          if constexpr (kShareBuffers == 1) {
            if (const int code = context.sync(); code != MPK_OK) return code;
          }
          float* const tile_shares = shares + buffer * (kComputeWarps * kShareFloats);
          product.store(tile_shares + context.warp * kShareFloats);
          if constexpr (kShareBuffers == 2) buffer ^= 1;
          if (const int code = context.sync(); code != MPK_OK) return code;

#pragma unroll
          for (uint32_t pass = 0; pass < kPasses; ++pass) {
            const uint32_t sum = turned + pass * kComputeThreads, row = sum / 16;
            if (sum / 32 * 2 < rows) { /* the first of the warp's two rows, so the whole warp comes here */
              float value = 0.0f;
#pragma unroll
              for (uint32_t warp = 0; warp < kComputeWarps; ++warp) value += tile_shares[warp * kShareFloats + share_index(row, sum % 16)];
              if ((traits & kCarries) != 0 && row < rows) {
                float* const carried = reinterpret_cast<float*>(work + kWorkBytes) - ((tile - group + 1) * rows * 16) + sum;
                if (from != 0) value += *carried;
                if (!last) *carried = value;
              }
              if (last) {
                uint32_t column = tile * 16 + sum % 16;
                bool stores = row < rows && column < num_columns;
                if ((traits & kAddsBias) != 0) value += bias[pass];
                if ((traits & kAddsResidual) != 0) value += residual[pass];
                const uint32_t dtype = reread(out.dtype);
                if (gated != 0) {
                  value = rounded_to(dtype, value);
                  const float up = __shfl_down_sync(0xFFFFFFFFu, value, MPK_PAIR_ROWS);
                  value = up * silu(value);
                  column = tile * MPK_PAIR_ROWS + sum % MPK_PAIR_ROWS;
                  stores = stores && sum / MPK_PAIR_ROWS % 2 == 0;
                }
                if (stores) {
                  uint8_t* const to = row_address(out, first_row + row);
                  if (dtype == MPK_F32_FLAGGED) push_flagged(context, reinterpret_cast<uint64_t*>(to) + column, value);
                  else store_rounded(to, dtype, column, value);
                }
              }
            }
          }
        }
        from += blocks;
      } while (from != reread(p.blocks));
    }
  }
  return MPK_OK;
}

}  // namespace gpu
}  // namespace mpk
