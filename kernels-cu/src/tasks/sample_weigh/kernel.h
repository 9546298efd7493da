// The number and the weight of a part's tokens before each entry of the frontiers of some samples.
#pragma once

#include <algorithm>

#include "tasks/sample_partial/cpu_row.h"
#include "tasks/sample_weigh/params.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

using namespace sampling;

struct Entry {
  uint64_t key;
  float noisy;
};
struct ComesFirst {
  bool operator()(const Entry& a, const Entry& b) const { return a.key > b.key; }
};

// The frontier of all parts' entries, in order, and the sample's highest logit. If there are more than MPK_SAMPLE_FRONTIER
// entries, those with the highest noisy values stay.
uint32_t join_frontiers(const mpk_operand& records, uint32_t sample, Entry* entries, float* highest) {
  uint32_t count = 0;
  *highest = -INFINITY;
  for (uint32_t slice = 0; slice < records.dims[0]; ++slice) {
    for (uint32_t part = 0; part < records.dims[1]; ++part) {
      const uint32_t* record = reinterpret_cast<const uint32_t*>(records.addr) + uint64_t{slice} * records.strides[0] +
                               uint64_t{part} * records.strides[1] + uint64_t{sample} * records.strides[2];
      const float value = float_of(record[MPK_SAMPLE_HIGHEST]);
      *highest = value > *highest ? value : *highest;
      for (uint32_t i = 0; i < record[MPK_SAMPLE_COUNT]; ++i) {
        const uint32_t* entry = record + MPK_SAMPLE_ENTRIES + i * MPK_SAMPLE_ENTRY_WORDS;
        entries[count++] = {key_of(float_of(entry[0]), entry[2]), float_of(entry[1])};
      }
    }
  }
  std::sort(entries, entries + count, ComesFirst());
  uint32_t stay = 0;
  for (uint32_t i = 0; i < count; ++i)
    if (stay == 0 || entries[i].noisy > entries[stay - 1].noisy) entries[stay++] = entries[i];
  if (stay <= MPK_SAMPLE_FRONTIER) return stay;
  std::copy(entries + stay - MPK_SAMPLE_FRONTIER, entries + stay, entries);
  return MPK_SAMPLE_FRONTIER;
}

void weigh(const mpk_kernel_args* args, const Row& row, uint32_t sample) {
  Entry* frontier = reinterpret_cast<Entry*>(args->scratch);
  float highest = 0.0f;
  const uint32_t count = join_frontiers(args->inputs[0], sample, frontier, &highest);
  const Columns columns(args, row, sample, 1);

  // Sums over the tokens between an entry and the one before it.
  uint32_t tokens[MPK_SAMPLE_FRONTIER + 1] = {};
  uint64_t weights[MPK_SAMPLE_FRONTIER + 1] = {};
  uint64_t all = 0;
  // A frontier of one entry is the highest logit, which all filters keep.
  for (uint32_t i = 0; i < columns.count && count > 1; ++i) {
    const float value = columns.value(i, row.sampling);
    const uint32_t w = weight(value, highest);
    if (passes_min_p(value, highest, row.sampling)) all += w;
    const uint64_t key = key_of(value, columns.first_token + i);
    uint32_t before = count; // the first entry that the token comes before
    while (before > 0 && key > frontier[before - 1].key) --before;
    tokens[before] += 1;
    weights[before] += w;
  }
  uint32_t* record = reinterpret_cast<uint32_t*>(args->outputs[0].addr) + uint64_t{sample} * args->outputs[0].strides[2];
  record[MPK_WEIGH_COUNT] = count;
  record[MPK_WEIGH_HIGHEST] = bits_of(highest);
  record[MPK_WEIGH_SUM] = static_cast<uint32_t>(all);
  record[MPK_WEIGH_SUM + 1] = static_cast<uint32_t>(all >> 32);
  uint32_t number = 0;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    number += tokens[i];
    sum += weights[i];
    uint32_t* entry = record + MPK_WEIGH_ENTRIES + i * MPK_WEIGH_ENTRY_WORDS;
    entry[0] = bits_of(value_of_key(frontier[i].key));
    entry[1] = bits_of(frontier[i].noisy);
    entry[2] = token_of_key(frontier[i].key);
    entry[3] = number;
    entry[4] = static_cast<uint32_t>(sum);
    entry[5] = static_cast<uint32_t>(sum >> 32);
  }
}

int sample_weigh(const mpk_kernel_args* args) {
  const uint32_t kept = reinterpret_cast<const mpk_sample_weigh_params*>(args->params)->kept;
  const Samples samples(args);
  for (uint32_t sample = 0; sample < samples.count; ++sample) {
    const Row row = row_of(args, samples.first + sample, kept);
    if (row.mode == kFrontier) weigh(args, row, sample);
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_sample_weigh)(const mpk_kernel_args* args) { return mpk::MPK_ISA::sample_weigh(args); }
