/* How the threads of a rank write to ranks whose memory stores cannot reach. They put frames into a ring (mpk_proxy), and a thread
 * of the host, the proxy, carries them. The proxy sends the frames for each rank in the order of the ring. The receiver's proxy
 * carries them out in the order in which they arrive (cpu/proxy.cpp).
 *
 * A writer first takes room, by an exchange of `reserved`. Then it writes its frame, concurrently with other writers, and marks it
 * as complete. The proxy waits for each frame in turn. So a thread's puts arrive before its later signals. The same holds for the
 * puts of other threads that this thread knows of, because they took their room earlier. Frames for different ranks are not
 * ordered with each other, and neither are puts: a put is done when the event that it triggers is ready. The source may be
 * overwritten as soon as the call returns.
 *
 * The ring is bounded. If it is full, a thread waits for the proxy until the deadline. It never overwrites. A writer takes
 * room only if there is enough, so one that gives up leaves no gap. */
#ifndef MPK_PROTOCOL_FRAMES_H
#define MPK_PROTOCOL_FRAMES_H

/* Puts are made of frames, so this file cannot include platform.h, which includes the puts. */
#if defined(__CUDACC__)
#include "platform/gpu.h"
#elif defined(MPK_MODEL)
#include "model/platform.h"
#else
#include "platform/cpu.h"
#endif

