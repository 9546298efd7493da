/* Writes the rows in use of a view into the same view of a peer; the caller then signals the task's trigger event.
 *
 * Where the peer's memory has an address here, by plain stores: the signal's release at system scope, behind the caller's
 * barrier, orders them. Otherwise by NVSHMEM's non-blocking puts, a warp each: block-wide ones meet in a barrier of the
 * whole block, which the other warps never reach. nvshmem_fence orders all that the PE has put to a peer before it, not
 * only what its thread has put, and the barrier between these puts and thread 0's fence (platform::signal_add) makes them
 * come before it; so no fence is needed here. The source may not change until the data has left; what overwrites it
 * follows from the peer's use of the signal, which comes after the data.
 *
 * The source of a put over a network must lie in the symmetric heap or in memory given to nvshmemx_buffer_register. */
#pragma once

#include "gpu/task.cuh"
#include "gpu/walk.cuh"
#include "tasks/nvshmem_copy/params.h"

namespace mpk {
namespace gpu {

struct NvshmemCopy : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const mpk_operand &from = context.input(0), &to = context.output(0);
    const bool own = to.pe == -1; /* the output lies in the rank's own memory, which need not be symmetric */
    if ((!own && (to.pe < 0 || static_cast<uint32_t>(to.pe) >= context.rank()->world)) || from.ndim != to.ndim || from.ndim == 0 || from.dtype != to.dtype) {
      context.fail(MPK_ABORT_KERNEL);
      return context.sync();
    }
    const uint32_t pe = static_cast<uint32_t>(to.pe);
    const Shape shape(context, from);
    if (static_cast<uint64_t>(shape.total) * shape.row_bytes >> 31 != 0) { /* no task is near it: 32 bits count rows and bytes, some beyond the end too */
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
  /* Rows of the last dimension, counted through the others; only those in use. */
  struct Shape {
    uint32_t rows, inner, total; /* in use of the second last dimension; of the second dimension of four; all */
    uint32_t row_bytes;
    __device__ __forceinline__ Shape(const Context& context, const mpk_operand& view) {
      row_bytes = view.dims[view.ndim - 1] * element_bytes(view.dtype);
      rows = view.ndim >= 2 ? context.rows_in_use_from(context.params<mpk_nvshmem_copy_params>().rows_kind, static_cast<uint32_t>(context.slot->task.args[0]), view.dims[view.ndim - 2]) : 1;
      inner = view.ndim == 4 ? view.dims[1] : 1;
      total = (view.ndim >= 3 ? view.dims[0] : 1) * inner * rows;
    }
  };

  /* A row's place in each dimension. */
  struct Place {
    uint32_t row, inner, outer;
    __device__ __forceinline__ Place(const Shape& shape, uint32_t r) {
      const uint32_t plane = r / shape.rows;
      row = r - plane * shape.rows;
      outer = plane / shape.inner;
      inner = plane - outer * shape.inner;
    }
  };

  /* Distances in bytes; of a dimension that the view does not have, 0. */
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
      /* Set in any case: registers that are written on one path only would stay alive around all loops, of all codes. */
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

  static __device__ __forceinline__ int put(Context& context, uint32_t pe, const Shape& shape, const View& source, const View& target, uint8_t* symmetric) {
#if MPK_NVSHMEM
    /* Over a dead link a put may never return (platform/gpu.h): none is begun after an abort. */
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
