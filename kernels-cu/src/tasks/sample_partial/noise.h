/* The arithmetic of sampling, with one source for both targets. Every operation is rounded once and none is contracted, so both
 * targets get the same bits. */
#ifndef MPK_TASK_SAMPLE_PARTIAL_NOISE_H
#define MPK_TASK_SAMPLE_PARTIAL_NOISE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "mpk/abi.h"
#include "tasks/sample_partial/params.h"
#include "tasks/token_counts/params.h"

#ifdef __CUDACC__
#define MPK_SAMPLE_FN __device__ __forceinline__
#else
#define MPK_SAMPLE_FN static inline __attribute__((always_inline))
#endif

namespace mpk {
namespace sampling {

#ifdef __CUDACC__
MPK_SAMPLE_FN uint32_t bits_of(float v) { return __float_as_uint(v); }
MPK_SAMPLE_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }
MPK_SAMPLE_FN float product(float a, float b) { return __fmul_rn(a, b); }
MPK_SAMPLE_FN float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
/* The words of a product. In assembly, because the compiler adds an instruction to each product of 64-bit numbers in a large kernel. */
MPK_SAMPLE_FN void wide_product(uint32_t a, uint32_t b, uint32_t* low, uint32_t* high) {
  asm("{.reg .b64 p; mul.wide.u32 p,%2,%3; mov.b64 {%0,%1},p;}" : "=r"(*low), "=r"(*high) : "r"(a), "r"(b));
}
#else
MPK_SAMPLE_FN uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return bits;
}
MPK_SAMPLE_FN float float_of(uint32_t bits) {
  float v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}
MPK_SAMPLE_FN float product(float a, float b) { return a * b; }
MPK_SAMPLE_FN float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MPK_SAMPLE_FN void wide_product(uint32_t a, uint32_t b, uint32_t* low, uint32_t* high) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  *low = static_cast<uint32_t>(product);
  *high = static_cast<uint32_t>(product >> 32);
}
#endif

/* Philox4x32-10 (Salmon et al., SC 2011): four words that depend only on the counter and the key. */
struct PhiloxWords {
  uint32_t word[4];
};
MPK_SAMPLE_FN PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    uint32_t a, a_high, b, b_high;
    wide_product(0xD2511F53u, c0, &a, &a_high);
    wide_product(0xCD9E8D57u, c2, &b, &b_high);
    c0 = b_high ^ c1 ^ k0;
    c1 = b;
    c2 = a_high ^ c3 ^ k1;
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/* Natural logarithm of a positive normal number, within 2 units in the last place. */
MPK_SAMPLE_FN float logarithm(float x) {
  const uint32_t bits = bits_of(x);
  float m = float_of((bits & 0x007FFFFFu) | 0x3F800000u);
  float e = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const bool high = m > 1.41421356f;
  m = high ? product(m, 0.5f) : m;
  e = high ? e + 1.0f : e;
  const float f = m - 1.0f, z = product(f, f);
  float p = 7.0376836292e-2f;
  p = multiply_add(p, f, -1.1514610310e-1f);
  p = multiply_add(p, f, 1.1676998740e-1f);
  p = multiply_add(p, f, -1.2420140846e-1f);
  p = multiply_add(p, f, 1.4249322787e-1f);
  p = multiply_add(p, f, -1.6668057665e-1f);
  p = multiply_add(p, f, 2.0000714765e-1f);
  p = multiply_add(p, f, -2.4999993993e-1f);
  p = multiply_add(p, f, 3.3333331174e-1f);
  float y = product(product(f, z), p);
  y = multiply_add(e, -2.12194440e-4f, y);
  y = multiply_add(-0.5f, z, y);
  return multiply_add(e, 0.693359375f, f + y);
}

/* A Gumbel variable from 32 random bits: -ln(-ln(1 - v)), v uniform in (0, 1). High values come from a small v, which has all
 * its bits. ln(1 - v) is accurate there too, because the rounding error of 1 - v is added back. */
MPK_SAMPLE_FN float gumbel(uint32_t random) {
  float v = product(static_cast<float>(random) + 0.5f, 0x1p-32f);
  v = v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
  const float rest = 1.0f - v;
  const float lost = (1.0f - rest) - v;
  return -logarithm(-(logarithm(rest) + lost));
}

/* An upper bound of the noise. The highest value is gumbel(0), 22.87. */
constexpr float kMostNoise = 23.0f;

/* An upper bound of gumbel(random), with few operations: -ln(-ln(1 - v)) < -ln(v), and the bits of a float are about its
 * logarithm, at most 0.06 too low. The bound is at most 0.07 above -ln(v). */
MPK_SAMPLE_FN float most_gumbel(uint32_t random) {
  const uint32_t bits = bits_of(static_cast<float>(random) + 0.5f);
  return multiply_add(static_cast<float>(static_cast<int32_t>(bits)), -0x1.62e430p-24f, 110.212f);
}

/* The random word of a token at a position of its sequence, and its noise. */
MPK_SAMPLE_FN uint32_t random_word(uint64_t seed, uint32_t position, uint32_t token) {
  return philox(position, token, 0, 0, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)).word[0];
}
MPK_SAMPLE_FN float noise(uint64_t seed, uint32_t position, uint32_t token) { return gumbel(random_word(seed, position, token)); }

