// One part of some samples' logits: the highest logit, and the tokens that may be drawn.
#pragma once

#include <algorithm>

#include "tasks/sample_partial/cpu_row.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

using namespace sampling;

struct Higher {
  bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};

void list_highest(const Columns& columns, const mpk_sampling& s, uint64_t* keys, uint32_t* list) {
  for (uint32_t i = 0; i < columns.count; ++i) keys[i] = key_of(columns.value(i, s), columns.first_token + i);
  const uint32_t listed = s.top_k < columns.count ? s.top_k : columns.count;
  if (listed < columns.count) std::nth_element(keys, keys + listed, keys + columns.count, Higher());
  for (uint32_t i = 0; i < s.top_k; ++i) {
    list[2 * i] = bits_of(i < listed ? value_of_key(keys[i]) : -INFINITY);
    list[2 * i + 1] = i < listed ? token_of_key(keys[i]) : MPK_SAMPLE_NO_TOKEN;
  }
}

// Finds the entries of the frontier, at most `most`, and returns their number. `highest` is the key of the
// highest logit.
uint32_t list_frontier(const Columns& columns, const float* values, uint64_t highest, float* noisy, const Row& row, uint32_t most,
                       uint32_t* entries) {
  constexpr uint32_t GROUP = 64;
  const uint64_t seed = row.sampling.seed;
  const uint32_t position = row.position, first = columns.first_token;
  // Most logits of a trained model are so low that the token with the highest logit beats them with any
  // noise.
  const float bound = value_of_key(highest) + noise(seed, position, token_of_key(highest));
  for (uint32_t begin = 0; begin < columns.count; begin += GROUP) {
    const uint32_t end = columns.count - begin < GROUP ? columns.count : begin + GROUP;
    float top = -INFINITY;
    for (uint32_t i = begin; i < end; ++i) top = values[i] > top ? values[i] : top;
    if (top + kMostNoise < bound)
      for (uint32_t i = begin; i < end; ++i) noisy[i] = -INFINITY;
    else
      for (uint32_t i = begin; i < end; ++i) noisy[i] = values[i] + noise(seed, position, first + i);
  }
  uint64_t beaten = 0; // the key of the last entry: only tokens before it in order may follow
  uint32_t found = 0;
  while (found < most) {
    uint64_t best_key = 0;
    float best = 0.0f;
    for (uint32_t i = 0; i < columns.count; ++i) {
      if (best_key != 0 && noisy[i] < best) continue;
      const uint64_t key = key_of(values[i], first + i);
      if (key > beaten && (best_key == 0 || noisy[i] > best || key > best_key)) {
        best = noisy[i];
        best_key = key;
      }
    }
    if (best_key == 0) break;
    uint32_t* entry = entries + found * MPK_SAMPLE_ENTRY_WORDS;
    entry[0] = bits_of(value_of_key(best_key));
    entry[1] = bits_of(best);
    entry[2] = token_of_key(best_key);
    beaten = best_key;
    ++found;
  }
  return found;
}

int partial_of(const mpk_kernel_args* args, const Row& row, uint32_t sample) {
  if (row.mode == kImpossible) return MPK_ABORT_KERNEL;
  const mpk_operand &records = args->outputs[0], &lists = args->outputs[1]; // [1, 1, samples, words]
  const Columns columns(args, row, sample, 0);
  uint32_t* record = reinterpret_cast<uint32_t*>(records.addr) + uint64_t{sample} * records.strides[2];
  record[MPK_SAMPLE_HASH] = folded(args->batch->hash);
  if (row.mode == kList) {
    record[MPK_SAMPLE_HIGHEST] = bits_of(-INFINITY);
    record[MPK_SAMPLE_HIGHEST_TOKEN] = MPK_SAMPLE_NO_TOKEN;
    record[MPK_SAMPLE_COUNT] = 0;
    uint32_t* list = reinterpret_cast<uint32_t*>(lists.addr) + uint64_t{sample} * lists.strides[2];
    list_highest(columns, row.sampling, reinterpret_cast<uint64_t*>(args->scratch), list);
    return MPK_OK;
  }
  float* values = reinterpret_cast<float*>(args->scratch);
  uint64_t highest = 0;
  for (uint32_t i = 0; i < columns.count; ++i) {
    values[i] = columns.value(i, row.sampling);
    const uint64_t key = key_of(values[i], columns.first_token + i);
    highest = key > highest ? key : highest;
  }
  record[MPK_SAMPLE_HIGHEST] = bits_of(columns.count == 0 ? -INFINITY : value_of_key(highest));
  record[MPK_SAMPLE_HIGHEST_TOKEN] = columns.count == 0 ? MPK_SAMPLE_NO_TOKEN : token_of_key(highest);
  record[MPK_SAMPLE_COUNT] = 0;
  if (row.mode == kHighest || columns.count == 0) return MPK_OK;
  const uint32_t most = row.mode == kDraw ? 1 : MPK_SAMPLE_FRONTIER;
  record[MPK_SAMPLE_COUNT] = list_frontier(columns, values, highest, values + columns.count, row, most, record + MPK_SAMPLE_ENTRIES);
  return MPK_OK;
}

int sample_partial(const mpk_kernel_args* args) {
  const uint32_t kept = reinterpret_cast<const mpk_sample_partial_params*>(args->params)->kept;
  const Samples samples(args);
  for (uint32_t sample = 0; sample < samples.count; ++sample) {
    const int code = partial_of(args, row_of(args, samples.first + sample, kept), sample);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_sample_partial)(const mpk_kernel_args* args) { return mpk::MPK_ISA::sample_partial(args); }
