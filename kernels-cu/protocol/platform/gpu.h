/* Everything that the steps of the protocol need from the machine, for the GPU target, under the names of
 * platform/cpu.h.
 *
 * Atomics are PTX with the scope and order that the step asks for. Writes to other ranks are in gpu_puts.h. */
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

#include "platform/one_thread.h"

namespace mpk {
namespace platform {

/* Threads of one block, of one GPU, of any GPU or the host: `.cta`, `.gpu`, `.sys`. */
enum class Scope { kThread, kDevice, kSystem };
/* The kernel may record a timeline (trace.h). */
constexpr bool kTraces = MPK_TRACE != 0;
/* A rank may have static and dynamic graphs (MPK_MIXED). If this is false, the kernel contains no code for that. */
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

/* Stores four adjacent words, each relaxed at system scope; `address` is aligned to 16 bytes. */
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

/* A release (and acquire) at device scope for the relaxed operations after it, together. */
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/* As OneThread, but a warp. */
struct Team {
  static constexpr uint32_t kSize = 32;
  __device__ uint32_t member() const { return threadIdx.x % 32; }
  template <typename T>
  __device__ T from_leader(T value) const {
    return __shfl_sync(0xFFFFFFFFu, value, 0);
  }
  __device__ uint32_t vote(bool yes) const { return __ballot_sync(0xFFFFFFFFu, yes); }
  __device__ uint64_t sum(uint64_t value) const {
    unsigned long long all = value;
#pragma unroll
    for (uint32_t distance = 16; distance != 0; distance /= 2) all += __shfl_xor_sync(0xFFFFFFFFu, all, distance);
    return all;
  }
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
/* As in cpu.h, but short, because a sleeping thread of a GPU cannot be woken. */
__device__ inline void park(const uint32_t*, uint32_t, uint64_t) { __nanosleep(500); }
__device__ inline void wake(uint32_t*) {}
__device__ inline void ring(uint32_t*) {} /* the host of a GPU polls */
__device__ inline bool tell(const int32_t*) { return false; }
__device__ inline uint32_t float_bits(float value) { return __float_as_uint(value); }
__device__ inline float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }

/* How a wait passes the time. The warps of an SM do not take cores from each other, so it polls. Once the wait has
 * become long it pauses between polls, so that thousands of waiting threads leave the memory system to the others. */
class Backoff {
 public:
  __device__ explicit Backoff(const mpk_rank*) {}
  /* True if enough time has passed for the caller to check the clock. */
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

#endif