/* A logit after penalties and temperature. NaN counts as the lowest. `count`: the token's word of `token_counts`. */
MPK_SAMPLE_FN float processed(float x, uint32_t count, const mpk_sampling& s) {
  x = x == x ? x : -INFINITY;
  if (count != 0) {
    x = product(x, x > 0.0f ? s.inverse_repetition : s.repetition);
    const uint32_t times = count & ~MPK_COUNT_IN_PROMPT;
    if (times != 0) x = x - multiply_add(s.frequency, static_cast<float>(times), s.presence);
  }
  return product(x, s.inverse_temperature) + 0.0f; /* avoids a negative zero, whose key would differ */
}

/* The order of tokens as a number: a higher logit gives a higher number; among equal logits, a lower token does. */
MPK_SAMPLE_FN uint64_t key_of(float value, uint32_t token) {
  const uint32_t bits = bits_of(value);
  const uint32_t ordered = bits ^ ((bits & 0x80000000u) != 0 ? 0xFFFFFFFFu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~token);
}
MPK_SAMPLE_FN float value_of_key(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return float_of(ordered ^ ((ordered & 0x80000000u) != 0 ? 0x80000000u : 0xFFFFFFFFu));
}
MPK_SAMPLE_FN uint32_t token_of_key(uint64_t key) { return ~static_cast<uint32_t>(key); }

/* e^(value - highest) in units of 2^-31, rounded. Sums of integers do not depend on their order or on how the vocabulary is
 * split. */
MPK_SAMPLE_FN uint32_t weight(float value, float highest) {
  float x = value == highest ? 0.0f : value - highest; /* also for infinite logits */
  x = x > -104.0f ? x : -104.0f;
  const float shifted = product(x, 0x1.715476p+0f) + 0x1.8p+23f, n = shifted - 0x1.8p+23f; /* the nearest whole number, also in the low bits */
  float r = multiply_add(n, -0x1.62e4p-1f, x);
  r = multiply_add(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.a01a02p-13f;
  p = multiply_add(p, r, 0x1.6c16c2p-10f);
  p = multiply_add(p, r, 0x1.111112p-7f);
  p = multiply_add(p, r, 0x1.555556p-5f);
  p = multiply_add(p, r, 0x1.555556p-3f);
  p = multiply_add(p, r, 0.5f);
  p = multiply_add(p, product(r, r), r) + 1.0f;
  const float scale = float_of((bits_of(shifted) + 31 + 127) << 23);
  return static_cast<uint32_t>(product(p, scale) + 0.5f);
}

/* Whether min-p keeps a logit. */
MPK_SAMPLE_FN bool passes_min_p(float value, float highest, const mpk_sampling& s) {
  const float below = value == highest ? 0.0f : value - highest;
  return below >= s.log_min_p;
}
/* Whether top-p keeps a token, given the weight of all tokens before it and of all tokens that the other filters keep. */
MPK_SAMPLE_FN bool passes_top_p(uint64_t before, uint64_t all, const mpk_sampling& s) {
  return s.top_p >= 1.0f || static_cast<double>(before) < static_cast<double>(s.top_p) * static_cast<double>(all);
}

/* What a record says of the batch state's hash. */
MPK_SAMPLE_FN uint32_t folded(uint64_t hash) { return static_cast<uint32_t>(hash) ^ static_cast<uint32_t>(hash >> 32); }

/* How the token of a request is chosen. */
enum Mode : uint32_t {
  kUnused = 0,  /* there is no request */
  kHighest = 1, /* the highest processed logit: greedy requests */
  kDraw = 2,    /* the highest noisy value */
  kList = 3,    /* top-k that is small or meets top-p: from a list of the top_k highest logits */
  kFrontier = 4 /* other filters: from the frontier, and the weight of all tokens before each of its entries */
};
/* A list of so few logits costs less than a frontier with its weights, and gives the same token. */
constexpr uint32_t kShortList = 64;
constexpr uint32_t kImpossible = 5; /* the host should have refused the request */

/* A request as the kernel uses it. A top_k above the number of tokens keeps all of them. The numbers of a request without
 * sampling are 0, so its logits stay as they are. */
MPK_SAMPLE_FN mpk_sampling taken(mpk_sampling s, uint32_t kept) {
  if ((s.flags & MPK_SAMPLING_ON) == 0) {
    s.flags = 0;
    s.inverse_temperature = 1.0f;
  }
  if (kept < MPK_SAMPLE_MOST_LISTED && s.top_k > kept) s.top_k = kept;
  return s;
}

MPK_SAMPLE_FN uint32_t mode_of(const mpk_sampling& s, uint32_t kept) {
  if ((s.flags & MPK_SAMPLING_NOISE) == 0) return kHighest;
  if (s.top_k == 0 && s.top_p >= 1.0f && !(s.log_min_p > -INFINITY)) return kDraw;
  if (s.top_k == 0 || (s.top_p >= 1.0f && s.top_k > kShortList)) return kFrontier;
  return s.top_k <= kept ? kList : kImpossible;
}

}  // namespace sampling
}  // namespace mpk

#endif
