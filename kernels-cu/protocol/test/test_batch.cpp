/* The batch step against a simulator (batch/simulator.h): random requests, arrivals, cancels, page counts and graph
 * sets. MPK_BATCH_SCENARIOS: number of scenarios. */
#include "batch/driver.h"

using namespace batch_test;

int main() {
  const char* wanted = std::getenv("MPK_BATCH_SCENARIOS");
  const uint64_t seeds = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 1500;
  uint64_t iterations = 0, chunked = 0, finishes[4] = {}, preemptions = 0, guesses = 0, wrong = 0, reused = 0;
  uint64_t hits = 0, again = 0, evictions = 0, joined = 0, steady = 0;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Scenario scenario = random_scenario(seed);
    Expected expected = simulate(scenario);
    const Driven alone = drive(scenario, expected, When::kAtEnd);
    reuse_numbers(&scenario, &expected);
    const Driven first = drive(scenario, expected, When::kAtEnd);
    for (const When when : {When::kDecided, When::kAhead, When::kUndecided, When::kLate}) {
      const Driven other = drive(scenario, expected, when);
      CHECK(other.hashes == first.hashes && other.steady == first.steady, "the batch step is not a pure function");
    }
    CHECK(alone.hashes.size() == first.hashes.size(), "the reuse of numbers changes the iterations");
    for (size_t i = 1; i < first.hashes.size(); ++i) CHECK(first.hashes[i] != first.hashes[i - 1], "the hash stands still");
    /* A step of a team starts threads: some scenarios only. */
    if (seed % 50 == 0) {
      CHECK(drive(scenario, expected, When::kDecided, true).hashes == first.hashes, "a team computes other batches");
      CHECK(drive(scenario, expected, seed % 100 == 0 ? When::kAhead : When::kUndecided, true).hashes == first.hashes, "a team that prepares ahead computes other batches");
    }
    steady += first.steady;
    iterations += expected.steps.size();
    for (const auto& step : expected.steps) {
      for (const auto& [_, share] : step.slots) chunked += share.first != 0 && share.first < scenario.prompts[share.request].size();
    }
    for (uint32_t finish : expected.finish) ++finishes[finish];
    preemptions += expected.preemptions;
    guesses += expected.guesses;
    wrong += expected.wrong;
    reused += expected.reused;
    hits += expected.prefix_hits;
    for (uint32_t tokens : expected.cached) again += tokens != 0;
    evictions += expected.evictions;
    joined += expected.joined;
  }
  CHECK(chunked > 100 && finishes[MPK_FINISH_LENGTH] > 100 && finishes[MPK_FINISH_EOS] > 100 && finishes[MPK_FINISH_CANCELLED] > 100, "scenarios are too tame");
  CHECK(preemptions > 100 && guesses > 1000 && wrong > 100 && reused > 1000, "%lu preemptions, %lu guesses, %lu wrong ones, %lu numbers used again", preemptions, guesses, wrong, reused);
  CHECK(again > 500 && evictions > 1000 && joined > 100, "%lu requests found something, %lu pages given up, %lu computed twice at once", again, evictions, joined);
  CHECK(finishes[MPK_RUNNING] == 0, "a request never ended");
  CHECK(steady > iterations / 10, "%lu of %lu iterations are steady", steady, iterations);
  std::printf("batch step: ok, %lu scenarios, %lu iterations (%lu steady), %lu preemptions, %lu guesses; prefix cache: %lu requests found %lu tokens, %lu pages computed twice at once, %lu given up\n",
              seeds, iterations, steady, preemptions, guesses, again, hits, joined, evictions);
}
