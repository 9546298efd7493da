/* Sum of the ranks' partial tiles in rank order, plus the residual once. The tiles are f32, bf16 or f16; the sum is f32. */
#pragma once

#include "gpu/task.cuh"
#include "gpu/walk.cuh"
#include "gpu/words.cuh"
#include "tasks/reduce/gpu_rows.cuh"
#include "tasks/reduce/params.h"

namespace mpk {
namespace gpu {

namespace reduce {

/* `Width` values, together aligned to their size if Width is above 1. */
template <uint32_t Width>
__device__ __forceinline__ void load_values(float (&v)[Width], const float* from) {
  if constexpr (Width > 4) {
#pragma unroll
    for (uint32_t part = 0; part < Width; part += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + part);
      v[part] = x.x, v[part + 1] = x.y, v[part + 2] = x.z, v[part + 3] = x.w;
    }
  } else if constexpr (Width == 4) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  } else if constexpr (Width == 2) {
    const float2 x = *reinterpret_cast<const float2*>(from);
    v[0] = x.x, v[1] = x.y;
  } else {
    v[0] = from[0];
  }
}

/* `Width` summands as they are in memory, so that those of 2 bytes take half the registers. */
template <uint32_t Dtype, uint32_t Width>
struct Piece {
  static_assert(Width == 1 || Width == 8, "one number, or 16 bytes");
  uint32_t words[(Width + 1) / 2] = {}; /* see nvshmem_copy/gpu.cuh: an undefined value stays alive */
  __device__ __forceinline__ void load(const void* from) {
    if constexpr (Width == 8) {
      const uint4 x = *static_cast<const uint4*>(from);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else {
      words[0] = *static_cast<const uint16_t*>(from);
    }
  }
  __device__ __forceinline__ float operator[](uint32_t e) const { return e % 2 == 0 ? low_of<Dtype>(words[e / 2]) : high_of<Dtype>(words[e / 2]); }
};
template <uint32_t Width>
struct Piece<MPK_F32, Width> {
  float v[Width] = {};
  __device__ __forceinline__ void load(const void* from) { load_values<Width>(v, static_cast<const float*>(from)); }
  __device__ __forceinline__ float operator[](uint32_t e) const { return v[e]; }
};

template <uint32_t Width>
__device__ __forceinline__ void load_some(uint64_t (&words)[Width], const uint64_t* from) {
  if constexpr (Width == 2) load_words(words[0], words[1], from);
  else words[0] = platform::load<platform::Scope::kSystem>(from, platform::kRelaxed);
}

}  // namespace reduce

/* InDtype: enum mpk_dtype of the summands. Flagged words hold f32. */
template <uint32_t OutDtype, uint32_t World, bool Flagged, bool Residual, uint32_t InDtype = MPK_F32>
struct Reduce : TaskCode {
  static_assert(!Flagged || InDtype == MPK_F32, "flagged words hold f32");
  using Out = typename Number<OutDtype>::Type;
  using In = typename Number<InDtype>::Type;

  static __device__ __forceinline__ int run(Context& context) {
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const mpk_operand& out = context.output(0);
    const uint32_t rows = context.rows_in_use_from(context.params<mpk_reduce_params>().rows_kind, static_cast<uint32_t>(context.slot->task.args[0]), out.dims[0]);
    const uint32_t columns = out.dims[1];
    if constexpr (Flagged) {
      if (aligned(context, columns, 2)) flagged<2>(context, rows, columns);
      else flagged<1>(context, rows, columns);
    } else {
      /* Single values spread a short tile over more threads. */
      constexpr uint32_t kWidth = 16 / sizeof(In);
      if (rows * columns >= kWidth * kComputeThreads && aligned(context, columns, kWidth)) plain<kWidth>(context, rows, columns);
      else plain<1>(context, rows, columns);
    }
    return MPK_OK;
  }

