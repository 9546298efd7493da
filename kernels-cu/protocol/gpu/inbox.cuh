/* What other ranks bring by the host (MPK_HOST_PROXY): one warp reads frames from a ring in the host's memory and does what they say in this
 * GPU's memory.
 *
 * The rank's proxy writes frames, then the ring's tail (release); the warp reads the tail (acquire), then the frames, in order. Data is stored
 * plainly. A signal is an addition with release by the first lane, behind a barrier of the warp, so who acquires the counter sees all
 * that came before it. Flagged words are stored behind a fence, since more than the word may be read on the strength of it. All of it are
 * accesses of this GPU's own threads: no copy engine, whose order with a running kernel nobody promises. */
#pragma once

#include "gpu/context.cuh"

namespace mpk {
namespace gpu {

#if MPK_HOST_PROXY

template <typename Piece>
__device__ inline void bring_rows(uint8_t* to, const mpk_frame& frame, const uint8_t* payload, uint32_t lane) {
  constexpr uint32_t kBatch = 8;
  const uint32_t each = frame.row_bytes / sizeof(Piece), total = frame.rows * each;
  const Piece* const from = reinterpret_cast<const Piece*>(payload);
  /* Many loads in flight: each takes the way to the host's memory and back. */
  for (uint32_t first = lane; first < total; first += 32 * kBatch) {
    Piece piece[kBatch] = {};
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b)
      if (first + b * 32 < total) piece[b] = from[first + b * 32];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t i = first + b * 32;
      if (i < total) *reinterpret_cast<Piece*>(to + i / each * frame.stride + i % each * sizeof(Piece)) = piece[b];
    }
  }
}

/* One frame, by all lanes. The proxy has checked that it lies in the heap (cpu/proxy.cpp). What it takes of the ring. */
__device__ inline uint64_t bring(const mpk_rank* rank, const uint8_t* at, uint32_t lane) {
  const mpk_frame frame = *reinterpret_cast<const mpk_frame*>(at);
  if (frame.kind == MPK_FRAME_SKIP) return frame.bytes;
  const uint8_t* const payload = at + sizeof(mpk_frame);
  uint8_t* const to = rank->sym[rank->rank] + frame.offset;
  if (frame.kind == MPK_FRAME_ROWS) {
    const uint64_t bits = frame.offset | frame.stride | frame.row_bytes;
    if ((bits & 15) == 0) bring_rows<uint4>(to, frame, payload, lane);
    else if ((bits & 3) == 0) bring_rows<uint32_t>(to, frame, payload, lane);
    else bring_rows<uint8_t>(to, frame, payload, lane);
    __syncwarp();
  } else if (frame.kind == MPK_FRAME_ADD) {
    __syncwarp();
    /* Release: pairs with event_count and ring_tail. */
    if (lane == 0) platform::fetch_add<platform::Scope::kSystem>(reinterpret_cast<uint64_t*>(to), frame.value, platform::kRelease);
  } else {
    __syncwarp();
    __threadfence();
    for (uint32_t i = lane; i < frame.rows; i += 32)
      platform::store<platform::Scope::kSystem>(reinterpret_cast<uint64_t*>(to) + i, reinterpret_cast<const uint64_t*>(payload)[i], platform::kRelaxed);
    __syncwarp();
  }
  return platform::frame_room(frame.bytes);
}

/* Until the run ends; what comes later the host does. By a warp. */
__device__ __noinline__ void inbox_loop(const mpk_rank* rank, uint32_t lane) {
  mpk_inbox* const inbox = rank->proxy->inbox;
  const uint64_t mask = inbox->capacity - 1;
  const uint8_t* const bytes = inbox->bytes;
  uint64_t head = platform::load<platform::Scope::kSystem>(&inbox->head, platform::kRelaxed); /* own word */
  for (;;) {
    uint64_t tail = 0;
    uint32_t left = 0;
    if (lane == 0) {
      /* Acquire: pairs with mpk_inbox_put; the frames are whole. */
      tail = platform::load<platform::Scope::kSystem>(&inbox->tail, platform::kAcquire);
      left = tail == head && (abort_code(rank) != MPK_OK || read_publication(rank).stop);
    }
    tail = __shfl_sync(0xFFFFFFFFu, tail, 0); /* also a barrier: the other lanes read after the acquire */
    if (__shfl_sync(0xFFFFFFFFu, left, 0) != 0) return;
    if (tail == head) continue; /* a look takes a microsecond */
    __syncwarp();
    while (head != tail) head += bring(rank, bytes + (head & mask), lane);
    __syncwarp();
    /* Release: pairs with mpk_inbox_put; it may overwrite what all lanes have read. */
    if (lane == 0) platform::store<platform::Scope::kSystem>(&inbox->head, head, platform::kRelease);
  }
}

#endif

}  // namespace gpu
}  // namespace mpk
