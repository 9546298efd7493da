/* Everything the steps of the protocol need from the machine, for the GPU target: the names of platform/cpu.h.
 *
 * Atomics are PTX with the scope and order that the step asks for. A peer's memory is reached by stores where
 * mpk_rank.sym has a pointer, otherwise through NVSHMEM's device calls (MPK_NVSHMEM=1), or by the host (MPK_HOST_PROXY=1): frames in a
 * ring in the host's memory, which the rank's proxy carries (frames.h). What comes from elsewhere a warp of this kernel does
 * (protocol/gpu/inbox.cuh). So all atomics on a counter are this GPU's own.
 *
 * NVSHMEM's calls may wait. A put, fence or signal to a rank out of reach is a request to NVSHMEM's proxy or to a network card;
 * where a link is dead the room for requests runs out, and the call does not return. Nothing here can bound it. So
 * - no thread begins such a signal once the rank is aborted (`aborted`), and no other loop of the protocol waits for a
 *   thread that is inside one without its own deadline: the rest of the rank ends, and reports where it stood;
 * - ranks out of reach are told of an abort by one thread, as its last act (abort_out_of_reach);
 * - the kernel ends only when every call has returned. The host waits for that a bounded time after the abort, then reports
 *   and ends the process without the kernel (distributed/src/cuda/run.rs). */
#ifndef MPK_PLATFORM_GPU_H
#define MPK_PLATFORM_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "mpk/abi.h"

#ifndef MPK_NVSHMEM
#define MPK_NVSHMEM 0
#endif
#ifndef MPK_TRACE
#define MPK_TRACE 0
#endif
#ifndef MPK_MIXED_PLACEMENT
#define MPK_MIXED_PLACEMENT 0
#endif
#ifndef MPK_HOST_PROXY
#define MPK_HOST_PROXY 0
#endif
#if MPK_NVSHMEM
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

#define MPK_DEVICE __device__ inline
#define MPK_DEVICE_COLD static __device__ __noinline__

