/* Writes the rows in use of a view into the same view of a peer; the caller then signals the task's trigger event.
 *
 * If the peer's memory has an address here, plain stores copy the data. The signal's release at system scope, after the
 * caller's barrier, orders them. Otherwise NVSHMEM's non-blocking puts copy it, one for each warp: block-wide puts would
 * wait in a barrier of the whole block, which the other warps never reach. nvshmem_fence orders all earlier puts of the
 * PE to a peer, not only those of its thread. The barrier between these puts and thread 0's fence (platform::signal_add)
 * makes them earlier, so no fence is needed here. The source must not change until the data has left. That holds: a task
 * overwrites it only after the peer has used the signal, which arrives after the data.
 *
 * The source of a put over a network must be in the symmetric heap, or in memory registered with
 * nvshmemx_buffer_register. */
#pragma once

#include "gpu/task.cuh"
#include "gpu/walk.cuh"
#include "tasks/nvshmem_copy/params.h"

namespace mpk {
namespace gpu {

struct NvshmemCopy : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    int code = context.wait_inputs(/*loads_under_way=*/false, /*always=*/true);
    if (code != MPK_OK) return code;
    const mpk_operand &from = context.input(0), &to = context.output(0);
    const bool own = to.pe == -1; /* the output is in the rank's own memory, which need not be symmetric */
    if ((!own && (to.pe < 0 || static_cast<uint32_t>(to.pe) >= context.rank()->world)) || from.ndim != to.ndim || from.ndim == 0 || from.dtype != to.dtype) {
      context.fail(MPK_ABORT_KERNEL);
      return context.sync();
    }
    const uint32_t pe = static_cast<uint32_t>(to.pe);
    const Shape shape(context, from);
    if (static_cast<uint64_t>(shape.total) * shape.row_bytes >> 31 != 0) { /* no task comes close: rows and bytes, some past the end, are counted in 32 bits */
      context.fail(MPK_ABORT_KERNEL);
      return context.sync();
    }
    const View source(from), target(to);
    uint8_t* const local = reinterpret_cast<uint8_t*>(to.addr);
    uint8_t* remote = own ? local : platform::peer_address(context.rank(), pe, local);
    if (remote == nullptr) return put(context, pe, shape, source, target, local);

    const uint64_t bits = source.address_bits() | target.address_bits() | reinterpret_cast<uint64_t>(remote) | shape.row_bytes;
    if ((bits & 15) == 0) copy<uint4>(context, shape, source, target, remote);
    else if ((bits & 3) == 0) copy<uint32_t>(context, shape, source, target, remote);
    else copy<uint8_t>(context, shape, source, target, remote);
    return MPK_OK;
  }

 private:
  /* Rows of the last dimension, counted through the other dimensions; only those in use. */
  struct Shape {
    uint32_t rows, inner, total; /* in use of the second last dimension; of the second of four dimensions; all */
    uint32_t row_bytes;
    __device__ __forceinline__ Shape(const Context& context, const mpk_operand& view) {
      row_bytes = view.dims[view.ndim - 1] * element_bytes(view.dtype);
      rows = view.ndim >= 2 ? context.rows_in_use_from(context.params<mpk_nvshmem_copy_params>().rows_kind, static_cast<uint32_t>(context.slot->task.args[0]), view.dims[view.ndim - 2]) : 1;
      inner = view.ndim == 4 ? view.dims[1] : 1;
      total = (view.ndim >= 3 ? view.dims[0] : 1) * inner * rows;
    }
  };

  /* A row's index in each dimension. */
  struct Place {
    uint32_t row, inner, outer;
    __device__ __forceinline__ Place(const Shape& shape, uint32_t r) {
      const uint32_t plane = r / shape.rows;
      row = r - plane * shape.rows;
      outer = plane / shape.inner;
      inner = plane - outer * shape.inner;
    }
  };

  /* Distances in bytes; 0 for a dimension that the view does not have. */
  struct View {
    uint64_t addr, outer, inner, row;
    __device__ __forceinline__ explicit View(const mpk_operand& view) {
      const uint64_t bytes = element_bytes(view.dtype);
      addr = view.addr;
      outer = view.ndim >= 3 ? view.strides[0] * bytes : 0;
      inner = view.ndim == 4 ? view.strides[1] * bytes : 0;
      row = view.ndim >= 2 ? view.strides[view.ndim - 2] * bytes : 0;
    }
    __device__ __forceinline__ uint64_t address_bits() const { return addr | outer | inner | row; }
    __device__ __forceinline__ uint64_t offset(const Place& place) const { return place.row * row + place.inner * inner + place.outer * outer; }
  };

