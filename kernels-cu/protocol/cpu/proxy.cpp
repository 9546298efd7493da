/* The proxy's side of the rings of frames (frames.h). At the sender it takes frames out of the ring. At the receiver it carries them out, or
 * hands them to the GPU. The host transports them in between. */
#include "abort.h"
#include "frames.h"

#include <string.h>

namespace mpk {
namespace {

/* The next frame at or after `head` that is not padding; false if it is not complete yet. */
bool find_frame(const mpk_proxy* proxy, uint64_t* head, mpk_frame* frame) {
  for (;;) {
    /* Acquire: pairs with the release in frame_close; the frame is complete. */
    if (platform::load<platform::Scope::kSystem>(platform::frame_mark(proxy, *head), platform::kAcquire) != platform::frame_lap(proxy, *head)) return false;
    platform::copy_bytes(frame, proxy->bytes + (*head & (proxy->capacity - 1)), sizeof(*frame));
    if (frame->kind != MPK_FRAME_SKIP) return true;
    *head += frame->bytes;
  }
}

/* Writes each word in one store: the reader recognises from the word itself whether it has arrived. Release: pairs with mpk_flagged_load,
 * after which the words may be read as plain memory. await_decision needs no order. */
void apply_words(uint8_t* heap, const mpk_frame& frame, const uint8_t* payload) {
  for (uint32_t i = 0; i < frame.rows; ++i) {
    uint64_t value;
    platform::copy_bytes(&value, payload + i * sizeof(value), sizeof(value));
    uint64_t* word = reinterpret_cast<uint64_t*>(heap + frame.offset) + i;
    const uint64_t offset = frame.offset + i * sizeof(value);
    if (offset == offsetof(mpk_control, abort)) {
      /* The first cause stays, as with stores. */
      set_abort(reinterpret_cast<mpk_control*>(heap), static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32));
      continue;
    }
    platform::store<platform::Scope::kSystem>(word, value, platform::kRelease);
    if (offset >= offsetof(mpk_control, decisions) && offset < offsetof(mpk_control, decisions) + sizeof(mpk_control::decisions)) {
      /* The rank may sleep on either half (admission.h). */
      platform::wake(reinterpret_cast<uint32_t*>(word));
      platform::wake(reinterpret_cast<uint32_t*>(word) + 1);
    }
  }
}

/* Whether `bytes` bytes at `offset` are inside the heap. */
bool is_inside(uint64_t heap_bytes, uint64_t offset, uint64_t bytes) { return offset <= heap_bytes && bytes <= heap_bytes - offset; }

/* Whether the frame has all of its payload, and its target is inside a heap of `heap_bytes` bytes. */
bool is_sound(uint64_t heap_bytes, const mpk_frame& frame, uint64_t payload_bytes) {
  switch (frame.kind) {
    case MPK_FRAME_ROWS: {
      const uint64_t rows = frame.rows, bytes = frame.row_bytes;
      return rows != 0 && rows * bytes <= payload_bytes && frame.stride <= heap_bytes && is_inside(heap_bytes, frame.offset, (rows - 1) * frame.stride + bytes);
    }
    case MPK_FRAME_ADD:
      return frame.offset % 8 == 0 && is_inside(heap_bytes, frame.offset, 8);
    case MPK_FRAME_WORDS:
      return frame.offset % 8 == 0 && frame.rows * uint64_t{8} <= payload_bytes && is_inside(heap_bytes, frame.offset, frame.rows * uint64_t{8});
    default:
      return false;
  }
}

void apply(uint8_t* heap, const mpk_frame& frame, const uint8_t* payload) {
  switch (frame.kind) {
    case MPK_FRAME_ROWS:
      /* Plain stores: the signal that follows them makes them visible. This thread adds it with release. */
      for (uint64_t row = 0; row < frame.rows; ++row) platform::copy_bytes(heap + frame.offset + row * frame.stride, payload + row * frame.row_bytes, frame.row_bytes);
      break;
    case MPK_FRAME_ADD:
      /* The same kind of atomic as all other additions to this counter. Release: pairs with event_count and ring_tail; everything that
       * this sender sent before is visible. */
      platform::fetch_add<platform::Scope::kSystem>(reinterpret_cast<uint64_t*>(heap + frame.offset), frame.value, platform::kRelease);
      break;
    default:
      apply_words(heap, frame, payload);
  }
}

/* Calls `take` with each frame and its payload. Returns MPK_OK, or MPK_ABORT_QUEUE at the first invalid frame. */
template <typename Take>
int each_frame(uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes, const Take& take) {
  while (bytes != 0) {
    mpk_frame frame;
    if (bytes < sizeof(frame)) return MPK_ABORT_QUEUE;
    platform::copy_bytes(&frame, frames, sizeof(frame));
    if (frame.bytes < sizeof(frame) || frame.bytes > bytes || frame.bytes % 16 != 0) return MPK_ABORT_QUEUE;
    if (!is_sound(heap_bytes, frame, frame.bytes - sizeof(frame))) return MPK_ABORT_QUEUE;
    take(frame, frames);
    frames += frame.bytes;
    bytes -= frame.bytes;
  }
  return MPK_OK;
}

}  // namespace
}  // namespace mpk

