/* Everything that the steps of the protocol need from the machine, for the CPU target. The GPU has the same names in
 * platform/gpu.h; the steps themselves include neither libstdc++ nor libc. Writes to other ranks are in cpu_puts.h. */
#ifndef MPK_PLATFORM_CPU_H
#define MPK_PLATFORM_CPU_H

#include <sched.h>
#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "mpk/abi.h"

#define MPK_DEVICE inline
/* Not urgent: kept out of line. */
#define MPK_DEVICE_COLD static __attribute__((noinline, cold, unused))

#include "platform/one_thread.h"

namespace mpk {
namespace platform {

/* The threads that may use the same atomic: threads of one block, of one rank, or of any rank. The CPU is
 * one coherence domain; on the GPU these are `.cta`, `.gpu` and `.sys`. */
enum class Scope { kThread, kDevice, kSystem };

/* A launch may record a timeline (trace.h). */
constexpr bool kTraces = true;

/* A rank may have static and dynamic graphs (MPK_MIXED). */
constexpr bool kMixedPlacement = true;

enum Order : int {
  kRelaxed = __ATOMIC_RELAXED,
  kAcquire = __ATOMIC_ACQUIRE,
/* Negative control for the tests: with it, ThreadSanitizer and the checksums must fail. Never set otherwise. */
#ifdef MPK_TEST_WEAKEN_RELEASE
  kRelease = __ATOMIC_RELAXED,
  kAcquireRelease = __ATOMIC_ACQUIRE,
#else
  kRelease = __ATOMIC_RELEASE,
  kAcquireRelease = __ATOMIC_ACQ_REL,
#endif
};

template <Scope S, typename T>
inline T load(const T* address, Order order) {
  if constexpr (S == Scope::kThread) return *address; /* a plain access, so that ThreadSanitizer sees whether the word is really private */
  return __atomic_load_n(address, order);
}

template <Scope S, typename T>
inline void store(T* address, T value, Order order) {
  if constexpr (S == Scope::kThread) *address = value;
  else __atomic_store_n(address, value, order);
}

/* Stores four adjacent words, each relaxed at system scope. */
inline void store_four(uint32_t* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store<Scope::kSystem>(address, a, kRelaxed);
  store<Scope::kSystem>(address + 1, b, kRelaxed);
  store<Scope::kSystem>(address + 2, c, kRelaxed);
  store<Scope::kSystem>(address + 3, d, kRelaxed);
}

template <Scope S, typename T>
inline T fetch_add(T* address, T value, Order order) {
  return __atomic_fetch_add(address, value, order);
}

/* Strong; a failed exchange loads `*expected` with relaxed order. */
template <Scope S, typename T>
inline bool compare_exchange(T* address, T* expected, T desired, Order order) {
  return __atomic_compare_exchange_n(address, expected, desired, false, order, __ATOMIC_RELAXED);
}

/* The threads that run a scheduler or a batch step together. */
using Team = OneThread;

/* A loop of dynamic placement checks the abort word and the clock once per this many steps without work. */
constexpr uint32_t kStepsBetweenPolls = 1;

inline uint32_t count_bits(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }

/* Nanoseconds of a monotonic clock, the same for all threads of a rank. */
inline uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline void sleep_ns(uint64_t ns) {
  timespec duration;
  duration.tv_sec = static_cast<time_t>(ns / 1000000000ull);
  duration.tv_nsec = static_cast<long>(ns % 1000000000ull);
  nanosleep(&duration, nullptr);
}

/* Sleeps until a thread wakes `word`, or for `ns`; returns at once if the word differs from `seen`. It may wake for no reason.
 * The word may be in memory that processes share. */
inline void park(const uint32_t* word, uint32_t seen, uint64_t ns) {
#if defined(__linux__)
  timespec longest;
  longest.tv_sec = static_cast<time_t>(ns / 1000000000ull);
  longest.tv_nsec = static_cast<long>(ns % 1000000000ull);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &longest, nullptr, 0);
#else
  if (load<Scope::kSystem>(word, kRelaxed) == seen) sleep_ns(ns < 1000000 ? ns : 1000000);
#endif
}

/* Wakes all threads that sleep on `word`. Called after it has changed. */
inline void wake(uint32_t* word) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, 0x7FFFFFFF, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

/* Tells the host, which may sleep on `word`, that there is news. Release: pairs with the host's acquire of the word
 * before it looks at the results. So the host does not go to sleep while there is news that it has not seen. */
inline void ring(uint32_t* word) {
  fetch_add<Scope::kSystem>(word, 1u, kRelease);
  wake(word);
}

/* Tells the thread that sleeps on the eventfd in `event` that there is news; false if there is no eventfd. It belongs to this
 * process. */
inline bool tell(const int32_t* event) {
#if defined(__linux__)
  /* Relaxed: the eventfd is open before it is named, and stays open while this runs. */
  const int32_t file = load<Scope::kSystem>(event, kRelaxed);
  const uint64_t one = 1;
  return file > 0 && write(file, &one, sizeof(one)) == sizeof(one);
#else
  (void)event;
  return false;
#endif
}

/* Plain memory, not atomic. */
inline void copy_bytes(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* Takes one turn of the proxy. False if that is not possible now: a thread that is taking one may need this core. */
inline bool help_proxy(mpk_proxy* proxy) { return proxy != nullptr && proxy->help != nullptr && proxy->help(proxy->helper) != 0; }

/* How a wait passes the time. It spins while its peer is probably running on another core, then yields the core, then sleeps,
 * so that waiting threads leave the cores to the threads that compute. With more threads than cores (mpk_rank.oversubscribed)
 * it yields at once, because the awaited thread may need this very core. If only the proxy lacks a core, the wait sleeps as
 * late as with enough cores, because a sleep takes longer than a message. Hundreds of threads on one core would keep it busy
 * by polling alone: the more threads there are, the fewer yields each makes and the longer it sleeps.
 *
 * If the proxy has no core of its own, a waiting thread also takes the proxy's turns. Switching to the proxy's thread
 * and back would take longer than the turn. */
class Backoff {
 public:
  explicit Backoff(const mpk_rank* rank)
      : spins_(rank->oversubscribed != MPK_CORES_ENOUGH ? 0u : kSpins),
        yields_(rank->oversubscribed == MPK_CORES_FEW ? kYieldsShared : kYields),
        proxy_(rank->oversubscribed != MPK_CORES_ENOUGH ? rank->proxy : nullptr) {
    const uint32_t threads = rank->threads_per_core;
    if (rank->oversubscribed != MPK_CORES_FEW || threads < 2 * kThreadsASleep) return;
    if (yields_ > kYieldsOfCore / threads) yields_ = kYieldsOfCore / threads;
    first_sleep_ns_ = kFirstSleepNs * (threads / kThreadsASleep);
    sleep_ns_ = first_sleep_ns_;
  }

  /* True if enough time has passed for the caller to check the clock. */
  bool step() {
    ++count_;
    if (count_ <= spins_) {
      pause();
      return (count_ & 63u) == 0;
    }
    help_proxy(proxy_);
    if (count_ <= spins_ + yields_) {
      sched_yield();
    } else {
      sleep_ns(sleep_ns_);
      if (sleep_ns_ < kSleeps * first_sleep_ns_) sleep_ns_ += first_sleep_ns_;
    }
    return true;
  }

  void reset() {
    count_ = 0;
    sleep_ns_ = first_sleep_ns_;
  }

 private:
  static constexpr uint32_t kSpins = 2000;
  static constexpr uint32_t kYields = 500;
  static constexpr uint32_t kYieldsShared = 20;
  static constexpr uint64_t kFirstSleepNs = 20000;
  static constexpr uint64_t kSleeps = 10; /* the longest sleep, as a multiple of the first */
  /* A look takes 2 to 3 us of a core. With this many threads, each looking every 200 us, polling takes a tenth of
   * the core. */
  static constexpr uint32_t kThreadsASleep = 10;
  static constexpr uint32_t kYieldsOfCore = 1000;
  uint32_t count_ = 0;
  uint32_t spins_, yields_;
  mpk_proxy* proxy_;
  uint64_t first_sleep_ns_ = kFirstSleepNs;
  uint64_t sleep_ns_ = kFirstSleepNs;
};

/* Has the frames sent, if the proxy has no core of its own. This is only a hint: the proxy's thread wakes now and then anyway. */
inline void make_way_for_proxy(const mpk_rank* rank) {
  if (rank->proxy == nullptr || rank->oversubscribed == MPK_CORES_ENOUGH) return;
  /* Relaxed: no data depends on it. */
  const uint64_t put = load<Scope::kDevice>(&rank->proxy->reserved, kRelaxed);
  if (put != load<Scope::kSystem>(rank->proxy->head, kRelaxed) && !help_proxy(rank->proxy)) sched_yield();
}

}  // namespace platform
}  // namespace mpk

#endif
