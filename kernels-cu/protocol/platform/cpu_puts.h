/* Writing to other ranks, for the CPU target (on top of platform/cpu.h): by stores where they share memory, by the proxy where they do
 * not. */
#ifndef MPK_PLATFORM_CPU_PUTS_H
#define MPK_PLATFORM_CPU_PUTS_H

#include "frames.h"
#include "platform/cpu.h"

namespace mpk {
namespace platform {

/* The address, as seen from here, of rank `pe`'s copy of a symmetric object whose copy at this rank is at
 * `local`; NULL where that rank's memory can't be reached by stores. */
template <typename T>
inline T* peer_address(const mpk_rank* rank, uint32_t pe, T* local) {
  uint8_t* base = rank->sym[pe];
  if (base == nullptr) return nullptr;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(local) - reinterpret_cast<uintptr_t>(rank->sym[rank->rank]);
  return reinterpret_cast<T*>(base + offset);
}

/* 8-byte words at rank `pe`, each relaxed: its reader tells by the word itself whether it has come. False where the
 * rank can't be reached. */
inline bool put_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  uint64_t* destination = peer_address(rank, pe, local_destination);
  if (destination == nullptr) return proxy_words(rank, pe, local_destination, values, count);
  for (uint32_t i = 0; i < count; ++i) store<Scope::kSystem>(destination + i, values[i], kRelaxed);
  return true;
}

inline bool put_word(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, uint64_t value) {
  return put_words(rank, pe, local_destination, &value, 1);
}

/* Words that this thread has put at a place come there before those that it puts from now on. */
inline void order_puts() {}

/* Writes `bytes` at rank `pe`'s copy of `local_destination`. Not ordered by itself: a later signal with release
 * order makes it visible to who acquires the signal. False where the rank can't be reached. */
inline bool put(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes) {
  uint8_t* destination = peer_address(rank, pe, static_cast<uint8_t*>(local_destination));
  if (destination == nullptr) return proxy_rows(rank, pe, local_destination, bytes, source, bytes, 1, bytes);
  memcpy(destination, source, bytes);
  return true;
}

/* As put, for `rows` rows of `row_bytes` each; strides in bytes. For the active rows of a tile. */
inline bool put_rows(const mpk_rank* rank, uint32_t pe, void* local_destination, size_t destination_stride,
                     const void* source, size_t source_stride, size_t rows, size_t row_bytes) {
  uint8_t* destination = peer_address(rank, pe, static_cast<uint8_t*>(local_destination));
  if (destination == nullptr) return proxy_rows(rank, pe, local_destination, destination_stride, source, source_stride, rows, row_bytes);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  if (row_bytes == destination_stride && row_bytes == source_stride) {
    memcpy(destination, from, rows * row_bytes);
    return true;
  }
  for (size_t row = 0; row < rows; ++row) memcpy(destination + row * destination_stride, from + row * source_stride, row_bytes);
  return true;
}

/* Adds to rank `pe`'s copy of a symmetric counter. Release: whoever acquires the new value sees what this thread
 * put before. False where the rank can't be reached. */
inline bool signal_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  uint64_t* counter = peer_address(rank, pe, local_counter);
  if (counter == nullptr) return proxy_add(rank, pe, local_counter, value);
  fetch_add<Scope::kSystem>(counter, value, kRelease);
  return true;
}

/* A put and then a signal that is released after it: the receiver that acquires the signal sees the data. */
inline bool put_with_signal(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes,
                            uint64_t* local_signal, uint64_t value) {
  return put(rank, pe, local_destination, source, bytes) && signal_add(rank, pe, local_signal, value);
}

}  // namespace platform
}  // namespace mpk

#endif
