/* A check that says where it failed and ends the test program; and random numbers. */
#ifndef MPK_TEST_CHECK_H
#define MPK_TEST_CHECK_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, "" __VA_ARGS__);                                        \
      std::fprintf(stderr, "\n");                                                  \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)

/* xorshift64* with a seed: the tests are the same on every run. */
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Dull;
  }
  /* Uniform in [low, high]. */
  uint32_t between(uint32_t low, uint32_t high) { return low + static_cast<uint32_t>((next() >> 33) % (high - low + 1)); }
};

#endif
