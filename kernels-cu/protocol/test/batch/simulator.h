/* What the batch step should do, from a simulator written from the rules alone: plain containers, one request after another. A kept
 * page is represented by the tokens up to its end; there are no keys, tables or lists. */
#ifndef MPK_TEST_BATCH_SIMULATOR_H
#define MPK_TEST_BATCH_SIMULATOR_H

#include <map>

#include "batch/scenario.h"

namespace batch_test {

struct Expected {
  /* For each iteration: rows of each slot as (request, first position, count), graph, and entries in effect. */
  struct Share {
    uint32_t request, first, count, held; /* `held` rows are accepted; the others were wrong drafts */
    bool operator==(const Share& other) const { return request == other.request && first == other.first && count == other.count; }
  };
  struct Step {
    uint32_t graph, entries;
    std::map<uint32_t, Share> slots;
  };
  std::vector<Step> steps;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<uint32_t> finish;
  std::vector<uint32_t> cached; /* by request: prompt tokens that it found cached when it first got a slot */
  uint64_t preemptions = 0, guesses = 0, wrong = 0, reused = 0;
  uint64_t prefix_queries = 0, prefix_hits = 0, evictions = 0, joined = 0; /* joined: computed by two requests at once */
};

Expected simulate(const Scenario& scenario);

/* Gives later requests the numbers of earlier requests that have ended well before they arrive. */
void reuse_numbers(Scenario* scenario, Expected* expected);

}  // namespace batch_test

#endif
