// The token of one sample, from what all ranks have found.
#include <algorithm>

#include "tasks/sample_partial/cpu_row.h"
#include "tasks/sample_reduce/params.h"
#include "tasks/sample_weigh/params.h"

namespace {

using namespace mpk::sampling;

struct Higher {
  bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};

// Calls f(record) for each part of each rank.
template <typename F> void each_record(const mpk_operand& records, F f) {
  for (uint32_t slice = 0; slice < records.dims[0]; ++slice)
    for (uint32_t part = 0; part < records.dims[1]; ++part)
      f(reinterpret_cast<const uint32_t*>(records.addr) + uint64_t{slice} * records.strides[0] + uint64_t{part} * records.strides[1]);
}

uint32_t highest_token(const mpk_operand& records) {
  uint64_t best = 0;
  each_record(records, [&](const uint32_t* record) {
    if (record[MPK_SAMPLE_HIGHEST_TOKEN] == MPK_SAMPLE_NO_TOKEN) return;
    best = std::max(best, key_of(float_of(record[MPK_SAMPLE_HIGHEST]), record[MPK_SAMPLE_HIGHEST_TOKEN]));
  });
  return token_of_key(best);
}

uint32_t highest_noisy(const mpk_operand& records) {
  uint64_t best = 0;
  float noisy = 0.0f;
  each_record(records, [&](const uint32_t* record) {
    if (record[MPK_SAMPLE_COUNT] == 0) return;
    const uint32_t* entry = record + MPK_SAMPLE_ENTRIES;
    const uint64_t key = key_of(float_of(entry[0]), entry[2]);
    const float value = float_of(entry[1]);
    if (best != 0 && (value < noisy || (value == noisy && key < best))) return;
    best = key;
    noisy = value;
  });
  return token_of_key(best);
}

uint32_t from_list(const mpk_operand& lists, const Row& row, uint64_t* keys) {
  const mpk_sampling& s = row.sampling;
  uint32_t count = 0;
  each_record(lists, [&](const uint32_t* list) {
    for (uint32_t i = 0; i < s.top_k && list[2 * i + 1] != MPK_SAMPLE_NO_TOKEN; ++i)
      keys[count++] = key_of(float_of(list[2 * i]), list[2 * i + 1]);
  });
  const uint32_t listed = std::min(count, s.top_k);
  std::nth_element(keys, keys + listed, keys + count, Higher());
  count = listed;
  std::sort(keys, keys + count, Higher());
  if (count == 0) return MPK_SAMPLE_NO_TOKEN;
  const float highest = value_of_key(keys[0]);
  uint64_t all = 0;
  for (uint32_t i = 0; i < count; ++i)
    if (passes_min_p(value_of_key(keys[i]), highest, s)) all += weight(value_of_key(keys[i]), highest);
  uint64_t before = 0;
  uint32_t best = token_of_key(keys[0]);
  float noisy = 0.0f;
  for (uint32_t i = 0; i < count; ++i) {
    const float value = value_of_key(keys[i]);
    const uint32_t token = token_of_key(keys[i]);
    if (!passes_min_p(value, highest, s) || (i > 0 && !passes_top_p(before, all, s))) break;
    const float candidate = value + noise(s.seed, row.position, token);
    if (i == 0 || candidate > noisy) {
      noisy = candidate;
      best = token;
    }
    before += weight(value, highest);
  }
  return best;
}

uint32_t from_frontier(const mpk_operand& records, const mpk_operand& weighed, const mpk_sampling& s) {
  const uint32_t* first = reinterpret_cast<const uint32_t*>(weighed.addr); // the entries are the same in every record
  const float highest = float_of(first[MPK_WEIGH_HIGHEST]);
  uint64_t all = 0;
  each_record(weighed, [&](const uint32_t* record) { all += uint64_t{record[MPK_WEIGH_SUM + 1]} << 32 | record[MPK_WEIGH_SUM]; });
  // The last entry has the highest noisy value, so it is drawn unless a filter drops it.
  for (uint32_t i = first[MPK_WEIGH_COUNT]; i-- > 0;) {
    const uint32_t at = MPK_WEIGH_ENTRIES + i * MPK_WEIGH_ENTRY_WORDS;
    uint64_t tokens = 0, before = 0;
    each_record(weighed, [&](const uint32_t* record) {
      tokens += record[at + 3];
      before += uint64_t{record[at + 5]} << 32 | record[at + 4];
    });
    const bool in_top_k = s.top_k == 0 || tokens < s.top_k;
    if (in_top_k && passes_min_p(float_of(first[at]), highest, s) && passes_top_p(before, all, s)) return first[at + 2];
  }
  return highest_token(records); // which every filter keeps
}

} // namespace

extern "C" int mpk_task_sample_reduce(const mpk_kernel_args* args) {
  const uint32_t kept = reinterpret_cast<const mpk_sample_reduce_params*>(args->params)->kept;
  const uint32_t sample = static_cast<uint32_t>(args->task->args[3]);
  if (sample >= args->batch->num_samples) return MPK_OK;
  const uint32_t hash = folded(args->batch->hash);
  bool agree = true;
  each_record(args->inputs[0], [&](const uint32_t* record) { agree = agree && record[MPK_SAMPLE_HASH] == hash; });
  if (!agree) return MPK_ABORT_DIVERGED;
  const Row row = row_of(args, sample, kept);
  uint32_t token = MPK_SAMPLE_NO_TOKEN;
  switch (row.mode) {
    case kHighest: token = highest_token(args->inputs[0]); break;
    case kDraw: token = highest_noisy(args->inputs[0]); break;
    case kList: token = from_list(args->inputs[2], row, reinterpret_cast<uint64_t*>(args->scratch)); break;
    case kFrontier: token = from_frontier(args->inputs[0], args->inputs[1], row.sampling); break;
    default: return MPK_ABORT_KERNEL;
  }
  if (token == MPK_SAMPLE_NO_TOKEN) return MPK_ABORT_KERNEL;
  *reinterpret_cast<uint32_t*>(args->outputs[0].addr) = token;
  return MPK_OK;
}