  static __device__ __forceinline__ bool ready(const TaskSlot& slot, const mpk_rank*, uint32_t lane) {
    if constexpr (!Flagged) return true;
    return words_arrived<World>(slot, reinterpret_cast<const mpk_reduce_params*>(slot.params)->rows_kind, lane);
  }

 private:
  static __device__ __forceinline__ const mpk_operand& receive(const Context& context) { return context.input(Flagged ? 0 : 1); }
  static __device__ __forceinline__ const mpk_operand& residual(const Context& context) { return context.input(Flagged ? 1 : 2); }

  /* Whether `width` adjacent values can be read and written at a time in all views. */
  static __device__ __forceinline__ bool aligned(const Context& context, uint32_t columns, uint32_t width) {
    if constexpr (InDtype != MPK_F32) return in_pieces(context, columns);
    else return aligned_words(context, columns, width);
  }
  static __device__ __forceinline__ bool aligned_words(const Context& context, uint32_t columns, uint32_t width) {
    const uint32_t word = Flagged ? 8 : 4;
    const mpk_operand &in = receive(context), &out = context.output(0);
    uint64_t bits = in.addr | static_cast<uint64_t>(in.strides[0] | in.strides[1] | columns) * word;
    if constexpr (!Flagged) bits |= context.input(0).addr | static_cast<uint64_t>(context.input(0).strides[0]) * word;
    /* In the unit of f32, to be tested with the others. */
    if constexpr (Residual) bits |= residual(context).addr * (word / 4) | static_cast<uint64_t>(residual(context).strides[0]) * word;
    bits |= out.addr * (word / sizeof(Out)) | static_cast<uint64_t>(out.strides[0]) * word;
    return (bits & (width * word - 1)) == 0;
  }

  /* The same for pieces of 16 bytes of summands of 2 bytes. */
  static __device__ __forceinline__ bool in_pieces(const Context& context, uint32_t columns) {
    const mpk_operand &own = context.input(0), &in = receive(context), &out = context.output(0);
    uint64_t bits = in.addr | own.addr | out.addr | static_cast<uint64_t>(in.strides[0] | in.strides[1] | own.strides[0] | columns) * sizeof(In);
    bits |= static_cast<uint64_t>(out.strides[0]) * sizeof(Out);
    if constexpr (Residual) bits |= residual(context).addr | static_cast<uint64_t>(residual(context).strides[0]) * 4;
    return (bits & 15) == 0;
  }

  template <uint32_t Width>
  static __device__ __forceinline__ void store(const Context& context, uint32_t row, uint32_t c, const float (&sum)[Width]) {
    const mpk_operand& out = context.output(0);
    Out* to = reinterpret_cast<Out*>(out.addr) + static_cast<uint64_t>(row) * out.strides[0] + c;
    constexpr uint32_t kAtOnce = sizeof(Out) * Width > 16 ? 16 / sizeof(Out) : Width;
    struct alignas(sizeof(Out) * kAtOnce) Piece {
      Out v[kAtOnce];
    };
#pragma unroll
    for (uint32_t part = 0; part < Width; part += kAtOnce) {
      Piece piece;
#pragma unroll
      for (uint32_t e = 0; e < kAtOnce; ++e) piece.v[e] = Number<OutDtype>::from_f32(sum[part + e]);
      *reinterpret_cast<Piece*>(to + part) = piece;
    }
  }

  template <uint32_t Width>
  static __device__ __forceinline__ void load_residual(const Context& context, float (&v)[Width], uint32_t row, uint32_t c) {
    if constexpr (Residual) {
      const mpk_operand& view = residual(context);
      reduce::load_values<Width>(v, reinterpret_cast<const float*>(view.addr) + static_cast<uint64_t>(row) * view.strides[0] + c);
    }
  }
  template <uint32_t Width>
  static __device__ __forceinline__ void add_residual(float (&sum)[Width], const float (&v)[Width]) {
    if constexpr (Residual) {
#pragma unroll
      for (uint32_t e = 0; e < Width; ++e) sum[e] += v[e];
    }
  }

