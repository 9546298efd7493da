/* Inputs for the batch step: requests that come and go, pages, graphs. */
#ifndef MPK_TEST_BATCH_SCENARIO_H
#define MPK_TEST_BATCH_SCENARIO_H

#include <vector>

#include "check.h"
#include "mpk/abi.h"

namespace batch_test {

constexpr uint32_t kVocabulary = 50;

struct GraphShape {
  uint32_t rows, active, samples;
};

struct Arrival {
  uint32_t step, kind, request; /* known to rank 0 before batch step `step`, from 0 */
};

struct Scenario {
  uint32_t max_batch, max_seq_len, page_size, num_pages, top_k;
  uint32_t prefill_rows, on_demand, max_drafts;
  bool prefix_cache, crowded; /* crowded: all keys in one or two buckets */
  std::vector<GraphShape> graphs;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<uint32_t> max_new;
  std::vector<uint32_t> min_new; /* an end of sequence counts only after this many new tokens */
  std::vector<bool> penalties;
  std::vector<uint32_t> logprobs; /* that a request wants, some more than top_k */
  std::vector<uint32_t> number; /* entry of the request table that the request has; reused after its end */
  std::vector<Arrival> log;
  std::vector<int32_t> eos;
  uint64_t seed;
};

Scenario random_scenario(uint64_t seed);

/* The token that a request samples at a position; depends only on its own
 * history. */
inline int32_t sampled(uint32_t request, uint32_t position, int32_t token) {
  return static_cast<int32_t>((request * 7919u + position * 104729u + static_cast<uint32_t>(token) * 31u + 17u) % 1009u % kVocabulary);
}

/* The drafts that follow `token` at `position`: right for a while. */
inline std::vector<int32_t> guessed(const Scenario& scenario, uint32_t request, uint32_t position, int32_t token) {
  std::vector<int32_t> drafts;
  Random random(scenario.seed * 1000003 + request * 1009 + position);
  const uint32_t count = random.between(0, scenario.max_drafts + 1), right = random.between(0, 4);
  for (uint32_t i = 0; i < count; ++i) {
    token = sampled(request, position + i, token);
    if (i >= right) token = (token + 1) % static_cast<int32_t>(kVocabulary);
    drafts.push_back(token);
  }
  return drafts;
}

}  // namespace batch_test

#endif
