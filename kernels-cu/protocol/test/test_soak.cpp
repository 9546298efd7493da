/* Many iterations of the hand-built job with random stalls and the shortest queues, on 2, 4 and 8 ranks: every sum and every
 * token is checked. MPK_SOAK_ITERATIONS: iterations of each job (default: some thousands in all). MPK_SOAK_RANKS: only the
 * jobs with this many ranks. MPK_SOAK_PLACEMENT: only placement 0 (static), 1 (dynamic), 2 or 3 (both, in one run).
 * MPK_SOAK_SEED: each number gives other stalls, so a long soak can consist of several runs that each report.
 * MPK_SOAK_DEADLINE: seconds that a wait may last; at low priority on a busy machine it needs more than 60. */
#include <chrono>
#include <cstdlib>

#include "graph_fixture.h"

using fixture::Job;
using fixture::Lowering;
using fixture::Options;

namespace {

/* The number in an environment variable, or `otherwise`. */
uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

/* A job of about `iterations` iterations. */
void soak(uint32_t world, bool dynamic, bool mixed, uint64_t iterations) {
  Options options;
  options.world = world;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.stalls = options.shortest = true;
  options.seed = world * 4 + 2 * mixed + dynamic + 32 * number("MPK_SOAK_SEED", 0);
  /* Every graph keeps ranks within one iteration of each other; the proof of the rings' length needs that. */
  options.graphs = {Lowering::kFlagged, Lowering::kCopyExchange, Lowering::kCopyExchange};
  options.deadline_ns = number("MPK_SOAK_DEADLINE", 60) * 1000000000ull;
  options.num_requests = static_cast<uint32_t>(iterations / 7 + 1);
  const auto start = std::chrono::steady_clock::now();
  Job job(options);
  job.run();
  job.check_results();
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(job.iterations(0) * 2 > iterations, "%lu iterations only", job.iterations(0));
  std::printf("soak, %u ranks, %s: ok, %lu iterations, %.1f s\n", world, options.placement(), job.iterations(0), took);
  std::fflush(stdout);
}

}  // namespace

int main() {
  const uint64_t ranks = number("MPK_SOAK_RANKS", 0), only = number("MPK_SOAK_PLACEMENT", 4);
  for (const uint32_t world : {2u, 4u, 8u})
    for (const uint32_t placement : {0u, 1u, 2u, 3u})
      if ((ranks == 0 || ranks == world) && (only == 4 || only == placement))
        soak(world, placement % 2 != 0, placement / 2 != 0, number("MPK_SOAK_ITERATIONS", 1200 / world));
}