namespace mpk {
namespace platform {

/* Threads of one block, of one GPU, of any GPU and the host: `.cta`, `.gpu`, `.sys`. */
enum class Scope { kThread, kDevice, kSystem };
/* The kernel may keep a timeline (trace.h). */
constexpr bool kTraces = MPK_TRACE != 0;
/* A rank may have static and dynamic graphs (MPK_MIXED). Without it the kernel has nothing of that. */
constexpr bool kMixedPlacement = MPK_MIXED_PLACEMENT != 0;
enum Order : int { kRelaxed, kAcquire, kRelease, kAcquireRelease };

/* One PTX instruction for each width, scope and order; the order is a constant after inlining. */
template <Scope S>
struct ScopeTag {};

#define MPK_PLATFORM_ATOMICS(SCOPE, PTX)                                                                              \
  __device__ inline uint32_t load_bits(ScopeTag<SCOPE>, const uint32_t* p, bool acquire) {                            \
    uint32_t v;                                                                                                       \
    if (acquire)                                                                                                      \
      asm volatile("ld.acquire." PTX ".global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");                           \
    else                                                                                                              \
      asm volatile("ld.relaxed." PTX ".global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");                           \
    return v;                                                                                                         \
  }                                                                                                                   \
  __device__ inline uint64_t load_bits(ScopeTag<SCOPE>, const uint64_t* p, bool acquire) {                            \
    uint64_t v;                                                                                                       \
    if (acquire)                                                                                                      \
      asm volatile("ld.acquire." PTX ".global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");                           \
    else                                                                                                              \
      asm volatile("ld.relaxed." PTX ".global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");                           \
    return v;                                                                                                         \
  }                                                                                                                   \
  __device__ inline void store_bits(ScopeTag<SCOPE>, uint32_t* p, uint32_t v, bool release) {                         \
    if (release)                                                                                                      \
      asm volatile("st.release." PTX ".global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");                             \
    else                                                                                                              \
      asm volatile("st.relaxed." PTX ".global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");                             \
  }                                                                                                                   \
  __device__ inline void store_bits(ScopeTag<SCOPE>, uint64_t* p, uint64_t v, bool release) {                         \
    if (release)                                                                                                      \
      asm volatile("st.release." PTX ".global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");                             \
    else                                                                                                              \
      asm volatile("st.relaxed." PTX ".global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");                             \
  }                                                                                                                   \
  __device__ inline uint32_t add_bits(ScopeTag<SCOPE>, uint32_t* p, uint32_t v, bool release) {                       \
    uint32_t old;                                                                                                     \
    if (release)                                                                                                      \
      asm volatile("atom.release." PTX ".global.add.u32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(v) : "memory");        \
    else                                                                                                              \
      asm volatile("atom.relaxed." PTX ".global.add.u32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(v) : "memory");        \
    return old;                                                                                                       \
  }                                                                                                                   \
  __device__ inline uint64_t add_bits(ScopeTag<SCOPE>, uint64_t* p, uint64_t v, bool release) {                       \
    uint64_t old;                                                                                                     \
    if (release)                                                                                                      \
      asm volatile("atom.release." PTX ".global.add.u64 %0,[%1],%2;" : "=l"(old) : "l"(p), "l"(v) : "memory");        \
    else                                                                                                              \
      asm volatile("atom.relaxed." PTX ".global.add.u64 %0,[%1],%2;" : "=l"(old) : "l"(p), "l"(v) : "memory");        \
    return old;                                                                                                       \
  }                                                                                                                   \
  __device__ inline uint32_t cas_bits(ScopeTag<SCOPE>, uint32_t* p, uint32_t expected, uint32_t desired,              \
                                      bool acquire_release) {                                                         \
    uint32_t old;                                                                                                     \
    if (acquire_release)                                                                                              \
      asm volatile("atom.acq_rel." PTX ".global.cas.b32 %0,[%1],%2,%3;"                                               \
                   : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");                                     \
    else                                                                                                              \
      asm volatile("atom.relaxed." PTX ".global.cas.b32 %0,[%1],%2,%3;"                                               \
                   : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");                                     \
    return old;                                                                                                       \
  }                                                                                                                   \
  __device__ inline uint64_t cas_bits(ScopeTag<SCOPE>, uint64_t* p, uint64_t expected, uint64_t desired,              \
                                      bool acquire_release) {                                                         \
    uint64_t old;                                                                                                     \
    if (acquire_release)                                                                                              \
      asm volatile("atom.acq_rel." PTX ".global.cas.b64 %0,[%1],%2,%3;"                                               \
                   : "=l"(old) : "l"(p), "l"(expected), "l"(desired) : "memory");                                     \
    else                                                                                                              \
      asm volatile("atom.relaxed." PTX ".global.cas.b64 %0,[%1],%2,%3;"                                               \
                   : "=l"(old) : "l"(p), "l"(expected), "l"(desired) : "memory");                                     \
    return old;                                                                                                       \
  }
MPK_PLATFORM_ATOMICS(Scope::kThread, "cta")
MPK_PLATFORM_ATOMICS(Scope::kDevice, "gpu")
MPK_PLATFORM_ATOMICS(Scope::kSystem, "sys")
#undef MPK_PLATFORM_ATOMICS

template <size_t Bytes>
struct Word;
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<8> {
  using Type = uint64_t;
};
template <typename T>
using Bits = typename Word<sizeof(T)>::Type;

template <Scope S, typename T>
__device__ inline T load(const T* address, Order order) {
  return static_cast<T>(load_bits(ScopeTag<S>(), reinterpret_cast<const Bits<T>*>(address), order == kAcquire));
}

template <Scope S, typename T>
__device__ inline void store(T* address, T value, Order order) {
  store_bits(ScopeTag<S>(), reinterpret_cast<Bits<T>*>(address), static_cast<Bits<T>>(value), order == kRelease);
}

/* Four words side by side, each relaxed at system scope; `address` is aligned to 16. */
__device__ inline void store_four(uint32_t* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

template <Scope S, typename T>
__device__ inline T fetch_add(T* address, T value, Order order) {
  return static_cast<T>(add_bits(ScopeTag<S>(), reinterpret_cast<Bits<T>*>(address), static_cast<Bits<T>>(value), order == kRelease || order == kAcquireRelease));
}

/* Strong; a failed exchange loads `*expected`. */
template <Scope S, typename T>
__device__ inline bool compare_exchange(T* address, T* expected, T desired, Order order) {
  const T old = static_cast<T>(cas_bits(ScopeTag<S>(), reinterpret_cast<Bits<T>*>(address), static_cast<Bits<T>>(*expected),
                                        static_cast<Bits<T>>(desired), order != kRelaxed));
  if (old == *expected) return true;
  *expected = old;
  return false;
}

/* As in cpu.h: a warp. */
struct Team {
  static constexpr uint32_t kSize = 32;
  __device__ uint32_t member() const { return threadIdx.x % 32; }
  template <typename T>
  __device__ T from_leader(T value) const {
    return __shfl_sync(0xFFFFFFFFu, value, 0);
  }
  __device__ uint32_t vote(bool yes) const { return __ballot_sync(0xFFFFFFFFu, yes); }
  __device__ void sync() const { __syncwarp(); }
};

/* As in cpu.h. Each look takes two round trips to the L2 cache, longer than a step. */
constexpr uint32_t kStepsBetweenPolls = 8;

__device__ inline uint32_t count_bits(uint32_t mask) { return static_cast<uint32_t>(__popc(mask)); }

/* Nanoseconds, the same clock for all threads of a GPU. */
__device__ inline uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void pause() { __nanosleep(20); }
__device__ inline void sleep_ns(uint64_t ns) { __nanosleep(ns < 1000000 ? static_cast<uint32_t>(ns) : 1000000u); }
/* As in cpu.h, but short: nobody can wake a thread here. */
__device__ inline void park(const uint32_t*, uint32_t, uint64_t) { __nanosleep(500); }
__device__ inline void wake(uint32_t*) {}
__device__ inline void ring(uint32_t*) {} /* the host of a GPU polls */
__device__ inline uint32_t float_bits(float value) { return __float_as_uint(value); }
__device__ inline float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }

/* How a wait passes its time. Warps of an SM do not take cores from each other: it polls, with pauses once the wait has
 * become long, so that thousands of waiting threads leave the memory system to the others. */
class Backoff {
 public:
  __device__ explicit Backoff(const mpk_rank*) {}
  /* True when enough time went by that the caller should look at the clock. */
  __device__ bool step() {
    if (++count_ > kSpins) pause();
    return (count_ & 63u) == 0;
  }
  __device__ void reset() { count_ = 0; }

