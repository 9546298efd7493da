/* A team of threads (platform::Team), as a warp is a team on a GPU. Only `sync` orders memory: votes and the leader's values
 * go through relaxed words, so that ThreadSanitizer sees a missing barrier. */
#ifndef MPK_TEST_THREAD_TEAM_H
#define MPK_TEST_THREAD_TEAM_H

#include <barrier>
#include <cstdint>
#include <thread>

struct ThreadTeam {
  static constexpr uint32_t kSize = 3;
  static constexpr uint32_t kTurns = 64; /* more than a member can be ahead of another: each vote waits for all members */

  struct Meeting {
    std::barrier<> barrier{kSize};
    uint64_t value[kTurns] = {};       /* the leader's value in the low half, valid if the turn's number + 1 is in the high half */
    uint32_t said[kTurns][kSize] = {}; /* likewise a member's vote in the lowest bit, and the turn's number + 1 above it */
    uint64_t part[kTurns][kSize] = {}; /* as `value`, a member's half of its value */
  };

  Meeting* meeting;
  uint32_t self;
  mutable uint32_t turn = 0;

  uint32_t member() const { return self; }
  void sync() const { meeting->barrier.arrive_and_wait(); }
  template <typename T>
  T from_leader(T value) const {
    uint64_t* const word = &meeting->value[turn++ % kTurns];
    if (self == 0) __atomic_store_n(word, static_cast<uint64_t>(turn) << 32 | static_cast<uint32_t>(value), __ATOMIC_RELAXED);
    uint64_t seen;
    while ((seen = __atomic_load_n(word, __ATOMIC_RELAXED)) >> 32 != turn) std::this_thread::yield();
    return static_cast<T>(static_cast<uint32_t>(seen));
  }
  uint32_t vote(bool yes) const {
    uint32_t* const words = meeting->said[turn++ % kTurns];
    __atomic_store_n(&words[self], turn << 1 | static_cast<uint32_t>(yes), __ATOMIC_RELAXED);
    uint32_t mask = 0;
    for (uint32_t i = 0; i < kSize; ++i) {
      uint32_t seen;
      while ((seen = __atomic_load_n(&words[i], __ATOMIC_RELAXED)) >> 1 != (turn & 0x7FFFFFFF)) std::this_thread::yield();
      mask |= (seen & 1) << i;
    }
    return mask;
  }
  uint64_t sum(uint64_t value) const { return sum_of_halves(static_cast<uint32_t>(value)) + (sum_of_halves(static_cast<uint32_t>(value >> 32)) << 32); }

 private:
  uint64_t sum_of_halves(uint32_t half) const {
    uint64_t* const words = meeting->part[turn++ % kTurns];
    __atomic_store_n(&words[self], static_cast<uint64_t>(turn) << 32 | half, __ATOMIC_RELAXED);
    uint64_t all = 0;
    for (uint32_t i = 0; i < kSize; ++i) {
      uint64_t seen;
      while ((seen = __atomic_load_n(&words[i], __ATOMIC_RELAXED)) >> 32 != turn) std::this_thread::yield();
      all += static_cast<uint32_t>(seen);
    }
    return all;
  }
};

#endif
