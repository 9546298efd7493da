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

/* When the batch step prepares, and when rank 0 decides. */
enum class When {
  kAtEnd,      /* both when the iteration has ended */
  kDecided,    /* rank 0 decides after it has published the iteration, as it does while a kernel runs; the step prepares at the end */
  kAhead,      /* the step prepares while the tasks run; rank 0 has decided before */
  kUndecided,  /* likewise, but rank 0 decides at the end */
  kLate,       /* likewise, but the decision comes while the tasks run, and is found */
};

/* `team`: several threads run each batch step together, as a warp does on a GPU. */
Driven drive(const Scenario& scenario, const Expected& expected, When when, bool team = false);

}  // namespace batch_test

#endif
