/* The loop of a team that runs nothing but batch steps (batch_loop.h), as in static placement on a GPU: each step is prepared while
 * worker threads run the iteration's tasks. Two ranks, more slots than the team has members, requests that come to their end. Every
 * token is checked. Under ThreadSanitizer, a preparation that writes what the tasks read, or reads what they write, is a race. */
#include <algorithm>
#include <thread>
#include <vector>

#include "batch_loop.h"
#include "check.h"
#include "slot_arrays.h"
#include "thread_team.h"

namespace {

constexpr uint32_t kWorld = 2, kWorkers = 2, kSlots = 5, kRequests = 12, kMostPrompt = 6, kMostTokens = 300, kPage = 64;
constexpr uint32_t kMet = 3; /* the event that both ranks trigger at both */
constexpr int32_t kVocabulary = 997, kEos[] = {3, 990, 991, 992, 11, 17};

int32_t token_after(int32_t token, int32_t position) { return static_cast<int32_t>((static_cast<uint32_t>(token) * 7919u + static_cast<uint32_t>(position) * 31u + 17u) % kVocabulary); }

/* A rank with two graphs: one row for each slot, and twice as many. */
struct OneRank {
  struct Heap {
    mpk_control control{};
    uint64_t counters[2][4 * MPK_COUNTER_STRIDE] = {};
  } heap;
  std::vector<mpk_request> requests{kRequests};
  std::vector<mpk_admission> admissions{16};
  uint32_t num_admissions = 0;
  std::vector<int32_t> prompts = std::vector<int32_t>(kRequests * (kMostPrompt + kMostTokens)), tokens = prompts;
  std::vector<int32_t> per_row[3];
  SlotArrays per_slot;
  std::vector<mpk_request_output> outputs{kRequests};
  std::vector<mpk_status> statuses{kWorkers + 1};
  mpk_event events[4] = {{1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0}, {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0}, {kWorkers, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0}, {kWorld, 0, 0, MPK_EVENT_EMPTY, 1}};
  uint32_t worker_first[kWorkers + 1] = {0, 1, 2};
  mpk_graph graphs[2] = {};
  mpk_batch_config config{};
  mpk_batch batch{};
  mpk_batch_output output{};
  std::vector<uint64_t> batch_private;
  mpk_rank rank{};

  void build(uint32_t number, uint8_t** sym) {
    for (uint32_t g = 0; g < 2; ++g) {
      graphs[g].num_events = 4;
      graphs[g].num_workers = kWorkers;
      graphs[g].rows = kSlots * (g + 1);
      graphs[g].active = graphs[g].samples = kSlots;
      graphs[g].events = events;
      graphs[g].worker_first = worker_first;
      graphs[g].counters = heap.counters[g];
    }
    config.max_batch = config.max_samples = kSlots;
    config.max_rows = 2 * kSlots;
    config.num_requests = kRequests;
    config.admission_ring = static_cast<uint32_t>(admissions.size());
    config.page_size = kPage;
    config.max_seq_len = kMostPrompt + kMostTokens;
    config.pages_per_slot = (config.max_seq_len + kPage - 1) / kPage;
    config.num_pages = config.pages_per_slot * 4; /* less than all slots can need */
    config.on_demand = 1;
    config.generate = 1;
    config.num_eos = std::size(kEos);
    config.eos = kEos;
    config.tokens = prompts.data();
    config.requests = requests.data();
    config.admissions = admissions.data();
    config.num_admissions = &num_admissions;
    for (auto& array : per_row) array.assign(config.max_rows, 0);
    per_slot.make(&batch, kSlots, config.pages_per_slot);
    batch.row_token = per_row[0].data();
    batch.row_active = per_row[1].data();
    batch.row_position = per_row[2].data();
    output.requests = outputs.data();
    output.tokens = tokens.data();
    batch_private.assign(mpk_batch_private_bytes(&config) / 8 + 1, 0);
    rank.abi_version = MPK_ABI_VERSION;
    rank.rank = number;
    rank.world = kWorld;
    rank.num_workers = kWorkers;
    rank.num_graphs = 2;
    rank.oversubscribed = 1;
    rank.deadline_ns = 60000000000ull;
    rank.sym = sym;
    rank.control = &heap.control;
    rank.graphs = graphs;
    rank.batch_config = &config;
    rank.batch = &batch;
    rank.batch_output = &output;
    rank.batch_private = batch_private.data();
    rank.status = statuses.data();
    sym[number] = reinterpret_cast<uint8_t*>(&heap);
    Random random(5);
    for (uint32_t r = 0; r < kRequests; ++r) {
      requests[r].first_token = requests[r].first_output = r * (kMostPrompt + kMostTokens);
      requests[r].num_prompt_tokens = random.between(1, kMostPrompt);
      requests[r].max_new_tokens = random.between(1, kMostTokens);
      requests[r].min_new_tokens = r % 3 == 0 ? UINT32_MAX : random.between(0, 20);
      for (uint32_t i = 0; i < requests[r].num_prompt_tokens; ++i) prompts[requests[r].first_token + i] = static_cast<int32_t>(random.between(0, kVocabulary - 1));
      admissions[num_admissions++] = {MPK_ADMIT, r};
    }
    admissions[num_admissions++] = {MPK_STOP, 0};
  }
};

/* A worker of the GPU's kind: it never runs a batch step. Each worker samples for every kWorkers-th row. */
void work(const mpk_rank* rank, uint32_t worker) {
  uint32_t seen = 0;
  for (;;) {
    mpk::Publication now;
    mpk::Wait wait(rank, nullptr);
    while ((now = mpk::read_publication(rank)).iteration == seen) {
      if (wait.poll(seen) != MPK_OK) return;
    }
    if (now.stop) return;
    seen = now.iteration;
    const mpk_batch* batch = rank->batch;
    const mpk_graph* graph = &rank->graphs[now.graph];
    CHECK(batch->iteration == now.iteration && batch->graph == now.graph, "iteration %u: the batch is that of %u", now.iteration, batch->iteration);
    /* Ranks exchange data in each iteration. */
    if (worker == 0) {
      for (uint32_t pe = 0; pe < kWorld; ++pe) CHECK(mpk::trigger_remote(rank, graph, pe, kMet), "a signal");
      if (mpk::event_wait(rank, graph, kMet, batch->epoch, 0, nullptr) != MPK_OK) return;
    }
    for (uint32_t s = worker; s < batch->num_samples; s += kWorkers) {
      const int32_t row = batch->sample_row[s];
      const int32_t a = batch->sample_active[s];
      CHECK(batch->active_context[a] + batch->active_num_rows[a] == batch->row_position[row] + 1, "iteration %u: the row's position", now.iteration);
      batch->next_token[s] = token_after(batch->row_token[row], batch->row_position[row]);
    }
    mpk::trigger_local(graph, MPK_EVENT_END, graph->events[MPK_EVENT_END]);
    mpk::count_progress(rank);
  }
}

}  // namespace

