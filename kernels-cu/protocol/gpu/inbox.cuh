/* What arrives from other ranks through the host (MPK_HOST_PROXY): one warp reads frames from a ring in host memory and carries them out in
 * this GPU's memory.
 *
 * The rank's proxy writes frames, then the ring's tail (release). The warp reads the tail (acquire), then the frames, in order. Data is
 * written with plain stores. A signal is an addition by the first lane, after a barrier of the warp and a fence, so a thread that acquires
 * the counter sees everything before it. Flagged words are stored after a fence, because a reader may rely on more than the word. All of
 * these are accesses by this GPU's own threads: a copy engine is not used, because its order with a running kernel is not guaranteed. */
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
  /* Many loads are in flight at once, because each one is a round trip to host memory. */
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

/* All lanes carry out one frame. Its payload may be in the ring or in this GPU's memory. The proxy has checked that the target is inside
 * the heap (cpu/proxy.cpp). `unfenced` is true if data was stored since lane 0's last fence. */
__device__ inline void bring(const mpk_rank* rank, const mpk_frame& frame, const uint8_t* payload, uint32_t lane, bool* unfenced) {
  uint8_t* const to = rank->sym[rank->rank] + frame.offset;
  if (frame.kind == MPK_FRAME_ROWS) {
    const uint64_t bits = frame.offset | frame.stride | frame.row_bytes;
    if ((bits & 15) == 0) bring_rows<uint4>(to, frame, payload, lane);
    else if ((bits & 3) == 0) bring_rows<uint32_t>(to, frame, payload, lane);
    else bring_rows<uint8_t>(to, frame, payload, lane);
    *unfenced = true;
  } else if (frame.kind == MPK_FRAME_ADD) {
    __syncwarp();
    /* The fence and the addition form a release, which pairs with event_count and ring_tail. Device scope is enough: data,
     * counter and readers belong to this GPU. Later additions need no fence until there is more data. */
    if (lane == 0) {
      if (*unfenced) __threadfence();
      platform::fetch_add<platform::Scope::kDevice>(reinterpret_cast<uint64_t*>(to), frame.value, platform::kRelaxed);
    }
    *unfenced = false;
  } else {
    __syncwarp();
    __threadfence();
    for (uint32_t i = lane; i < frame.rows; i += 32)
      platform::store<platform::Scope::kSystem>(reinterpret_cast<uint64_t*>(to) + i, reinterpret_cast<const uint64_t*>(payload)[i], platform::kRelaxed);
  }
  __syncwarp();
}

/* Copies `bytes` bytes of the ring, a multiple of MPK_FRAME_ALIGN, to this GPU's memory, with many loads in flight. */
__device__ inline void fetch_frames(uint8_t* stage, const uint8_t* from, uint32_t bytes, uint32_t lane) {
  const mpk_frame all = {0, MPK_FRAME_ROWS, 0, 1, 0, bytes, 0, bytes, 0};
  bring_rows<uint4>(stage, all, from, lane);
  __syncwarp();
}

/* Runs until the run ends, by one warp; the host handles frames that arrive later. The ring is in host memory, a microsecond away,
 * so frames are fetched many at a time and read from this GPU's own memory. */
__device__ __noinline__ void inbox_loop(const mpk_rank* rank, uint32_t lane) {
  mpk_inbox* const inbox = rank->proxy->inbox;
  uint8_t* const stage = rank->proxy->stage;
  const uint64_t capacity = inbox->capacity, mask = capacity - 1;
  const uint8_t* const bytes = inbox->bytes;
  uint64_t head = platform::load<platform::Scope::kSystem>(&inbox->head, platform::kRelaxed); /* only this thread writes it */
  bool unfenced = true;
  for (;;) {
    uint64_t tail = 0;
    uint32_t left = 0;
    if (lane == 0) {
      /* Acquire: pairs with mpk_inbox_put; the frames are complete. */
      tail = platform::load<platform::Scope::kSystem>(&inbox->tail, platform::kAcquire);
      left = tail == head && (abort_code(rank) != MPK_OK || read_publication(rank).stop);
    }
    tail = __shfl_sync(0xFFFFFFFFu, tail, 0); /* also a barrier: the other lanes read after the acquire */
    if (__shfl_sync(0xFFFFFFFFu, left, 0) != 0) return;
    if (tail == head) continue; /* no pause: each look takes a microsecond */
    __syncwarp();
    while (head != tail) {
      const uint64_t at = head & mask, there = tail - head < capacity - at ? tail - head : capacity - at;
      const uint64_t span = there < MPK_INBOX_STAGE ? there : MPK_INBOX_STAGE;
      fetch_frames(stage, bytes + at, static_cast<uint32_t>(span), lane);
      uint64_t done = 0;
      while (done < span) {
        const mpk_frame frame = *reinterpret_cast<const mpk_frame*>(stage + done);
        const uint64_t room = platform::frame_room(frame.bytes);
        if (frame.kind != MPK_FRAME_SKIP) {
          const bool whole = done + room <= span;
          if (!whole && done != 0) break; /* it is fetched again from its start */
          bring(rank, frame, (whole ? stage + done : bytes + at) + sizeof(mpk_frame), lane, &unfenced);
        }
        done += room;
      }
      head += done;
    }
    __syncwarp();
    /* Release: pairs with the acquire in mpk_inbox_put, which may then overwrite what all lanes have read. */
    if (lane == 0) platform::store<platform::Scope::kSystem>(&inbox->head, head, platform::kRelease);
  }
}

#endif

}  // namespace gpu
}  // namespace mpk
