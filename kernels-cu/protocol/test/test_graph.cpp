/* The whole protocol on a hand-built job of several ranks: results, all kinds of ends, and the time they take. */
#include <chrono>
#include <cstring>

#include "event.h"
#include "graph_fixture.h"

using fixture::Job;
using fixture::Lowering;
using fixture::Options;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void generates(const char* name, const Options& options, uint64_t at_least) {
  const auto start = std::chrono::steady_clock::now();
  Job job(options);
  job.run();
  job.check_results();
  for (uint32_t r = 0; r < options.world; ++r) {
    CHECK(job.iterations(r) >= at_least, "%s: %lu iterations only", name, job.iterations(r));
    CHECK(job.iterations(r) == job.iterations(0), "%s: ranks differ in iterations", name);
    CHECK(!options.help || job.ranks[r]->helped != 0, "%s: the workers of rank %u carried nothing", name, r);
    for (const mpk_graph& graph : job.ranks[r]->abi_graphs) CHECK(*mpk::event_counter(&graph, MPK_EVENT_BEGIN) > 0, "%s: a graph never ran", name);
  }
  std::printf("%s: ok, %lu iterations, %.2f s\n", name, job.iterations(0), seconds_since(start));
}

/* A trigger that never comes: every rank ends with MPK_ABORT_DEADLINE, and the report names the event. */
void missing_trigger(bool dynamic, bool teams = false, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.teams = teams;
  options.deadline_ns = 1000000000;
  options.drop_trigger_rank = 1;
  options.num_requests = 20;
  Job job(options);
  const auto start = std::chrono::steady_clock::now();
  job.run();
  const double took = seconds_since(start);
  CHECK(took > 0.9 && took < 10.0, "took %.2f s", took);
  bool named = false, timed_out = false; /* the rank whose deadline comes first ends both */
  for (uint32_t r = 0; r < 2; ++r) {
    CHECK(job.abort_code(r) == MPK_ABORT_DEADLINE, "rank %u: code %u", r, job.abort_code(r));
    bool waits = false;
    for (const mpk_status& status : job.ranks[r]->status) {
      if (status.state != MPK_WORKER_WAITS_EVENT) continue;
      waits = true;
      CHECK(status.seen < status.wanted, "rank %u: a wait that was over: event %lx, wanted %lu, seen %lu", r, status.event, status.wanted, status.seen);
      named = named || (r == 0 && status.event >> 48 == MPK_EVENT_TAG_NVSHMEM && status.graph == 2);
      timed_out = timed_out || status.timed_out;
    }
    CHECK(waits, "rank %u: nobody says what it waits for", r);
  }
  CHECK(named && timed_out, "the missing event is not named");
  std::printf("missing trigger, %s%s: ok, %.2f s\n", options.placement(), teams ? ", teams" : "", took);
}

/* An abort from outside at one rank stops all ranks within milliseconds. */
void abort_from_one_rank(bool dynamic, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.num_requests = 100000;
  options.new_tokens = 40;
  Job job(options);
  job.start();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto start = std::chrono::steady_clock::now();
  mpk_cpu_abort(&job.ranks[0]->rank, MPK_ABORT_INTERRUPT);
  job.join();
  const double took = seconds_since(start);
  CHECK(took < 5, "took %.3f s", took); /* the deadline is 10 s; it takes milliseconds if a core is free */
  for (uint32_t r = 0; r < 2; ++r) {
    CHECK(job.abort_code(r) == MPK_ABORT_INTERRUPT && job.ranks[r]->rank.control->abort_rank == 0, "rank %u: code %u", r, job.abort_code(r));
    CHECK(job.ranks[r]->rank.control->running == 0, "rank %u: workers still inside", r);
  }
  std::printf("abort, %s: ok, %.1f ms\n", options.placement(), took * 1e3);
}