extern "C" {

uint32_t mpk_proxy_next(const mpk_proxy* proxy) {
  /* Relaxed: only this thread writes it. */
  uint64_t head = mpk::platform::load<mpk::platform::Scope::kSystem>(proxy->head, mpk::platform::kRelaxed);
  mpk_frame frame;
  return mpk::find_frame(proxy, &head, &frame) ? frame.to : UINT32_MAX;
}

uint64_t mpk_proxy_take(mpk_proxy* proxy, uint8_t* out, uint64_t room) {
  using namespace mpk;
  /* Relaxed: as above. */
  uint64_t head = platform::load<platform::Scope::kSystem>(proxy->head, platform::kRelaxed);
  uint64_t taken = 0;
  uint32_t to = UINT32_MAX;
  mpk_frame frame;
  while (find_frame(proxy, &head, &frame)) {
    if ((taken != 0 && frame.to != to) || frame.bytes > room - taken) break;
    to = frame.to;
    platform::copy_bytes(out + taken, proxy->bytes + (head & (proxy->capacity - 1)), frame.bytes);
    taken += frame.bytes;
    head += platform::frame_room(frame.bytes);
  }
  /* Release: pairs with the acquire in frame_try_open; the old contents may be overwritten. */
  platform::store<platform::Scope::kSystem>(proxy->head, head, platform::kRelease);
  return taken;
}

int mpk_proxy_apply(uint8_t* heap, uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes) {
  return mpk::each_frame(heap_bytes, frames, bytes, [heap](const mpk_frame& frame, const uint8_t* at) { mpk::apply(heap, frame, at + sizeof(frame)); });
}

int mpk_inbox_put(mpk_inbox* inbox, uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes) {
  using namespace mpk;
  /* An abort takes no room, so a full ring does not hold it up. */
  const auto is_abort = [](const mpk_frame& frame) { return frame.kind == MPK_FRAME_WORDS && frame.offset == offsetof(mpk_control, abort); };
  const uint64_t capacity = inbox->capacity, mask = capacity - 1;
  /* Bytes from `at` to the end of the ring if `room` bytes do not fit there, otherwise 0. */
  const auto skipped = [=](uint64_t at, uint64_t room) { return room > capacity - (at & mask) ? capacity - (at & mask) : 0; };
  uint64_t tail = platform::load<platform::Scope::kSystem>(&inbox->tail, platform::kRelaxed), end = tail; /* only this thread writes it */
  const int code = each_frame(heap_bytes, frames, bytes, [&end, skipped, is_abort](const mpk_frame& frame, const uint8_t*) {
    if (is_abort(frame)) return;
    const uint64_t room = platform::frame_room(frame.bytes);
    end += skipped(end, room) + room;
  });
  if (code != MPK_OK) return code;
  /* Acquire: pairs with the release of the kernel's reader, which has read the old contents. */
  if (end - platform::load<platform::Scope::kSystem>(&inbox->head, platform::kAcquire) > capacity) return MPK_INBOX_FULL;
  each_frame(heap_bytes, frames, bytes, [=, &tail](const mpk_frame& frame, const uint8_t* at) {
    if (is_abort(frame)) {
      uint64_t word = 0;
      platform::copy_bytes(&word, at + sizeof(frame), sizeof(word));
      /* Relaxed: only the requested code matters (spare.cuh). */
      if (inbox->abort != nullptr) platform::store<platform::Scope::kSystem>(inbox->abort, word, platform::kRelaxed);
      return;
    }
    const uint64_t room = platform::frame_room(frame.bytes), to_end = skipped(tail, room);
    if (to_end != 0) {
      mpk_frame skip = {};
      skip.bytes = static_cast<uint32_t>(to_end);
      skip.kind = MPK_FRAME_SKIP;
      platform::copy_bytes(inbox->bytes + (tail & mask), &skip, sizeof(skip));
      tail += to_end;
    }
    platform::copy_bytes(inbox->bytes + (tail & mask), at, frame.bytes);
    tail += room;
  });
  /* Release: pairs with the acquire of the kernel's reader. */
  platform::store<platform::Scope::kSystem>(&inbox->tail, tail, platform::kRelease);
  return MPK_OK;
}

uint64_t mpk_inbox_take(mpk_inbox* inbox, uint8_t* out) {
  using namespace mpk;
  uint64_t head = platform::load<platform::Scope::kSystem>(&inbox->head, platform::kRelaxed); /* the kernel's reader has ended */
  const uint64_t tail = platform::load<platform::Scope::kSystem>(&inbox->tail, platform::kAcquire); /* pairs with mpk_inbox_put */
  mpk_frame frame = {};
  uint64_t taken = 0;
  while (taken == 0 && head != tail) {
    const uint8_t* const at = inbox->bytes + (head & (inbox->capacity - 1));
    platform::copy_bytes(&frame, at, sizeof(frame));
    head += platform::frame_room(frame.bytes);
    if (frame.kind == MPK_FRAME_SKIP) continue;
    platform::copy_bytes(out, at, frame.bytes);
    taken = frame.bytes;
  }
  /* Release: pairs with the acquire in mpk_inbox_put. */
  platform::store<platform::Scope::kSystem>(&inbox->head, head, platform::kRelease);
  return taken;
}

}  // extern "C"
