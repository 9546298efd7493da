// For one column tile of the logits: each sample's highest values with their tokens, and its sum of exp.
#pragma once

#include "cpu/simd.h"
#include "cpu/task.h"
#include "tasks/argmax_partial/cpu_wanted.h"
#include "tasks/argmax_partial/params.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

constexpr uint32_t CHUNK = 1024; // columns summed in f32; the sum of these sums is in f64

MPK_INLINE float word_to_f32(uint32_t word) {
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}
MPK_INLINE uint32_t f32_to_word(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof(word));
  return word;
}

// Pairs (value, token), best first, of which there is room for `room` and `kept` are kept. Tokens come in ascending order, so a new
// pair goes after those of equal value.
class Candidates {
 public:
  Candidates(uint32_t* pairs, uint32_t room, uint32_t kept) : pairs_(pairs), kept_(kept) {
    for (uint32_t i = 0; i < room; ++i) {
      pairs_[2 * i] = f32_to_word(-INFINITY);
      pairs_[2 * i + 1] = MPK_ARGMAX_NO_TOKEN;
    }
  }
  // Whether one more value `v` (not NaN) would be kept.
  bool takes(float v) const { return held_ < kept_ || v > word_to_f32(pairs_[2 * (kept_ - 1)]); }
  void insert(float v, uint32_t token) {
    uint32_t at = held_ < kept_ ? held_++ : kept_ - 1;
    for (; at > 0 && word_to_f32(pairs_[2 * (at - 1)]) < v; --at) {
      pairs_[2 * at] = pairs_[2 * at - 2];
      pairs_[2 * at + 1] = pairs_[2 * at - 1];
    }
    pairs_[2 * at] = f32_to_word(v);
    pairs_[2 * at + 1] = token;
  }

 private:
  uint32_t* pairs_;
  uint32_t kept_, held_ = 0;
};

// The value to compare: NaN counts as the lowest.
MPK_INLINE float ordered(float v) { return v == v ? v : -INFINITY; }

void partial_of(const float* x, uint32_t n, uint32_t first_token, uint32_t room, uint32_t kept, uint32_t* record) {
  Candidates candidates(record + MPK_ARGMAX_PAIRS, room, kept);
  float highest = -INFINITY;
  double total = 0.0;
  for (uint32_t begin = 0; begin < n; begin += CHUNK) {
    const uint32_t end = n - begin < CHUNK ? n : begin + CHUNK;
    const uint32_t whole = begin + (end - begin) / 16 * 16;
    float tail[16];
    for (uint32_t i = 0; i < 16; ++i) tail[i] = whole + i < end ? x[whole + i] : -INFINITY;
    F32x16 high = splat(-INFINITY);
    for (uint32_t i = begin; i < whole; i += 16) high = max(load(x + i), high); // the second where one is NaN
    high = max(load(tail), high);
    const float chunk_highest = max_lanes(high);

    if (candidates.takes(chunk_highest)) {
      for (uint32_t i = begin; i < end; i += 16) {
        const uint32_t stop = end - i < 16 ? end : i + 16;
        const float group = max_lanes(max(i < whole ? load(x + i) : load(tail), splat(-INFINITY)));
        if (!candidates.takes(group)) continue;
        for (uint32_t j = i; j < stop; ++j)
          if (candidates.takes(ordered(x[j]))) candidates.insert(ordered(x[j]), first_token + j);
      }
    }

    if (chunk_highest > highest) {
      if (highest > -INFINITY) {
        float lanes[16];
        store(lanes, exp(sub(splat(highest), splat(chunk_highest))));
        total *= static_cast<double>(lanes[0]);
      }
      highest = chunk_highest;
    }
    if (highest == -INFINITY) continue; // nothing to sum yet
    if (highest == INFINITY) {          // exp(x - highest) is 1 there and 0 elsewhere
      if (chunk_highest == INFINITY)
        for (uint32_t i = begin; i < end; ++i) total += x[i] == INFINITY ? 1.0 : 0.0;
      continue;
    }
    // Four sums, so that the additions do not wait for each other. NaN counts as -infinity.
    F32x16 sums[4] = {zero(), zero(), zero(), zero()};
    const F32x16 low = splat(-INFINITY), shift = splat(highest);
    uint32_t i = begin;
    for (; i + 64 <= whole; i += 64)
      for (uint32_t k = 0; k < 4; ++k) sums[k] = add(sums[k], exp(sub(max(load(x + i + 16 * k), low), shift)));
    for (; i < whole; i += 16) sums[0] = add(sums[0], exp(sub(max(load(x + i), low), shift)));
    if (whole < end) sums[1] = add(sums[1], exp(sub(max(load(tail), low), shift)));
    total += static_cast<double>(sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3]))));
  }
  record[MPK_ARGMAX_MAXIMUM] = f32_to_word(highest);
  record[MPK_ARGMAX_SUM] = f32_to_word(static_cast<float>(total));
}

int argmax_partial(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_argmax_partial_params*>(args->params);
  const mpk_operand& out = args->outputs[0]; // [1, 1, samples, words]
  const uint32_t first_token = static_cast<uint32_t>(args->task->args[1]);
  const uint32_t columns = static_cast<uint32_t>(args->task->args[2]);
  if (out.dims[3] != MPK_ARGMAX_PAIRS + 2 * params.kept) return MPK_ABORT_KERNEL;
  const uint32_t samples = rows_in_use(args, ROWS_SAMPLES, out.dims[2]);
  for (uint32_t s = 0; s < samples; ++s) {
    uint32_t* record = reinterpret_cast<uint32_t*>(out.addr) + uint64_t{s} * out.strides[2];
    record[MPK_ARGMAX_HASH_LOW] = static_cast<uint32_t>(args->batch->hash);
    record[MPK_ARGMAX_HASH_HIGH] = static_cast<uint32_t>(args->batch->hash >> 32);
    const uint32_t wanted = wanted_candidates(args, s, params.kept, params.sampled != 0);
    const uint32_t scanned = wanted == 0 ? 0 : columns;
    const float* logits = scanned == 0 ? nullptr : reinterpret_cast<const float*>(row_address(args->inputs[0], s));
    partial_of(logits, scanned, first_token, params.kept, wanted, record);
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_argmax_partial)(const mpk_kernel_args* args) {
  return mpk::MPK_ISA::argmax_partial(args);
}