void kernel_failure(bool dynamic, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.failing_rank = 1;
  Job job(options);
  job.run();
  for (uint32_t r = 0; r < 2; ++r) {
    CHECK(job.abort_code(r) == MPK_ABORT_KERNEL && job.ranks[r]->rank.control->abort_rank == 1, "rank %u: code %u", r, job.abort_code(r));
  }
  std::printf("failing kernel, %s: ok\n", options.placement());
}

/* A stall shorter than the deadline is harmless. A longer one ends the run, and with it the stall. */
void stall() {
  Options options;
  options.num_requests = 5;
  {
    Job job(options);
    job.ranks[1]->rank.stall_ns = 20000000;
    job.ranks[1]->rank.stall_op = fixture::kReduceFlagged;
    job.run();
    job.check_results();
  }
  options.deadline_ns = 200000000;
  Job job(options);
  job.ranks[1]->rank.stall_ns = 60000000000ull;
  job.ranks[1]->rank.stall_op = fixture::kFinal;
  const auto start = std::chrono::steady_clock::now();
  job.run();
  CHECK(seconds_since(start) < 10.0, "took %.2f s", seconds_since(start));
  for (uint32_t r = 0; r < 2; ++r) CHECK(job.abort_code(r) == MPK_ABORT_DEADLINE, "rank %u: code %u", r, job.abort_code(r));
  std::puts("stall: ok");
}

/* A user's own graph: a fixed number of iterations on the batch that the host has set up. */
void fixed_iterations(bool dynamic) {
  Options options;
  options.dynamic = dynamic;
  options.num_requests = 0;
  Job job(options);
  for (auto& rank : job.ranks) {
    rank->config.generate = 0;
    rank->config.fixed_iterations = 50;
    rank->batch.num_rows = rank->batch.num_active = rank->batch.num_samples = 1;
    rank->batch.row_token[0] = 5;
  }
  job.run();
  for (uint32_t r = 0; r < 2; ++r) {
    CHECK(job.abort_code(r) == MPK_OK && job.iterations(r) == 50, "rank %u: code %u, %lu iterations", r, job.abort_code(r), job.iterations(r));
  }
  std::printf("fixed iterations, %s: ok\n", dynamic ? "dynamic" : "static");
}

/* Near the last iteration and the last epochs, everything works as usual. Then the run ends with MPK_ABORT_ITERATIONS. A rank
 * that starts late gets its peer's ring entries before it has published an iteration. */
void last_iterations(bool dynamic, bool mixed = false) {
  constexpr uint32_t kLeft = 40;
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.begun = MPK_LAST_ITERATION - kLeft;
  options.late_rank = 1;
  Job job(options);
  job.run();
  for (uint32_t r = 0; r < 2; ++r)
    CHECK(job.abort_code(r) == MPK_ABORT_ITERATIONS && job.iterations(r) >= kLeft - 1 && job.iterations(r) <= kLeft + 1, "rank %u: code %u after %lu iterations", r, job.abort_code(r), job.iterations(r));
  std::printf("last iterations, %s: ok\n", options.placement());
}

/* No request at all: the run ends at once. */
void nothing_to_do(bool dynamic, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.num_requests = 0;
  Job job(options);
  job.run();
  job.check_results();
  CHECK(job.iterations(0) == 0, "%lu iterations", job.iterations(0));
}

/* One rank is late at the end of its iterations, so its peer's triggers and ring entries of the next
 * iteration arrive early. */
void lagging_rank(bool dynamic, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.num_requests = 12;
  options.graphs = {Lowering::kCopy, Lowering::kCopy, Lowering::kCopy};
  for (const uint32_t op : {static_cast<uint32_t>(fixture::kFinal), static_cast<uint32_t>(MPK_TASK_TYPE_REDUCE)}) {
    Job job(options);
    job.ranks[1]->rank.stall_ns = 1000000;
    job.ranks[1]->rank.stall_op = op;
    job.run();
    job.check_results();
  }
  std::printf("lagging rank, %s: ok\n", options.placement());
}