 private:
  static constexpr uint32_t kSpins = 256;
  uint32_t count_ = 0;
};

/* As in cpu.h: by one thread, for small things. */
__device__ inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) & 7) == 0) {
    for (size_t i = 0; i < bytes / 8; ++i) static_cast<uint64_t*>(to)[i] = static_cast<const uint64_t*>(from)[i];
  } else {
    for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
  }
}

}  // namespace platform
}  // namespace mpk

#if MPK_HOST_PROXY
#include "frames.h"
#endif

namespace mpk {
namespace platform {

#if MPK_HOST_PROXY
/* Out of the way of the tasks' code. */
static __device__ __noinline__ bool host_words(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, const uint64_t* values, uint32_t count) {
  /* An abort overtakes what is in the ring, which may be full: the proxy looks at this word, and tells all ranks. */
  if (local_destination == reinterpret_cast<uint64_t*>(rank->control)) {
    /* Relaxed: nothing is read on the strength of it. */
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

/* One 8-byte word at rank `pe`, relaxed: its reader tells by the word itself whether it has come. */
__device__ inline bool put_word(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, uint64_t value) {
  uint64_t* destination = peer_address(rank, pe, local_destination);
  if (destination != nullptr) {
    store<Scope::kSystem>(destination, value, kRelaxed);
    return true;
  }
#if MPK_HOST_PROXY
  return host_words(rank, pe, local_destination, &value, 1);
#elif MPK_NVSHMEM
  nvshmem_uint64_p(local_destination, value, static_cast<int>(pe));
  return true;
#else
  return false;
#endif
}

/* As in cpu.h: stores to one place are in order, NVSHMEM's puts only behind its fence. */
__device__ inline void order_puts() {
#if MPK_NVSHMEM
  nvshmem_fence();
#endif
}

/* The rank has been aborted. Relaxed: as abort_code. */
__device__ inline bool aborted(const mpk_rank* rank) { return load<Scope::kSystem>(&rank->control->abort, kRelaxed) != MPK_OK; }

/* Adds to rank `pe`'s copy of a symmetric counter, after all that this thread has put there or has been told of
 * (release at system scope; NVSHMEM: fence, then signal). Which of the two is the job's choice, not the peer's: NVSHMEM
 * promises that its signals are atomic with each other, not with atomics that reach the same counter by a pointer. */
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
  __threadfence_system(); /* what went to peers by stores, and what this thread was told of */
  nvshmem_fence();        /* what went to `pe` by NVSHMEM */
  nvshmemx_signal_op(local_counter, value, NVSHMEM_SIGNAL_ADD, static_cast<int>(pe));
  return true;
#else
  return false;
#endif
}

/* By one thread, for small things: `bytes`, a multiple of 8 as both addresses are, then the signal. Both go the same way, so
 * neither overtakes an earlier signal of this thread. */
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
    /* Word by word: the source may lie on this thread's stack, which a network can't read. */
    for (size_t i = 0; i < bytes / 8; ++i) nvshmem_uint64_p(to + i, from[i], static_cast<int>(pe));
#endif
  }
  return signal_add(rank, pe, local_signal, value);
}

}  // namespace platform
}  // namespace mpk

#endif