namespace mpk {
namespace platform {

/* Bytes of the ring that a frame of `bytes` bytes takes. */
MPK_DEVICE uint64_t frame_room(uint64_t bytes) { return (bytes + MPK_FRAME_ALIGN - 1) / MPK_FRAME_ALIGN * MPK_FRAME_ALIGN; }

/* The lap of the ring that a position belongs to, from 1. */
MPK_DEVICE uint32_t frame_lap(const mpk_proxy* proxy, uint64_t position) { return static_cast<uint32_t>(position / proxy->capacity) + 1; }

MPK_DEVICE uint32_t* frame_mark(const mpk_proxy* proxy, uint64_t position) {
  return proxy->written + (position & (proxy->capacity - 1)) / MPK_FRAME_ALIGN;
}

/* Marks the frame that begins at `position` as complete. */
MPK_DEVICE void frame_close(mpk_proxy* proxy, uint64_t position) {
  /* Release: pairs with the acquire in find_frame (cpu/proxy.cpp). */
  store<Scope::kSystem>(frame_mark(proxy, position), frame_lap(proxy, position), kRelease);
}

/* Takes room for `frame` with its payload, and writes the header. Returns its position; false if there is no room
 * now. */
MPK_DEVICE bool frame_try_open(mpk_proxy* proxy, const mpk_frame& frame, uint64_t* position) {
  const uint64_t capacity = proxy->capacity, room = frame_room(frame.bytes);
  uint64_t at = load<Scope::kDevice>(&proxy->reserved, kRelaxed), skipped = 0;
  do {
    const uint64_t to_end = capacity - (at & (capacity - 1));
    skipped = room <= to_end ? 0 : to_end;
    /* Acquire: pairs with the release below; the writer that stored `seen` found that the proxy has read the
     * old contents. */
    if (at + skipped + room - load<Scope::kDevice>(&proxy->seen, kAcquire) > capacity) {
      /* Acquire: pairs with the release in mpk_proxy_take; the proxy has read the old contents. */
      const uint64_t head = load<Scope::kSystem>(proxy->head, kAcquire);
      if (at + skipped + room - head > capacity) return false;
      store<Scope::kDevice>(&proxy->seen, head, kRelease);
    }
    /* Relaxed: a producer that knows of another producer's frame finds its room taken, by coherence alone. */
  } while (!compare_exchange<Scope::kDevice>(&proxy->reserved, &at, at + skipped + room, kRelaxed));
  if (skipped != 0) {
    mpk_frame skip = {};
    skip.bytes = static_cast<uint32_t>(skipped);
    skip.kind = MPK_FRAME_SKIP;
    copy_bytes(proxy->bytes + (at & (capacity - 1)), &skip, sizeof(skip));
    frame_close(proxy, at);
  }
  *position = at + skipped;
  copy_bytes(proxy->bytes + (*position & (capacity - 1)), &frame, sizeof(frame));
  return true;
}

/* As frame_try_open, but waits for room. False if the rank is aborted, or the proxy makes no progress for a
 * deadline. */
MPK_DEVICE bool frame_open(const mpk_rank* rank, const mpk_frame& frame, uint64_t* position) {
  mpk_proxy* const proxy = rank->proxy;
  if (proxy == nullptr) return false;
  Backoff backoff(rank);
  uint64_t since_ns = 0, moved = 0;
  while (!frame_try_open(proxy, frame, position)) {
    if (!backoff.step()) continue;
    /* Relaxed: it only makes the loop end. An aborted rank has nothing to send but the abort, which the proxy sends
     * by itself. */
    if (load<Scope::kSystem>(&rank->control->abort, kRelaxed) != MPK_OK) return false;
    /* Relaxed: it only matters whether the value changes. */
    const uint64_t head = load<Scope::kSystem>(proxy->head, kRelaxed), now = clock_ns();
    if (since_ns == 0 || head != moved) {
      since_ns = now;
      moved = head;
    } else if (now - since_ns >= rank->deadline_ns) {
      return false;
    }
  }
  return true;
}

MPK_DEVICE uint8_t* frame_payload(const mpk_proxy* proxy, uint64_t position) {
  return proxy->bytes + (position & (proxy->capacity - 1)) + sizeof(mpk_frame);
}

MPK_DEVICE mpk_frame make_frame(const mpk_rank* rank, uint32_t pe, uint32_t kind, const void* local, uint64_t payload) {
  mpk_frame frame = {};
  frame.bytes = static_cast<uint32_t>((sizeof(mpk_frame) + payload + 15) / 16 * 16);
  frame.kind = kind;
  frame.to = pe;
  frame.offset = static_cast<uint64_t>(static_cast<const uint8_t*>(local) - rank->sym[rank->rank]);
  return frame;
}

/* Maximum payload of one frame. */
constexpr size_t kFramePayload = (MPK_FRAME_BYTES - sizeof(mpk_frame)) / 16 * 16;

/* As put_rows, through the proxy. */
MPK_DEVICE bool proxy_rows(const mpk_rank* rank, uint32_t pe, void* local_destination, size_t destination_stride, const void* source,
                           size_t source_stride, size_t rows, size_t row_bytes) {
  if (rows == 0 || row_bytes == 0) return true;
  uint8_t* to = static_cast<uint8_t*>(local_destination);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  const size_t width = row_bytes < kFramePayload ? row_bytes : kFramePayload, most = kFramePayload / width;
  for (size_t first = 0; first < rows; first += most) {
    const size_t count = rows - first < most ? rows - first : most;
    for (size_t column = 0; column < row_bytes; column += width) {
      const size_t bytes = row_bytes - column < width ? row_bytes - column : width;
      mpk_frame frame = make_frame(rank, pe, MPK_FRAME_ROWS, to + first * destination_stride + column, count * bytes);
      frame.rows = static_cast<uint32_t>(count);
      frame.row_bytes = static_cast<uint32_t>(bytes);
      frame.stride = destination_stride;
      uint64_t position;
      if (!frame_open(rank, frame, &position)) return false;
      uint8_t* const payload = frame_payload(rank->proxy, position);
      for (size_t row = 0; row < count; ++row) copy_bytes(payload + row * bytes, from + (first + row) * source_stride + column, bytes);
      frame_close(rank->proxy, position);
    }
  }
  return true;
}

/* As put_words, through the proxy. */
MPK_DEVICE bool proxy_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  constexpr uint32_t kMost = static_cast<uint32_t>(kFramePayload / sizeof(uint64_t));
  for (uint32_t first = 0; first < count; first += kMost) {
    const uint32_t words = count - first < kMost ? count - first : kMost;
    mpk_frame frame = make_frame(rank, pe, MPK_FRAME_WORDS, local_destination + first, words * sizeof(uint64_t));
    frame.rows = words;
    uint64_t position;
    if (!frame_open(rank, frame, &position)) return false;
    copy_bytes(frame_payload(rank->proxy, position), values + first, words * sizeof(uint64_t));
    frame_close(rank->proxy, position);
  }
  return true;
}

/* As signal_add, through the proxy. */
MPK_DEVICE bool proxy_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  mpk_frame frame = make_frame(rank, pe, MPK_FRAME_ADD, local_counter, 0);
  frame.value = value;
  uint64_t position;
  if (!frame_open(rank, frame, &position)) return false;
  frame_close(rank->proxy, position);
  return true;
}

}  // namespace platform
}  // namespace mpk

#endif