/* Ranks on several nodes: data for ranks out of reach goes through proxies, whose rings are so short that they are
 * often full. `help`: workers that wait take the proxies' turns. */
void nodes(bool dynamic, uint32_t world, uint32_t ranks_of_node, bool mixed = false, bool help = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.world = world;
  options.ranks_of_node = ranks_of_node;
  options.num_requests = 40;
  options.help = help;
  char name[80];
  std::snprintf(name, sizeof(name), "nodes of %u ranks, %u in all, %s%s", ranks_of_node, world, options.placement(), help ? ", workers help" : "");
  generates(name, options, 100);
}

/* An abort reaches the ranks of other nodes, with its origin. */
void abort_over_nodes(bool dynamic, bool mixed = false) {
  Options options;
  options.dynamic = dynamic;
  options.mixed = mixed;
  options.world = 3;
  options.ranks_of_node = 1;
  options.failing_rank = 1;
  Job job(options);
  job.run();
  for (uint32_t r = 0; r < 3; ++r) {
    CHECK(job.abort_code(r) == MPK_ABORT_KERNEL && job.ranks[r]->rank.control->abort_rank == 1, "rank %u: code %u", r, job.abort_code(r));
  }
  std::printf("abort over nodes, %s: ok\n", options.placement());
}

/* A proxy that carries nothing ends all ranks: a rank that waits for the proxy's rank ends by its deadline, and the proxy's own
 * rank ends when the ring is full, or earlier. */
void deaf_proxy(bool dynamic) {
  Options options;
  options.dynamic = dynamic;
  options.ranks_of_node = 1;
  options.deaf_rank = 0;
  options.deadline_ns = 300000000;
  Job job(options);
  const auto start = std::chrono::steady_clock::now();
  job.run();
  CHECK(seconds_since(start) < 3.0, "took %.2f s", seconds_since(start));
  for (uint32_t r = 0; r < 2; ++r) CHECK(job.abort_code(r) == MPK_ABORT_DEADLINE || job.abort_code(r) == MPK_ABORT_PEER, "rank %u: code %u", r, job.abort_code(r));
  std::printf("deaf proxy, %s: ok\n", dynamic ? "dynamic" : "static");
}

/* Rows of `capacity` records: the newest ones of each worker and of the batch step, in order. */
void trace(uint32_t capacity, bool dynamic, bool mixed = false) {
  Options options;
  options.mixed = mixed;
  options.trace_capacity = capacity;
  options.dynamic = dynamic;
  options.num_requests = 10;
  Job job(options);
  job.run();
  job.check_results();
  const auto& rank = *job.ranks[0];
  bool cut = false, grew = false;
  uint32_t context = 0, rows = 1;
  for (uint32_t row = 0; row <= options.workers; ++row) {
    const uint64_t count = rank.trace_count[row];
    CHECK(count > 0, "row %u has no record", row);
    cut |= count > capacity;
    uint64_t before_ns = 0;
    uint32_t iteration = 0;
    for (uint64_t i = count > capacity ? count - capacity : 0; i < count; ++i) {
      const mpk_trace_record& record = rank.trace[row * capacity + i % capacity];
      CHECK(record.fetched_ns <= record.ready_ns && record.ready_ns <= record.done_ns && record.ready_ns >= before_ns, "record %lu of row %u", i, row);
      CHECK(record.iteration >= iteration && record.iteration > 0 && record.worker == row, "record %lu of row %u", i, row);
      const mpk_graph& graph = rank.abi_graphs[record.graph];
      if (row == options.workers) {
        CHECK(record.task == MPK_TASK_BEGIN && record.iteration > iteration, "batch step %lu", i);
        CHECK(record.waited_for > 0 && record.waited_for <= record.peer_ns && record.peer_ns <= graph.rows, "batch step %lu: %u active, %u rows", i, record.waited_for, record.peer_ns);
        /* If the same requests continue, each row of an iteration adds a token to the next iteration's caches. */
        grew |= record.page_ns == context + rows;
        context = record.page_ns, rows = record.peer_ns;
      } else {
        CHECK(record.ready_ns + record.peer_ns <= record.done_ns, "record %lu of row %u", i, row);
        CHECK(record.task >= 2 && record.task < graph.num_tasks, "record %lu of row %u", i, row);
        const uint32_t waits = graph.tasks[record.task].num_dependencies;
        CHECK(record.waited_for < waits || (options.is_dynamic(record.graph) ? record.waited_for >= MPK_TRACE_HELD : record.waited_for == MPK_TRACE_NO_WAIT), "record %lu waited for %u", i,
              record.waited_for);
      }
      before_ns = record.ready_ns;
      iteration = record.iteration;
    }
  }
  CHECK(grew, "no batch step has the context of the one before it and its rows");
  CHECK(cut == (capacity < 4096), "rows of %u records are %s", capacity, cut ? "cut" : "whole");
  std::printf("timeline of %u records, %s: ok\n", capacity, options.placement());
}

