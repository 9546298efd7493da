/* Drives the batch step as the workers and the host would, and compares the results with the expected
 * ones. */
#ifndef MPK_TEST_BATCH_DRIVER_H
#define MPK_TEST_BATCH_DRIVER_H

#include "batch/simulator.h"

namespace batch_test {

struct Driven {
  std::vector<uint64_t> hashes;
  uint64_t prefill_ns, decode_ns, prefill_iterations, decode_steps;
  uint64_t steady; /* batch steps that only advanced the slots (steady_step.h) */
};

/* `early`: rank 0 decides after each iteration has been published, as it does while a kernel runs. `team`: several threads run each
 * batch step together, as a warp does on a GPU. */
Driven drive(const Scenario& scenario, const Expected& expected, bool early, bool team = false);

}  // namespace batch_test

#endif
