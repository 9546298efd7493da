/* For task kernels that read flagged tensors (MPK_F32_FLAGGED): 8-byte words with an f32 in the low half and the
 * tag of the write (MPK_FLAG_TAG) in the high half. A word is written and read in one access, so the value needs
 * no separate flag. The ready test compares the tag's bits, never the float. */
#ifndef MPK_PROTOCOL_KERNEL_WAIT_H
#define MPK_PROTOCOL_KERNEL_WAIT_H

#include "trace.h"
#include "wait.h"

/* Writes one word, at this rank or in a peer's memory (at an address from platform::peer_address). */
MPK_DEVICE void mpk_flagged_store(uint64_t* word, float value, uint32_t tag) {
  /* Release: pairs with mpk_flagged_load, so that a reader may also rely on earlier writes. */
  mpk::platform::store<mpk::platform::Scope::kSystem>(word, (static_cast<uint64_t>(tag) << 32) | mpk::platform::float_bits(value), mpk::platform::kRelease);
}

/* Reads one word in one access. Acquire: pairs with mpk_flagged_store. */
MPK_DEVICE uint64_t mpk_flagged_load(const uint64_t* word) {
  return mpk::platform::load<mpk::platform::Scope::kSystem>(word, mpk::platform::kAcquire);
}

/* Whether the word was written with this tag. A later tag would mean that the word was lost; then the wait runs into
 * its deadline. */
MPK_DEVICE bool mpk_flagged_arrived(uint64_t word, uint32_t tag) {
  return static_cast<uint32_t>(word >> 32) == tag;
}

/* Tag of the flagged words that the running task touches. */
MPK_DEVICE uint32_t mpk_flagged_tag(const mpk_kernel_args* args) {
  return MPK_FLAG_TAG(*args->task, args->batch->epoch);
}

MPK_DEVICE float mpk_flagged_value(uint64_t word) {
  return mpk::platform::float_from_bits(static_cast<uint32_t>(word));
}

/* 1 when words[0..count) have all arrived with the task's tag; does not wait. For a kernel's `ready`. */
MPK_DEVICE int mpk_flagged_ready(const mpk_kernel_args* args, const uint64_t* words, uint32_t count) {
  const uint32_t tag = mpk_flagged_tag(args);
  for (uint32_t i = 0; i < count; ++i) {
    if (!mpk_flagged_arrived(mpk_flagged_load(words + i), tag)) return 0;
  }
  return 1;
}

/* Waits until words[0..count) have all arrived with the task's tag. The wait is bounded and ends if the rank
 * aborts; the kernel returns the code unless it is MPK_OK. After MPK_OK the words may be read as plain
 * memory. In the report, `wanted` is the tag, and `seen` is the tag of the first missing word. */
MPK_DEVICE int mpk_wait_flagged(const mpk_kernel_args* args, const uint64_t* words, uint32_t count) {
  const uint32_t tag = mpk_flagged_tag(args);
  uint32_t i = 0;
  while (i < count && mpk_flagged_arrived(mpk_flagged_load(words + i), tag)) ++i;
  if (i == count) return MPK_OK;
  const uint64_t began_ns = mpk::trace_clock(args->rank);
  mpk_status* status = args->rank->status + args->worker;
  mpk::report_wait(status, MPK_WORKER_WAITS_FLAG, MPK_EVENT_INVALID, tag, mpk_flagged_load(words + i) >> 32);
  mpk::Wait wait(args->rank, status);
  while (i < count) {
    const uint64_t word = mpk_flagged_load(words + i);
    if (mpk_flagged_arrived(word, tag)) {
      ++i;
      wait.reset();
      continue;
    }
    const int code = wait.poll(word >> 32);
    if (code != MPK_OK) return code;
  }
  if (mpk::is_traced(args->rank)) {
    mpk::trace_next(args->rank, args->worker)->peer_ns += static_cast<uint32_t>(mpk::platform::clock_ns() - began_ns);
  }
  mpk::report_state(status, MPK_WORKER_RUNS);
  return MPK_OK;
}

#endif
