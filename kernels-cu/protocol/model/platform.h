/* The third platform of the protocol's steps, next to platform/cpu.h and platform/gpu.h: atomics are operations of the model
 * checker (model.h). It is compiled with calls before each plain load and store (shadow.cpp), so plain memory is checked
 * too. */
#ifndef MPK_MODEL_PLATFORM_H
#define MPK_MODEL_PLATFORM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "model/model.h"
#include "mpk/abi.h"

#define MPK_DEVICE inline
#define MPK_DEVICE_COLD static __attribute__((noinline, unused))

#include "platform/one_thread.h"

/* Each use of an order knows its place in the source. */
#define kRelaxed order_at(::mpk::model::Kind::kRelaxed, __FILE__, __LINE__)
#define kAcquire order_at(::mpk::model::Kind::kAcquire, __FILE__, __LINE__)
#define kRelease order_at(::mpk::model::Kind::kRelease, __FILE__, __LINE__)
#define kAcquireRelease order_at(::mpk::model::Kind::kAcquireRelease, __FILE__, __LINE__)

namespace mpk {
namespace platform {

enum class Scope { kThread, kDevice, kSystem };
constexpr bool kTraces = true;
constexpr bool kMixedPlacement = true;
using Order = model::Order;
inline Order order_at(model::Kind kind, const char* file, int line) { return Order{kind, file, line}; }

template <Scope S, typename T>
inline T load(const T* address, Order order, const char* function = __builtin_FUNCTION()) {
  if constexpr (S == Scope::kThread) return *address; /* a plain access, so that the checker sees whether the word is really private */
  else return static_cast<T>(model::load(address, sizeof(T), S == Scope::kSystem, order, function));
}

template <Scope S, typename T>
inline void store(T* address, T value, Order order, const char* function = __builtin_FUNCTION()) {
  if constexpr (S == Scope::kThread) *address = value;
  else model::store(address, sizeof(T), S == Scope::kSystem, static_cast<uint64_t>(value), order, function);
}

/* Writes only to the status, which the checker leaves out: no step reads it. */
inline void store_four(uint32_t*, uint32_t, uint32_t, uint32_t, uint32_t) {}

template <Scope S, typename T>
inline T fetch_add(T* address, T value, Order order) {
  return static_cast<T>(model::fetch_add(address, sizeof(T), S == Scope::kSystem, static_cast<uint64_t>(value), order));
}

template <Scope S, typename T>
inline bool compare_exchange(T* address, T* expected, T desired, Order order) {
  uint64_t wanted = static_cast<uint64_t>(*expected);
  const bool done = model::compare_exchange(address, sizeof(T), S == Scope::kSystem, &wanted, static_cast<uint64_t>(desired), order);
  *expected = static_cast<T>(wanted);
  return done;
}

using Team = OneThread;

constexpr uint32_t kStepsBetweenPolls = 1;

inline uint32_t count_bits(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }
inline uint64_t clock_ns() { return model::clock_ns(); }
inline void pause() {}
inline void sleep_ns(uint64_t) {}
/* Sleeping on a word is waiting like any other; a late wake costs only time. */
inline void park(const uint32_t*, uint32_t, uint64_t) { model::wait_turn(0xFFFFFFFFu); }
inline void wake(uint32_t*) {}
inline void ring(uint32_t*) {}
inline bool tell(const int32_t*) { return false; }

inline void copy_bytes(void* to, const void* from, size_t bytes) { model::copy(to, from, bytes); }

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

/* A waiting thread is blocked until another one writes what it reads. */
class Backoff {
 public:
  explicit Backoff(const mpk_rank*) {}
  bool step() { return model::wait_turn(count_++); }
  void reset() { count_ = 0; }

 private:
  uint32_t count_ = 0;
};

/* Only a hint to the system: any thread may run next anyway. */
inline void make_way_for_proxy(const mpk_rank*) {}

template <typename T>
inline T* peer_address(const mpk_rank* rank, uint32_t pe, T* local) {
  uint8_t* base = rank->sym[pe];
  if (base == nullptr) return nullptr;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(local) - reinterpret_cast<uintptr_t>(rank->sym[rank->rank]);
  return reinterpret_cast<T*>(base + offset);
}

/* With MPK_SIGNALS_NVSHMEM, everything that goes to a rank is a message: it leaves at once and arrives at some later time. A
 * signal's fence orders it after all earlier messages from this rank to that rank: those of this thread, and those of other
 * threads that happen before the fence. Puts are not ordered with each other. */
inline uint64_t channel(const mpk_rank* rank, uint32_t pe) { return static_cast<uint64_t>(rank->rank) * 64 + pe; }

inline bool put_word(const mpk_rank* rank, uint32_t pe, uint64_t* local_destination, uint64_t value) {
  uint64_t* destination = peer_address(rank, pe, local_destination);
  if (destination == nullptr) return false;
  if (rank->signals == MPK_SIGNALS_DIRECT) {
    store<Scope::kSystem>(destination, value, kRelaxed);
  } else {
    model::send(channel(rank, pe), false, [=] { store<Scope::kSystem>(destination, value, kRelaxed); });
  }
  return true;
}

/* Used only for the decisions of a parked rank, which no check has yet. */
inline void order_puts(const mpk_rank*) {}

inline bool put(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes) {
  uint8_t* destination = peer_address(rank, pe, static_cast<uint8_t*>(local_destination));
  if (destination == nullptr) return false;
  if (rank->signals == MPK_SIGNALS_DIRECT) {
    model::copy(destination, source, bytes);
  } else {
    model::send(channel(rank, pe), false, [=] { model::copy(destination, source, bytes); });
  }
  return true;
}

inline bool put_rows(const mpk_rank* rank, uint32_t pe, void* local_destination, size_t destination_stride, const void* source,
                     size_t source_stride, size_t rows, size_t row_bytes) {
  bool reached = true;
  for (size_t row = 0; row < rows && reached; ++row) {
    reached = put(rank, pe, static_cast<uint8_t*>(local_destination) + row * destination_stride,
                  static_cast<const uint8_t*>(source) + row * source_stride, row_bytes);
  }
  return reached;
}

/* Release in both paths. */
inline bool signal_add(const mpk_rank* rank, uint32_t pe, uint64_t* local_counter, uint64_t value) {
  uint64_t* counter = peer_address(rank, pe, local_counter);
  if (counter == nullptr) return false;
  const auto add = [=] { fetch_add<Scope::kSystem>(counter, value, kRelease); };
  if (rank->signals == MPK_SIGNALS_DIRECT) add();
  else model::send(channel(rank, pe), true, add);
  return true;
}

/* For small data. The source may be on the stack, so it is read at once, word by word; the words leave as puts. */
inline bool put_with_signal(const mpk_rank* rank, uint32_t pe, void* local_destination, const void* source, size_t bytes,
                            uint64_t* local_signal, uint64_t value) {
  uint8_t* destination = peer_address(rank, pe, static_cast<uint8_t*>(local_destination));
  if (destination == nullptr) return false;
  if (rank->signals == MPK_SIGNALS_DIRECT) {
    model::copy(destination, source, bytes);
  } else {
    struct Words {
      uint64_t word[4];
    } words = {};
    memcpy(&words, source, bytes < sizeof(words) ? bytes : sizeof(words));
    model::send(channel(rank, pe), false, [=] { model::copy(destination, &words, bytes); });
  }
  return signal_add(rank, pe, local_signal, value);
}

}  // namespace platform
}  // namespace mpk

#endif
