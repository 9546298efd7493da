/* The batch step, driven as the workers and the host would, and compared with what is expected of it. */
#ifndef MPK_TEST_BATCH_DRIVER_H
#define MPK_TEST_BATCH_DRIVER_H

#include "batch/simulator.h"

namespace batch_test {

struct Driven {
  std::vector<uint64_t> hashes;
  uint64_t prefill_ns, decode_ns, prefill_iterations, decode_steps;
};

/* `early`: rank 0 decides after each iteration has been published, as while a kernel runs. */
Driven drive(const Scenario& scenario, const Expected& expected, bool early);

}  // namespace batch_test

#endif