  template <typename Piece>
  static __device__ __forceinline__ void copy(const Context& context, const Shape& shape, const View& source, const View& target, uint8_t* remote) {
    const uint8_t* local = reinterpret_cast<const uint8_t*>(source.addr);
    constexpr uint32_t kBatch = 4;
    for (Walk walk(context.thread, shape.total, shape.row_bytes / sizeof(Piece)); walk.row < shape.total;) {
      /* Always set: registers that are written on only one path would stay alive through all loops, of all kernel
       * variants. */
      Piece piece[kBatch] = {};
      uint64_t at[kBatch] = {};
      bool valid[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b, walk.next()) {
        valid[b] = walk.row < shape.total;
        if (!valid[b]) continue;
        const Place place(shape, walk.row);
        const uint32_t within = walk.at * sizeof(Piece);
        piece[b] = *reinterpret_cast<const Piece*>(local + source.offset(place) + within);
        at[b] = target.offset(place) + within;
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b)
        if (valid[b]) *reinterpret_cast<Piece*>(remote + at[b]) = piece[b];
    }
  }

#if MPK_HOST_PROXY
  /* Puts rows into frames, one frame per warp: adjacent rows of one plane, as many as fit into a frame. The caller's barrier orders them
   * before its signal, whose frame is begun afterwards. */
  static __device__ __noinline__ bool put_by_host(const Context& context, uint32_t pe, const Shape& shape, const View& source, const View& target, uint8_t* symmetric) {
    const mpk_rank* const rank = context.rank();
    constexpr uint32_t kMost = static_cast<uint32_t>(platform::kFramePayload);
    const uint32_t lane = threadIdx.x % 32, width = shape.row_bytes < kMost ? shape.row_bytes : kMost;
    if (shape.total == 0 || width == 0) return true;
    /* Something for every warp, if there is enough. */
    const uint32_t share = (shape.rows + kComputeWarps - 1) / kComputeWarps, most = kMost / width, rows = share < most ? share : most;
    const uint32_t planes = shape.total / shape.rows, pieces = (shape.rows + rows - 1) / rows, columns = (shape.row_bytes + width - 1) / width;
    for (uint32_t unit = context.warp; unit < planes * pieces * columns; unit += kComputeWarps) {
      const uint32_t column = unit % columns * width, piece = unit / columns % pieces, plane = unit / columns / pieces;
      const uint32_t first = piece * rows, count = shape.rows - first < rows ? shape.rows - first : rows;
      const uint32_t bytes = shape.row_bytes - column < width ? shape.row_bytes - column : width;
      const Place place(shape, plane * shape.rows + first);
      const uint8_t* const from = reinterpret_cast<const uint8_t*>(source.addr) + source.offset(place) + column;
      uint64_t position = 0;
      uint32_t open = 0;
      if (lane == 0) {
        mpk_frame frame = platform::make_frame(rank, pe, MPK_FRAME_ROWS, symmetric + target.offset(place) + column, static_cast<uint64_t>(count) * bytes);
        frame.rows = count;
        frame.row_bytes = bytes;
        frame.stride = target.row;
        open = platform::frame_open(rank, frame, &position);
      }
      position = __shfl_sync(0xFFFFFFFFu, position, 0);
      if (__shfl_sync(0xFFFFFFFFu, open, 0) == 0) return false;
      uint8_t* const to = platform::frame_payload(rank->proxy, position);
      const uint64_t bits = reinterpret_cast<uint64_t>(from) | source.row | bytes;
      if ((bits & 15) == 0) fill<uint4>(to, from, source.row, count, bytes, lane);
      else if ((bits & 3) == 0) fill<uint32_t>(to, from, source.row, count, bytes, lane);
      else fill<uint8_t>(to, from, source.row, count, bytes, lane);
      __syncwarp();
      if (lane == 0) platform::frame_close(rank->proxy, position);
    }
    return true;
  }

  template <typename Piece>
  static __device__ __forceinline__ void fill(uint8_t* to, const uint8_t* from, uint64_t stride, uint32_t rows, uint32_t row_bytes, uint32_t lane) {
    const uint32_t each = row_bytes / sizeof(Piece);
    for (uint32_t i = lane; i < rows * each; i += 32) {
      const uint32_t row = i / each, at = i % each;
      reinterpret_cast<Piece*>(to)[i] = *reinterpret_cast<const Piece*>(from + row * stride + at * sizeof(Piece));
    }
  }
#endif

  static __device__ __forceinline__ int put(Context& context, uint32_t pe, const Shape& shape, const View& source, const View& target, uint8_t* symmetric) {
#if MPK_HOST_PROXY
    if (!put_by_host(context, pe, shape, source, target, symmetric)) context.fail(MPK_ABORT_PEER);
    return MPK_OK;
#elif MPK_NVSHMEM
    /* Over a dead link, a put may never return (platform/gpu_puts.h), so none is started after an abort. */
    if (__any_sync(0xFFFFFFFFu, platform::aborted(context.rank()))) return MPK_OK;
    for (uint32_t r = context.warp; r < shape.total; r += kComputeWarps) {
      const Place place(shape, r);
      nvshmemx_putmem_nbi_warp(symmetric + target.offset(place), reinterpret_cast<const uint8_t*>(source.addr) + source.offset(place),
                               shape.row_bytes, static_cast<int>(pe));
    }
    return MPK_OK;
#else
    context.fail(MPK_ABORT_PEER);
    return context.sync();
#endif
  }
};

}  // namespace gpu
}  // namespace mpk
