/* Writes to other ranks, for the GPU target (on top of platform/gpu.h): by stores if mpk_rank.sym has a pointer, otherwise through
 * NVSHMEM's device calls (MPK_NVSHMEM=1) or through the host (MPK_HOST_PROXY=1). The host path uses frames in a ring in host
 * memory, which the rank's proxy carries (frames.h). One warp of the receiving kernel carries out the frames from other ranks
 * (protocol/gpu/inbox.cuh). So all atomics on a counter come from its own GPU.
 *
 * NVSHMEM's calls may wait. A put, fence or signal to a rank out of reach is a request to NVSHMEM's proxy or to a network card. If
 * a link is dead, the room for requests runs out and the call does not return. Nothing here can bound it. So
 * - no thread begins such a call once the rank is aborted (`aborted`). If another loop of the protocol waits for a thread
 *   that is inside one, that wait has its own deadline: the rest of the rank ends, and reports what it waited for;
 * - one thread tells the ranks out of reach of an abort, as its last act (abort_out_of_reach);
 * - the kernel ends only when every call has returned. The host waits for that for a bounded time after the abort, then reports and
 *   ends the process without the kernel (distributed/src/cuda/run.rs). */
#ifndef MPK_PLATFORM_GPU_PUTS_H
#define MPK_PLATFORM_GPU_PUTS_H

#include "platform/gpu.h"
#if MPK_HOST_PROXY
#include "frames.h"
#endif

namespace mpk {
namespace platform {

#if MPK_HOST_PROXY
/* Out of line, to keep them away from the tasks' code. */
static __device__ __noinline__ bool host_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  /* An abort overtakes the contents of the ring, which may be full: the proxy reads this word, and tells all ranks. */
  if (local_destination == reinterpret_cast<uint64_t*>(rank->control)) {
    /* Relaxed: no data depends on it. */
    store<Scope::kSystem>(rank->proxy->abort, values[0], kRelaxed);
    return true;
  }
  return proxy_words(rank, pe, local_destination, values, count);
}
static __device__ __noinline__ bool host_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  return proxy_add(rank, pe, local_counter, value);
}
static __device__ __noinline__ bool host_put(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes) {
  return proxy_rows(rank, pe, local_destination, bytes, source, bytes, 1, bytes);
}
#endif

/* As in cpu.h. */
template <typename T>
__device__ inline T* peer_address(const mpk_rank* rank, uint32_t pe, T* local) {
  uint8_t* base = rank->sym[pe];
  if (base == nullptr) return nullptr;
  return reinterpret_cast<T*>(base + (reinterpret_cast<uint8_t*>(local) - rank->sym[rank->rank]));
}

/* Whether the rank has been aborted. Relaxed: as abort_code. */
__device__ inline bool aborted(const mpk_rank* rank) { return load<Scope::kSystem>(&rank->control->abort, kRelaxed) != MPK_OK; }

/* Writes one 8-byte word at rank `pe`, relaxed: the reader recognises from the word itself whether it has arrived. */
__device__ inline bool put_word(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, uint64_t value) {
  uint64_t* destination = peer_address(rank, pe, local_destination);
  if (destination != nullptr) {
    store<Scope::kSystem>(destination, value, kRelaxed);
    return true;
  }
#if MPK_HOST_PROXY
  return host_words(rank, pe, local_destination, &value, 1);
#elif MPK_NVSHMEM
  /* After an abort only the abort itself is sent. */
  if (local_destination != reinterpret_cast<uint64_t*>(rank->control) && aborted(rank)) return false;
  nvshmem_uint64_p(local_destination, value, static_cast<int>(pe));
  return true;
#else
  return false;
#endif
}

/* As in cpu.h. Stores to one location are in order; NVSHMEM's puts are ordered only by its fence. After an abort there are no puts
 * left to order. */
__device__ inline void order_puts(const mpk_rank* rank) {
#if MPK_NVSHMEM
  if (!aborted(rank)) nvshmem_fence();
#endif
}

/* Adds to rank `pe`'s copy of a symmetric counter, after everything that this thread has put there or knows of
 * (release at system scope; NVSHMEM: fence, then signal). The job chooses between the two, not the peer: NVSHMEM
 * promises that its signals are atomic with each other, not with atomics that reach the same counter through a
 * pointer. */
__device__ inline bool signal_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  if (rank->signals == MPK_SIGNALS_DIRECT) {
    uint64_t* counter = peer_address(rank, pe, local_counter);
#if MPK_HOST_PROXY
    if (counter == nullptr) return host_add(rank, pe, local_counter, value);
#endif
    if (counter == nullptr) return false;
    fetch_add<Scope::kSystem>(counter, value, kRelease);
    return true;
  }
#if MPK_NVSHMEM
  if (aborted(rank)) return false;
  __threadfence_system(); /* stores to peers, and what this thread knows of */
  nvshmem_fence();        /* NVSHMEM's puts to `pe` */
  nvshmemx_signal_op(local_counter, value, NVSHMEM_SIGNAL_ADD, static_cast<int>(pe));
  return true;
#else
  return false;
#endif
}

/* By one thread, for small data: puts `bytes` bytes (both addresses and `bytes` are multiples of 8), then signals. Both
 * take the same path, so neither overtakes an earlier signal of this thread. */
__device__ inline bool put_with_signal(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes,
                                       uint64_t* local_signal, uint64_t value) {
  uint64_t* to = static_cast<uint64_t*>(local_destination);
  const uint64_t* from = static_cast<const uint64_t*>(source);
  if (rank->signals == MPK_SIGNALS_DIRECT) {
    to = peer_address(rank, pe, to);
#if MPK_HOST_PROXY
    if (to == nullptr) return host_put(rank, pe, local_destination, source, bytes) && signal_add(rank, pe, local_signal, value);
#endif
    if (to == nullptr) return false;
    for (size_t i = 0; i < bytes / 8; ++i) to[i] = from[i];
  } else {
#if MPK_NVSHMEM
    if (aborted(rank)) return false;
    /* Word by word: the source may be on this thread's stack, which a network card cannot read. */
    for (size_t i = 0; i < bytes / 8; ++i) nvshmem_uint64_p(to + i, from[i], static_cast<int>(pe));
#endif
  }
  return signal_add(rank, pe, local_signal, value);
}

}  // namespace platform
}  // namespace mpk

#endif
