/* How the threads of a rank write to ranks whose memory they can't reach by stores: they put frames into a ring (mpk_proxy), and a
 * thread of the host, the proxy, carries them. It sends the frames for each rank in the order of the ring; the receiver's proxy does
 * what they say, in the order in which they come (cpu/proxy.cpp).
 *
 * So what a thread puts comes before what it signals after that, and so does what other threads have put if this one knows of it:
 * they have put it into the ring before. Frames for different ranks have no order among each other, as puts have none: a put is done
 * when the event is ready that it triggers. The source may be written again as soon as the call returns.
 *
 * The ring is bounded. Where it is full, a thread waits for the proxy, no longer than the deadline, and never overwrites. */
#ifndef MPK_PLATFORM_PROXY_H
#define MPK_PLATFORM_PROXY_H

#include "platform/cpu.h"

namespace mpk {
namespace platform {

/* Writes one frame: has the ring from its making to its end. */
class FrameWriter {
 public:
  /* Waits for room for `frame` with its payload. Whether there is any, `is_open` says. */
  FrameWriter(const mpk_rank* rank, mpk_frame frame) : proxy_(rank->proxy) {
    if (proxy_ == nullptr) return;
    Backoff backoff(rank);
    uint64_t since_ns = 0, seen = 0;
    while (!try_open(frame)) {
      if (!backoff.step()) continue;
      /* Relaxed: it only makes the loop end. An aborted rank has nothing to say but the abort, which the proxy sends by itself. */
      if (load<Scope::kSystem>(&rank->control->abort, kRelaxed) != MPK_OK) return;
      /* Relaxed: only whether they move matters. */
      const uint64_t moved = load<Scope::kSystem>(&proxy_->head, kRelaxed) + load<Scope::kSystem>(&proxy_->tail, kRelaxed);
      const uint64_t now = clock_ns();
      if (since_ns == 0 || moved != seen) {
        since_ns = now;
        seen = moved;
      } else if (now - since_ns >= rank->deadline_ns) {
        return;
      }
    }
  }

  bool is_open() const { return payload_ != nullptr; }
  uint8_t* payload() const { return payload_; }

  ~FrameWriter() {
    if (payload_ == nullptr) return;
    /* Release: pairs with the acquire in mpk_proxy_take; the frame is whole. */
    store<Scope::kSystem>(&proxy_->tail, tail_, kRelease);
    unlock();
  }
  FrameWriter(const FrameWriter&) = delete;
  FrameWriter& operator=(const FrameWriter&) = delete;

 private:
  bool try_open(const mpk_frame& frame) {
    uint32_t free = 0;
    /* Acquire: pairs with the release in unlock; the frames before are whole, and so are their threads' puts before them. */
    if (!compare_exchange<Scope::kSystem>(&proxy_->lock, &free, 1u, kAcquire)) return false;
    uint64_t tail = load<Scope::kSystem>(&proxy_->tail, kRelaxed); /* changes under the lock only */
    /* Acquire: pairs with the release in mpk_proxy_take; it has read what lay there. */
    const uint64_t head = load<Scope::kSystem>(&proxy_->head, kAcquire);
    const uint64_t to_end = proxy_->capacity - (tail & (proxy_->capacity - 1));
    const uint64_t skipped = frame.bytes <= to_end ? 0 : to_end;
    if (proxy_->capacity - (tail - head) < skipped + frame.bytes) {
      unlock();
      return false;
    }
    if (skipped != 0) {
      /* Its first words only: there may be room for no more. */
      const uint32_t words[2] = {static_cast<uint32_t>(skipped), MPK_FRAME_SKIP};
      memcpy(proxy_->bytes + (tail & (proxy_->capacity - 1)), words, sizeof(words));
      tail += skipped;
    }
    uint8_t* at = proxy_->bytes + (tail & (proxy_->capacity - 1));
    memcpy(at, &frame, sizeof(frame));
    payload_ = at + sizeof(frame);
    tail_ = tail + frame.bytes;
    return true;
  }

  /* Release: pairs with the acquire in try_open. */
  void unlock() { store<Scope::kSystem>(&proxy_->lock, 0u, kRelease); }

  mpk_proxy* proxy_;
  uint8_t* payload_ = nullptr;
  uint64_t tail_ = 0;
};

inline mpk_frame make_frame(const mpk_rank* rank, uint32_t pe, uint32_t kind, const void* local, uint64_t payload) {
  mpk_frame frame = {};
  frame.bytes = static_cast<uint32_t>((sizeof(mpk_frame) + payload + 15) / 16 * 16);
  frame.kind = kind;
  frame.to = pe;
  frame.offset = static_cast<uint64_t>(static_cast<const uint8_t*>(local) - rank->sym[rank->rank]);
  return frame;
}

/* Most that one frame brings. */
constexpr size_t kFramePayload = (MPK_FRAME_BYTES - sizeof(mpk_frame)) / 16 * 16;

/* As put_rows, by the proxy. */
inline bool proxy_rows(const mpk_rank* rank, uint32_t pe, void* local_destination, size_t destination_stride, const void* source,
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
      const FrameWriter writer(rank, frame);
      if (!writer.is_open()) return false;
      for (size_t row = 0; row < count; ++row) memcpy(writer.payload() + row * bytes, from + (first + row) * source_stride + column, bytes);
    }
  }
  return true;
}

/* As put_words, by the proxy. */
inline bool proxy_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  constexpr uint32_t kMost = static_cast<uint32_t>(kFramePayload / sizeof(uint64_t));
  for (uint32_t first = 0; first < count; first += kMost) {
    const uint32_t words = count - first < kMost ? count - first : kMost;
    mpk_frame frame = make_frame(rank, pe, MPK_FRAME_WORDS, local_destination + first, words * sizeof(uint64_t));
    frame.rows = words;
    const FrameWriter writer(rank, frame);
    if (!writer.is_open()) return false;
    memcpy(writer.payload(), values + first, words * sizeof(uint64_t));
  }
  return true;
}

/* As signal_add, by the proxy. */
inline bool proxy_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  mpk_frame frame = make_frame(rank, pe, MPK_FRAME_ADD, local_counter, 0);
  frame.value = value;
  const FrameWriter writer(rank, frame);
  return writer.is_open();
}

}  // namespace platform
}  // namespace mpk

#endif
