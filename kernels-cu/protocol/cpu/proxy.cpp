/* The proxy's side of the ring of frames (platform/proxy.h): taking frames out at the sender, and doing what they say at the
 * receiver. How they get from one to the other is the host's. */
#include "abort.h"

#include <string.h>

namespace mpk {
namespace {

const uint8_t* frame_at(const mpk_proxy* proxy, uint64_t position) { return proxy->bytes + (position & (proxy->capacity - 1)); }

/* The first frame at or after `head` that brings something; false if there is none below `tail`. */
bool find_frame(const mpk_proxy* proxy, uint64_t* head, uint64_t tail, mpk_frame* frame) {
  while (*head != tail) {
    uint32_t words[2];
    memcpy(words, frame_at(proxy, *head), sizeof(words));
    if (words[1] != MPK_FRAME_SKIP) {
      memcpy(frame, frame_at(proxy, *head), sizeof(*frame));
      return true;
    }
    *head += words[0];
  }
  return false;
}

/* Writes words whole; their readers tell by the words themselves. Release: pairs with mpk_flagged_load, after which a reader takes the
 * words as plain memory; await_decision needs no order. */
void apply_words(uint8_t* heap, const mpk_frame& frame, const uint8_t* payload) {
  for (uint32_t i = 0; i < frame.rows; ++i) {
    uint64_t value;
    memcpy(&value, payload + i * sizeof(value), sizeof(value));
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

/* Whether `bytes` from `offset` on lie in the heap. */
bool is_inside(uint64_t heap_bytes, uint64_t offset, uint64_t bytes) { return offset <= heap_bytes && bytes <= heap_bytes - offset; }

bool apply(uint8_t* heap, uint64_t heap_bytes, const mpk_frame& frame, const uint8_t* payload, uint64_t payload_bytes) {
  switch (frame.kind) {
    case MPK_FRAME_ROWS: {
      const uint64_t rows = frame.rows, bytes = frame.row_bytes;
      if (rows == 0 || rows * bytes > payload_bytes || frame.stride > heap_bytes ||
          !is_inside(heap_bytes, frame.offset, (rows - 1) * frame.stride + bytes)) {
        return false;
      }
      /* Plain: the signal that follows in the same order, added with release by this thread, makes them visible. */
      for (uint64_t row = 0; row < rows; ++row) memcpy(heap + frame.offset + row * frame.stride, payload + row * bytes, bytes);
      return true;
    }
    case MPK_FRAME_ADD:
      if (frame.offset % 8 != 0 || !is_inside(heap_bytes, frame.offset, 8)) return false;
      /* The same kind of atomic as all others on this counter. Release: pairs with event_count and ring_tail; all that came before
       * from this sender is visible. */
      platform::fetch_add<platform::Scope::kSystem>(reinterpret_cast<uint64_t*>(heap + frame.offset), frame.value, platform::kRelease);
      return true;
    case MPK_FRAME_WORDS:
      if (frame.offset % 8 != 0 || frame.rows * uint64_t{8} > payload_bytes || !is_inside(heap_bytes, frame.offset, frame.rows * uint64_t{8})) return false;
      apply_words(heap, frame, payload);
      return true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace mpk

extern "C" {

uint32_t mpk_proxy_next(const mpk_proxy* proxy) {
  using namespace mpk;
  /* Acquire: pairs with the release of FrameWriter; the frame is whole. `head` is the caller's own. */
  const uint64_t tail = platform::load<platform::Scope::kSystem>(&proxy->tail, platform::kAcquire);
  uint64_t head = platform::load<platform::Scope::kSystem>(&proxy->head, platform::kRelaxed);
  mpk_frame frame;
  return find_frame(proxy, &head, tail, &frame) ? frame.to : UINT32_MAX;
}

uint64_t mpk_proxy_take(mpk_proxy* proxy, uint8_t* out, uint64_t room) {
  using namespace mpk;
  /* As above. */
  const uint64_t tail = platform::load<platform::Scope::kSystem>(&proxy->tail, platform::kAcquire);
  uint64_t head = platform::load<platform::Scope::kSystem>(&proxy->head, platform::kRelaxed);
  uint64_t taken = 0;
  uint32_t to = UINT32_MAX;
  mpk_frame frame;
  while (find_frame(proxy, &head, tail, &frame)) {
    if ((taken != 0 && frame.to != to) || frame.bytes > room - taken) break;
    to = frame.to;
    memcpy(out + taken, frame_at(proxy, head), frame.bytes);
    taken += frame.bytes;
    head += frame.bytes;
  }
  /* Release: pairs with the acquire in FrameWriter::try_open; what lay there may be overwritten. */
  platform::store<platform::Scope::kSystem>(&proxy->head, head, platform::kRelease);
  return taken;
}

int mpk_proxy_apply(uint8_t* heap, uint64_t heap_bytes, const uint8_t* frames, uint64_t bytes) {
  while (bytes != 0) {
    mpk_frame frame;
    if (bytes < sizeof(frame)) return MPK_ABORT_QUEUE;
    memcpy(&frame, frames, sizeof(frame));
    if (frame.bytes < sizeof(frame) || frame.bytes > bytes || frame.bytes % 16 != 0) return MPK_ABORT_QUEUE;
    if (!mpk::apply(heap, heap_bytes, frame, frames + sizeof(frame), frame.bytes - sizeof(frame))) return MPK_ABORT_QUEUE;
    frames += frame.bytes;
    bytes -= frame.bytes;
  }
  return MPK_OK;
}

}  // extern "C"