/* Static and dynamic graphs in one run: the same tokens as with either alone (check_results), and the same ends. */
void mixed() {
  for (const uint32_t world : {1u, 2u, 4u}) {
    for (const bool dynamic : {false, true}) {
      Options options;
      options.world = world;
      options.dynamic = dynamic;
      options.mixed = true;
      options.num_requests = 60;
      options.workers = 1 + world % 3;
      options.local_schedulers = 1 + world % 2;
      if (world == 1) options.graphs = {Lowering::kFlagged, Lowering::kFlagged, Lowering::kFlagged};
      options.teams = world == 2 && dynamic;
      options.stalls = world > 1;
      char name[64];
      std::snprintf(name, sizeof(name), "%s, %u ranks", options.placement(), world);
      generates(name, options, 100);
    }
  }
  for (const bool dynamic : {false, true}) {
    missing_trigger(dynamic, false, true);
    abort_from_one_rank(dynamic, true);
    kernel_failure(dynamic, true);
    lagging_rank(dynamic, true);
    last_iterations(dynamic, true);
    nothing_to_do(dynamic, true);
    nodes(dynamic, 4, 2, true, true);
    abort_over_nodes(dynamic, true);
    trace(4096, dynamic, true);
  }
}

}  // namespace

int main() {
  Options options;
  options.num_requests = 260;
  generates("static", options, 1000);
  options.dynamic = true;
  generates("dynamic", options, 1000);
  options.local_schedulers = 2;
  options.workers = 3;
  options.num_requests = 40;
  generates("dynamic, 2 local schedulers", options, 100);
  options.world = 3;
  generates("dynamic, 2 local schedulers, 3 ranks", options, 100); /* which split the tasks of a launch */
  options.teams = true;
  options.world = 2;
  generates("dynamic, 2 local schedulers, teams", options, 100);
  options.teams = false;
  options.local_schedulers = 1;
  options.workers = 1;
  options.world = 3;
  generates("dynamic, 3 ranks", options, 100);
  options.dynamic = false;
  options.graphs = {Lowering::kCopy, Lowering::kFlagged, Lowering::kFlagged};
  generates("static, 3 ranks", options, 100);
  for (bool dynamic : {false, true}) {
    missing_trigger(dynamic);
    abort_from_one_rank(dynamic);
    kernel_failure(dynamic);
    lagging_rank(dynamic);
    fixed_iterations(dynamic);
    nothing_to_do(dynamic);
    last_iterations(dynamic);
    nodes(dynamic, 2, 1);
    nodes(dynamic, 4, 2);
    nodes(dynamic, 2, 1, false, true);
    abort_over_nodes(dynamic);
    deaf_proxy(dynamic);
  }
  mixed();
  missing_trigger(true, true);
  stall();
  for (bool dynamic : {false, true}) {
    trace(4096, dynamic);
    trace(8, dynamic);
  }
  std::puts("graph: ok");
}