  template <uint32_t Width>
  static __device__ __forceinline__ void plain(const Context& context, uint32_t rows, uint32_t columns) {
    const mpk_operand &own = context.input(0), &in = receive(context);
    const uint32_t self = context.params<mpk_reduce_params>().rank;
    const uint32_t pieces = columns / Width;
    /* Pieces whose loads are in flight together: a store in between would hold the next ones back. */
    constexpr uint32_t kBatch = World <= 2 ? 4 : World <= 4 ? 2 : 1;
    for (Walk walk(context.thread, rows, pieces); walk.row < rows;) {
      reduce::Piece<InDtype, Width> parts[kBatch][World];
      float rest[kBatch][Width] = {}; /* see nvshmem_copy/gpu.cuh: an undefined value stays alive */
      uint32_t row[kBatch], column[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b, walk.next()) {
        row[b] = walk.row;
        column[b] = walk.at * Width;
        if (row[b] >= rows) continue;
        const In* mine = reinterpret_cast<const In*>(own.addr) + static_cast<uint64_t>(row[b]) * own.strides[0] + column[b];
        const In* received = reinterpret_cast<const In*>(in.addr) + static_cast<uint64_t>(row[b]) * in.strides[1] + column[b];
        load_residual<Width>(context, rest[b], row[b], column[b]);
#pragma unroll
        for (uint32_t r = 0; r < World; ++r) parts[b][r].load(r == self ? mine : received + static_cast<uint64_t>(r) * in.strides[0]);
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        if (row[b] >= rows) continue;
        float sum[Width];
#pragma unroll
        for (uint32_t r = 0; r < World; ++r)
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) sum[e] = r == 0 ? parts[b][r][e] : sum[e] + parts[b][r][e];
        add_residual<Width>(sum, rest[b]);
        store<Width>(context, row[b], column[b], sum);
      }
    }
  }

  template <uint32_t Width>
  static __device__ __forceinline__ void flagged(Context& context, uint32_t rows, uint32_t columns) {
    const mpk_operand& in = receive(context);
    const uint32_t tag = context.slot->tag;
    const uint32_t pieces = columns / Width;
    for (Walk walk(context.thread, rows, pieces); walk.row < rows; walk.next()) {
      const uint32_t row = walk.row, c = walk.at * Width;
      const uint64_t* words = reinterpret_cast<const uint64_t*>(in.addr) + static_cast<uint64_t>(row) * in.strides[1] + c;
      float rest[Width];
      load_residual<Width>(context, rest, row, c);
      uint64_t seen[World][Width];
      bool all = false;
#pragma unroll 1
      for (uint32_t polls = 0; polls < kQuickPolls && !all && !kWithoutAllreduces; ++polls) {
        /* All ranks' words are in flight before the first one is tested. */
#pragma unroll
        for (uint32_t r = 0; r < World; ++r) reduce::load_some(seen[r], words + static_cast<uint64_t>(r) * in.strides[0]);
        all = true;
#pragma unroll
        for (uint32_t r = 0; r < World; ++r)
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) all = all && mpk_flagged_arrived(seen[r][e], tag);
        if constexpr (kWithoutWaits) all = all || rows <= kMostRowsWithoutWaits;
      }
      float sum[Width] = {}; /* see nvshmem_copy/gpu.cuh: an undefined value stays alive */
      if (all) {
#pragma unroll
        for (uint32_t r = 0; r < World; ++r)
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) {
            const float part = __uint_as_float(static_cast<uint32_t>(seen[r][e]));
            sum[e] = r == 0 ? part : sum[e] + part;
          }
      } else {
        /* The bounded wait, word by word. */
#pragma unroll 1
        for (uint32_t r = 0; r < World; ++r)
#pragma unroll
          for (uint32_t e = 0; e < Width; ++e) {
            const float part = context.wait_flagged(words + static_cast<uint64_t>(r) * in.strides[0] + e);
            sum[e] = r == 0 ? part : sum[e] + part;
          }
      }
      add_residual<Width>(sum, rest);
      store<Width>(context, row, c, sum);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
