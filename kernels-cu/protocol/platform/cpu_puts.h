/* Writes to other ranks, for the CPU target (on top of platform/cpu.h): by stores if they share memory, otherwise through the
 * proxy. */
#ifndef MPK_PLATFORM_CPU_PUTS_H
#define MPK_PLATFORM_CPU_PUTS_H

#include "frames.h"
#include "platform/cpu.h"

namespace mpk {
namespace platform {

/* The address of rank `pe`'s copy of a symmetric object, as seen from this rank; `local` is this rank's copy. NULL if
 * stores cannot reach that rank's memory. */
template <typename T>
inline T* peer_address(const mpk_rank* rank, uint32_t pe, T* local) {
  uint8_t* base = rank->sym[pe];
  if (base == nullptr) return nullptr;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(local) - reinterpret_cast<uintptr_t>(rank->sym[rank->rank]);
  return reinterpret_cast<T*>(base + offset);
}

/* Writes 8-byte words at rank `pe`, each relaxed: the reader recognises from the word itself whether it has
 * arrived. False if the rank is out of reach. */
inline bool put_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  uint64_t* destination = peer_address(rank, pe, local_destination);
  if (destination == nullptr) return proxy_words(rank, pe, local_destination, values, count);
  for (uint32_t i = 0; i < count; ++i) store<Scope::kSystem>(destination + i, values[i], kRelaxed);
  return true;
}

inline bool put_word(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, uint64_t value) {
  return put_words(rank, pe, local_destination, &value, 1);
}

/* Words that this thread has put to a location arrive there before words that it puts from now on. */
inline void order_puts(const mpk_rank*) {}

/* Writes `bytes` bytes to rank `pe`'s copy of `local_destination`. The put itself is not ordered: a later
 * signal with release order makes it visible to a reader that acquires the signal. False if the rank is out
 * of reach. */
inline bool put(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes) {
  uint8_t* destination = peer_address(rank, pe, static_cast<uint8_t*>(local_destination));
  if (destination == nullptr) return proxy_rows(rank, pe, local_destination, bytes, source, bytes, 1, bytes);
  memcpy(destination, source, bytes);
  return true;
}

/* As put, for `rows` rows of `row_bytes` bytes each; strides are in bytes. For the active rows of a tile. */
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

/* Adds to rank `pe`'s copy of a symmetric counter. Release: a reader that acquires the new value sees
 * everything that this thread put before. False if the rank is out of reach. */
inline bool signal_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  uint64_t* counter = peer_address(rank, pe, local_counter);
  if (counter == nullptr) return proxy_add(rank, pe, local_counter, value);
  fetch_add<Scope::kSystem>(counter, value, kRelease);
  return true;
}

/* A put, then a signal that is released after it: a receiver that acquires the signal sees the data. */
inline bool put_with_signal(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes,
                            uint64_t* local_signal, uint64_t value) {
  return put(rank, pe, local_destination, source, bytes) && signal_add(rank, pe, local_signal, value);
}

}  // namespace platform
}  // namespace mpk

#endif