int main() {
  std::vector<OneRank> ranks(kWorld);
  uint8_t* sym[kWorld];
  for (uint32_t r = 0; r < kWorld; ++r) ranks[r].build(r, sym);
  std::vector<std::thread> threads;
  std::vector<ThreadTeam::Meeting> meetings(kWorld);
  mpk::PreparedStep prepared[kWorld] = {};
  uint32_t published[kWorld] = {}, changed[kWorld] = {};
  for (uint32_t r = 0; r < kWorld; ++r) {
    CHECK(mpk::batch_begin(&ranks[r].rank) == MPK_OK, "begin");
    for (uint32_t i = 0; i < ThreadTeam::kSize; ++i) {
      threads.emplace_back([&, r, i] {
        const int code = mpk::batch_loop(
            ThreadTeam{&meetings[r], i}, &ranks[r].rank, &prepared[r], [&] { ++published[r]; }, [] {}, [&] {
              if (i == 0) ++changed[r];
            });
        CHECK(code == MPK_OK, "rank %u: the loop ends with %d", r, code);
      });
    }
    for (uint32_t w = 0; w < kWorkers; ++w) threads.emplace_back(work, &ranks[r].rank, w);
  }
  for (std::thread& thread : threads) thread.join();
  uint32_t tokens = 0, ends = 0;
  for (uint32_t r = 0; r < kWorld; ++r) {
    const OneRank& one = ranks[r];
    CHECK(one.output.finished == kRequests && one.batch.hash == ranks[0].batch.hash, "rank %u: %lu requests ended", r, one.output.finished);
    for (uint32_t q = 0; q < kRequests; ++q) {
      const mpk_request& request = one.requests[q];
      int32_t token = one.prompts[request.first_token + request.num_prompt_tokens - 1];
      uint32_t count = 0;
      bool eos = false;
      while (count < request.max_new_tokens && !eos) {
        token = token_after(token, static_cast<int32_t>(request.num_prompt_tokens - 1 + count));
        CHECK(one.tokens[request.first_output + count] == token, "rank %u, request %u, token %u: %d, wanted %d", r, q, count, one.tokens[request.first_output + count], token);
        ++count;
        eos = count > request.min_new_tokens && std::count(std::begin(kEos), std::end(kEos), token) != 0;
      }
      CHECK(one.outputs[q].num_tokens == count && one.outputs[q].finish == (eos ? MPK_FINISH_EOS : MPK_FINISH_LENGTH), "rank %u, request %u: %u tokens, wanted %u; finish %u", r, q, one.outputs[q].num_tokens, count, one.outputs[q].finish);
      tokens += count;
      ends += eos;
    }
  }
  CHECK(published[0] == published[1] && changed[0] == changed[1] && 2 * changed[0] < published[0], "%u and %u iterations, %u and %u not steady", published[0], published[1], changed[0], changed[1]);
  CHECK(ends > 2 && ends < 2 * kRequests - 2, "%u requests meet an end of sequence", ends);
  std::printf("loop of batch steps: ok, %u iterations, %u not steady, %u tokens on %u ranks\n", published[0] - 1, changed[0], tokens, kWorld);
}
