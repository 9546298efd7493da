/* The batch step against a simulator written from the rules alone: random requests, arrivals, cancels, page
 * counts and graph sets. Beside the simulator's schedule, a physical KV cache is kept: every row writes who it is
 * into its page and reads all earlier positions of its request back, so a page with two owners, a wrong table or a
 * wrong position shows whatever the simulator thinks. */
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "batch_step.h"
#include "check.h"

namespace {

constexpr uint32_t kVocabulary = 50;

struct GraphShape {
  uint32_t rows, active, samples;
};

struct Scenario {
  uint32_t max_batch, max_seq_len, page_size, num_pages, top_k;
  std::vector<GraphShape> graphs;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<uint32_t> max_new;
  std::vector<mpk_admission> log;
  std::vector<int32_t> eos;
};

/* What a request samples at a position: of its own history only. */
int32_t sampled(uint32_t request, uint32_t position, int32_t token) {
  return static_cast<int32_t>((request * 7919u + position * 104729u + static_cast<uint32_t>(token) * 31u + 17u) % 1009u % kVocabulary);
}

/* ---- the simulator: plain containers, one request after another ---- */

struct Expected {
  /* For each iteration: its number, rows of each slot as (request, first position, count), graph. */
  struct Share {
    uint32_t request, first, count;
    bool operator==(const Share& other) const { return request == other.request && first == other.first && count == other.count; }
  };
  struct Step {
    uint32_t number, graph;
    std::map<uint32_t, Share> slots;
  };
  std::vector<Step> steps;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<uint32_t> finish;
};

Expected simulate(const Scenario& scenario) {
  struct Running {
    uint32_t slot, done, pages;
  };
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  Expected expected;
  expected.tokens.resize(count);
  expected.finish.assign(count, MPK_RUNNING);
  std::deque<uint32_t> waiting;
  std::vector<uint32_t> in_order; /* running requests in the order of admission */
  std::map<uint32_t, Running> running;
  std::set<uint32_t> admitted;
  uint32_t pages_left = scenario.num_pages;
  size_t next = 0;
  uint32_t number = 1;
  auto end = [&](uint32_t request, uint32_t why) {
    expected.finish[request] = why;
    if (!running.count(request)) return;
    pages_left += running[request].pages;
    running.erase(request);
    in_order.erase(std::find(in_order.begin(), in_order.end(), request));
  };
  for (;;) {
    for (; next < scenario.log.size() && scenario.log[next].iteration <= number; ++next) {
      const mpk_admission& entry = scenario.log[next];
      if (entry.kind == MPK_CANCEL) {
        if (expected.finish[entry.request] == MPK_RUNNING) end(entry.request, MPK_FINISH_CANCELLED);
      } else if (expected.finish[entry.request] == MPK_RUNNING && admitted.insert(entry.request).second) {
        waiting.push_back(entry.request);
      }
    }
    while (!waiting.empty()) {
      const uint32_t request = waiting.front();
      if (expected.finish[request] != MPK_RUNNING) {
        waiting.pop_front();
        continue;
      }
      const uint32_t prompt = static_cast<uint32_t>(scenario.prompts[request].size());
      const uint32_t total = std::min(prompt + scenario.max_new[request], scenario.max_seq_len);
      const uint32_t pages = (total + scenario.page_size - 1) / scenario.page_size;
      if (prompt == 0 || total <= prompt || pages > scenario.num_pages) {
        end(request, MPK_FINISH_LENGTH);
        waiting.pop_front();
        continue;
      }
      std::set<uint32_t> free_slots;
      for (uint32_t slot = 0; slot < scenario.max_batch; ++slot) free_slots.insert(slot);
      for (const auto& [_, one] : running) free_slots.erase(one.slot);
      if (free_slots.empty() || pages > pages_left) break;
      pages_left -= pages;
      running[request] = {*free_slots.begin(), 0, pages};
      in_order.push_back(request);
      waiting.pop_front();
    }
    if (running.empty()) {
      if (next == scenario.log.size()) return expected;
      number = scenario.log[next].iteration;
      continue;
    }
    uint32_t budget = 0;
    for (const GraphShape& shape : scenario.graphs) budget = std::max(budget, shape.rows);
    Expected::Step step{number, 0, {}};
    uint32_t rows = 0, samples = 0;
    for (const bool prompts : {false, true}) {
      for (uint32_t request : in_order) {
        const Running& one = running[request];
        const uint32_t prompt = static_cast<uint32_t>(scenario.prompts[request].size());
        if ((one.done < prompt) != prompts || rows == budget) continue;
        const uint32_t take = prompts ? std::min(prompt - one.done, budget - rows) : 1;
        step.slots[one.slot] = {request, one.done, take};
        rows += take;
        samples += one.done + take >= prompt;
      }
    }
    uint32_t best = UINT32_MAX;
    for (uint32_t g = 0; g < scenario.graphs.size(); ++g) {
      const GraphShape& shape = scenario.graphs[g];
      if (shape.rows < rows || shape.active < step.slots.size() || shape.samples < samples || shape.rows >= best) continue;
      best = shape.rows;
      step.graph = g;
    }
    CHECK(best != UINT32_MAX, "no graph has room");
    expected.steps.push_back(step);
    for (const auto& [_, share] : step.slots) {
      const std::vector<int32_t>& prompt = scenario.prompts[share.request];
      std::vector<int32_t>& tokens = expected.tokens[share.request];
      running[share.request].done += share.count;
      const uint32_t done = running[share.request].done;
      if (done < prompt.size()) continue;
      const int32_t token = sampled(share.request, done - 1, tokens.empty() ? prompt.back() : tokens.back());
      tokens.push_back(token);
      if (std::count(scenario.eos.begin(), scenario.eos.end(), token)) {
        end(share.request, MPK_FINISH_EOS);
      } else if (tokens.size() == scenario.max_new[share.request] || prompt.size() + tokens.size() == scenario.max_seq_len) {
        end(share.request, MPK_FINISH_LENGTH);
      }
    }
    ++number;
  }
}

/* ---- the batch step, driven as the workers would ---- */

struct Driven {
  std::vector<uint64_t> hashes;
  uint64_t prefill_ns, decode_ns, prefill_iterations, decode_steps;
};

Driven drive(const Scenario& scenario, const Expected& expected) {
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  std::vector<int32_t> prompt_tokens;
  std::vector<mpk_request> requests;
  uint32_t outputs = 0, max_rows = 0;
  for (uint32_t r = 0; r < count; ++r) {
    requests.push_back({static_cast<uint32_t>(prompt_tokens.size()), static_cast<uint32_t>(scenario.prompts[r].size()), scenario.max_new[r], outputs});
    prompt_tokens.insert(prompt_tokens.end(), scenario.prompts[r].begin(), scenario.prompts[r].end());
    outputs += scenario.max_new[r];
  }
  std::vector<mpk_event> events = {{1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0}, {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0}, {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0}};
  std::vector<std::vector<uint64_t>> counters(scenario.graphs.size(), std::vector<uint64_t>(3 * MPK_COUNTER_STRIDE, 0));
  const uint32_t no_tasks[2] = {0, 0};
  std::vector<mpk_graph> graphs;
  for (size_t g = 0; g < scenario.graphs.size(); ++g) {
    mpk_graph graph{};
    graph.num_events = 3;
    graph.num_workers = 1;
    graph.rows = scenario.graphs[g].rows;
    graph.active = scenario.graphs[g].active;
    graph.samples = scenario.graphs[g].samples;
    graph.events = events.data();
    graph.worker_first = no_tasks;
    graph.counters = counters[g].data();
    graphs.push_back(graph);
    max_rows = std::max(max_rows, graph.rows);
  }
  mpk_batch_config config{};
  config.max_batch = scenario.max_batch;
  config.max_seq_len = scenario.max_seq_len;
  config.page_size = scenario.page_size;
  config.num_pages = scenario.num_pages;
  config.pages_per_slot = (scenario.max_seq_len + scenario.page_size - 1) / scenario.page_size;
  config.max_rows = max_rows;
  config.num_requests = count;
  config.num_eos = static_cast<uint32_t>(scenario.eos.size());
  config.top_k = scenario.top_k;
  config.generate = 1;
  config.prompt_tokens = prompt_tokens.data();
  config.requests = requests.data();
  config.eos = scenario.eos.data();
  config.admissions = scenario.log.data();
  const uint32_t log_length = static_cast<uint32_t>(scenario.log.size());
  config.num_admissions = &log_length;
  std::vector<int32_t> row_token(max_rows), row_active(max_rows), row_position(max_rows), page_table(scenario.max_batch * config.pages_per_slot, -1);
  std::vector<int32_t> per_slot[7];
  for (auto& array : per_slot) array.assign(scenario.max_batch, -1);
  std::vector<int32_t> top_token(scenario.max_batch * scenario.top_k + 1);
  std::vector<float> top_logprob(scenario.max_batch * scenario.top_k + 1);
  mpk_batch batch{};
  batch.row_token = row_token.data();
  batch.row_active = row_active.data();
  batch.row_position = row_position.data();
  batch.active_slot = per_slot[0].data();
  batch.active_first_row = per_slot[1].data();
  batch.active_num_rows = per_slot[2].data();
  batch.active_context = per_slot[3].data();
  batch.sample_row = per_slot[4].data();
  batch.sample_active = per_slot[5].data();
  batch.next_token = per_slot[6].data();
  batch.page_table = page_table.data();
  batch.top_token = top_token.data();
  batch.top_logprob = top_logprob.data();
  std::vector<mpk_request_output> request_outputs(count);
  std::vector<int32_t> tokens(outputs + 1, -1), top_tokens((outputs + 1) * (scenario.top_k + 1), -1);
  std::vector<float> top_logprobs((outputs + 1) * (scenario.top_k + 1), 1);
  mpk_batch_output output{};
  output.requests = request_outputs.data();
  output.tokens = tokens.data();
  output.top_tokens = top_tokens.data();
  output.top_logprobs = top_logprobs.data();
  std::vector<uint64_t> batch_private(mpk_batch_private_bytes(&config) / 8 + 1, 0);
  mpk_control control{};
  uint8_t* sym[1] = {reinterpret_cast<uint8_t*>(&control)};
  mpk_rank rank{};
  rank.abi_version = MPK_ABI_VERSION;
  rank.world = rank.num_workers = 1;
  rank.num_graphs = static_cast<uint32_t>(graphs.size());
  rank.oversubscribed = 1;
  rank.deadline_ns = 1000000000;
  rank.sym = sym;
  rank.control = &control;
  rank.graphs = graphs.data();
  rank.batch_config = &config;
  rank.batch = &batch;
  rank.batch_output = &output;
  rank.batch_private = batch_private.data();

  struct Written {
    uint32_t request, position;
  };
  std::vector<Written> cache(static_cast<size_t>(scenario.num_pages) * scenario.page_size, {UINT32_MAX, 0});
  std::vector<uint32_t> epochs(graphs.size(), 0);
  Driven driven{};
  CHECK(mpk::batch_begin(&rank) == MPK_OK, "begin");
  uint64_t now = 1000;
  for (size_t i = 0;; ++i, now += 10) {
    CHECK(mpk::batch_step(&rank, now, nullptr) == MPK_OK, "step %zu", i);
    CHECK(mpk::pages_consistent(&rank), "pages after step %zu", i);
    mpk::publish(&rank);
    /* What the next iteration writes may be gone when the host gets its results. */
    std::fill(per_slot[6].begin(), per_slot[6].end(), -5);
    std::fill(top_token.begin(), top_token.end(), -5);
    std::fill(top_logprob.begin(), top_logprob.end(), 5.0f);
    mpk::hand_out(&rank);
    if (batch.stop) {
      CHECK(i == expected.steps.size(), "%zu iterations, wanted %zu", i, expected.steps.size());
      break;
    }
    CHECK(i < expected.steps.size(), "more iterations than wanted");
    const Expected::Step& step = expected.steps[i];
    CHECK(batch.iteration == step.number && control.iteration == step.number, "iteration %u, wanted %u", batch.iteration, step.number);
    CHECK(batch.graph == step.graph && control.launch == step.graph, "step %zu: graph %u, wanted %u", i, batch.graph, step.graph);
    CHECK(batch.epoch == ++epochs[batch.graph], "epoch");
    CHECK(batch.num_active == step.slots.size(), "step %zu: %u active, wanted %zu", i, batch.num_active, step.slots.size());
    driven.hashes.push_back(batch.hash);
    uint32_t row = 0, samples = 0, prompt_rows = 0;
    for (uint32_t a = 0; a < batch.num_active; ++a) {
      const uint32_t slot = static_cast<uint32_t>(batch.active_slot[a]);
      CHECK(step.slots.count(slot), "step %zu: slot %u", i, slot);
      const Expected::Share share = step.slots.at(slot);
      const std::vector<int32_t>& prompt = scenario.prompts[share.request];
      CHECK(static_cast<uint32_t>(batch.active_first_row[a]) == row && static_cast<uint32_t>(batch.active_num_rows[a]) == share.count &&
            static_cast<uint32_t>(batch.active_context[a]) == share.first, "step %zu: share of slot %u", i, slot);
      for (uint32_t j = 0; j < share.count; ++j, ++row) {
        const uint32_t position = share.first + j;
        const int32_t token = position < prompt.size() ? prompt[position] : expected.tokens[share.request][position - prompt.size()];
        CHECK(row_token[row] == token && row_position[row] == static_cast<int32_t>(position) && row_active[row] == static_cast<int32_t>(a), "step %zu row %u", i, row);
        prompt_rows += position < prompt.size();
        auto place = [&](uint32_t p) -> Written& {
          const int32_t page = page_table[slot * config.pages_per_slot + p / scenario.page_size];
          CHECK(page >= 0 && page < static_cast<int32_t>(scenario.num_pages), "page %d", page);
          return cache[static_cast<size_t>(page) * scenario.page_size + p % scenario.page_size];
        };
        place(position) = {share.request, position};
        for (uint32_t p = 0; p <= position; ++p) {
          CHECK(place(p).request == share.request && place(p).position == p, "step %zu: KV of request %u at %u was overwritten", i, share.request, p);
        }
      }
      if (share.first + share.count < prompt.size()) continue;
      CHECK(samples < batch.num_samples && batch.sample_row[samples] == static_cast<int32_t>(row - 1) && batch.sample_active[samples] == static_cast<int32_t>(a), "step %zu: sample %u", i, samples);
      batch.next_token[samples] = sampled(share.request, share.first + share.count - 1, row_token[row - 1]);
      for (uint32_t k = 0; k < scenario.top_k; ++k) {
        top_token[samples * scenario.top_k + k] = batch.next_token[samples] * 100 + static_cast<int32_t>(k);
        top_logprob[samples * scenario.top_k + k] = -static_cast<float>(batch.next_token[samples] + static_cast<int32_t>(k));
      }
      ++samples;
    }
    CHECK(row == batch.num_rows && samples == batch.num_samples && prompt_rows == batch.prompt_rows, "step %zu: totals", i);
  }
  for (uint32_t r = 0; r < count; ++r) {
    CHECK(request_outputs[r].finish == expected.finish[r], "request %u: finish %u, wanted %u", r, request_outputs[r].finish, expected.finish[r]);
    CHECK(request_outputs[r].num_tokens == expected.tokens[r].size(), "request %u: %u tokens, wanted %zu", r, request_outputs[r].num_tokens, expected.tokens[r].size());
    for (uint32_t i = 0; i < expected.tokens[r].size(); ++i) {
      const size_t place = requests[r].first_output + i;
      CHECK(tokens[place] == expected.tokens[r][i], "request %u token %u", r, i);
      for (uint32_t k = 0; k < scenario.top_k; ++k) {
        CHECK(top_tokens[place * scenario.top_k + k] == tokens[place] * 100 + static_cast<int32_t>(k), "top token");
        CHECK(top_logprobs[place * scenario.top_k + k] == -static_cast<float>(tokens[place] + static_cast<int32_t>(k)), "top log-probability");
      }
    }
  }
  driven.prefill_ns = output.prefill_ns;
  driven.decode_ns = output.decode_ns;
  driven.prefill_iterations = output.prefill_iterations;
  driven.decode_steps = output.decode_steps;
  CHECK(driven.prefill_iterations + driven.decode_steps == expected.steps.size(), "counts of iterations");
  CHECK(driven.prefill_ns == 10 * driven.prefill_iterations && driven.decode_ns == 10 * driven.decode_steps, "times");
  return driven;
}

Scenario random_scenario(uint64_t seed) {
  Random random(seed);
  Scenario scenario;
  scenario.max_batch = random.between(1, 6);
  scenario.page_size = 1u << random.between(0, 4);
  scenario.max_seq_len = random.between(4, 60);
  const uint32_t per_slot = (scenario.max_seq_len + scenario.page_size - 1) / scenario.page_size;
  scenario.num_pages = random.between(1, per_slot * scenario.max_batch);
  scenario.top_k = random.between(0, 3);
  for (uint32_t rows = 1; rows < scenario.max_batch; rows *= 2) scenario.graphs.push_back({rows, rows, rows});
  scenario.graphs.push_back({scenario.max_batch, scenario.max_batch, scenario.max_batch});
  scenario.graphs.push_back({scenario.max_batch + random.between(0, 12), scenario.max_batch, scenario.max_batch});
  if (random.between(0, 1)) std::reverse(scenario.graphs.begin(), scenario.graphs.end());
  const uint32_t count = random.between(0, 14);
  for (uint32_t r = 0; r < count; ++r) {
    /* Now and then an empty prompt, one that can never fit, or no token wanted. */
    scenario.prompts.emplace_back(random.between(0, 20) == 0 ? 0 : random.between(1, scenario.max_seq_len + 2));
    if (random.between(0, 1)) scenario.prompts.back().resize(std::min<size_t>(scenario.prompts.back().size(), 5));
    for (int32_t& token : scenario.prompts.back()) token = static_cast<int32_t>(random.between(0, kVocabulary - 1));
    scenario.max_new.push_back(random.between(0, 20) == 0 ? 0 : random.between(1, 30));
    scenario.log.push_back({random.between(0, 1) ? 1 : random.between(1, 60), MPK_ADMIT, r, 0});
    if (random.between(0, 4) == 0) scenario.log.push_back({random.between(1, 70), MPK_CANCEL, r, 0});
  }
  std::stable_sort(scenario.log.begin(), scenario.log.end(), [](const mpk_admission& a, const mpk_admission& b) { return a.iteration < b.iteration; });
  for (uint32_t e = random.between(0, 2); e > 0; --e) scenario.eos.push_back(static_cast<int32_t>(random.between(0, kVocabulary - 1)));
  return scenario;
}

/* A rank with one request of one token, of which the log says nothing yet, and `slots` slots. */
struct OneRequest {
  mpk_request request = {0, 1, 1, 0, {}};
  mpk_admission admission = {1, MPK_ADMIT, 0, 0};
  uint32_t num_admissions = 0;
  int32_t token = 1, row = 0;
  std::vector<int32_t> per_slot[7];
  mpk_request_output request_output{};
  mpk_event events[3] = {{1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0}, {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0}, {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0}};
  uint64_t counters[3 * MPK_COUNTER_STRIDE] = {};
  uint32_t worker_first[2] = {};
  mpk_batch_config config{};
  mpk_graph graph{};
  mpk_batch batch{};
  mpk_batch_output output{};
  mpk_control control{};
  uint8_t* sym[1] = {reinterpret_cast<uint8_t*>(&control)};
  std::vector<uint64_t> batch_private;
  mpk_rank rank{};

  explicit OneRequest(uint32_t slots) {
    config.max_batch = slots;
    config.page_size = config.num_pages = config.pages_per_slot = config.max_rows = config.num_requests = config.generate = 1;
    config.max_seq_len = 4;
    config.page_size = 4;
    config.prompt_tokens = &token;
    config.requests = &request;
    config.admissions = &admission;
    config.num_admissions = &num_admissions;
    batch_private.assign(mpk_batch_private_bytes(&config) / 8 + 1, 0);
    graph.num_events = 3;
    graph.rows = graph.active = graph.samples = graph.num_workers = 1;
    graph.events = events;
    graph.counters = counters;
    graph.worker_first = worker_first;
    for (auto& array : per_slot) array.assign(slots, 0);
    batch.row_token = batch.row_active = batch.row_position = &row;
    batch.active_slot = per_slot[0].data();
    batch.active_first_row = per_slot[1].data();
    batch.active_num_rows = per_slot[2].data();
    batch.active_context = per_slot[3].data();
    batch.sample_row = per_slot[4].data();
    batch.sample_active = per_slot[5].data();
    batch.page_table = per_slot[6].data();
    output.requests = &request_output;
    rank.abi_version = MPK_ABI_VERSION;
    rank.world = rank.num_workers = rank.num_graphs = rank.oversubscribed = 1;
    rank.deadline_ns = 50000000;
    rank.sym = sym;
    rank.control = &control;
    rank.graphs = &graph;
    rank.batch_config = &config;
    rank.batch = &batch;
    rank.batch_output = &output;
    rank.batch_private = batch_private.data();
  }
};

/* Requests that never come: the batch step waits for the log to grow, but not for ever. */
void missing_admission_is_bounded() {
  OneRequest one(1);
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DEADLINE && one.control.abort == MPK_ABORT_DEADLINE, "an endless wait");
  one.control = {};
  one.rank.abi_version = MPK_ABI_VERSION + 1;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_KERNEL, "a foreign ABI is accepted");
}

/* An entry of an iteration that is over comes while the batch step looks for work, at any moment of a turn: it is applied, and
 * the iteration's number does not go back. Many slots make a turn long. */
void late_admission_moves_no_iteration() {
  for (uint32_t trial = 0; trial < 100; ++trial) {
    OneRequest one(4096);
    one.rank.deadline_ns = 10000000000ull;
    CHECK(mpk::batch_begin(&one.rank) == MPK_OK, "begin");
    mpk::batch_state(&one.rank)->iteration = 5;
    std::thread step([&] { CHECK(mpk::compose(&one.rank, nullptr) == MPK_OK, "compose"); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 + trial * 7));
    __atomic_store_n(&one.num_admissions, 1u, __ATOMIC_RELEASE);
    step.join();
    CHECK(mpk::batch_state(&one.rank)->iteration == 5 && one.batch.num_rows == 1, "trial %u: iteration %u, %u rows", trial,
          mpk::batch_state(&one.rank)->iteration, one.batch.num_rows);
  }
}

/* The last iteration, and the last epoch of a graph: one more ends the run with an error of its own. */
void numbers_do_not_wrap() {
  OneRequest one(1);
  one.config.generate = 0;
  one.config.fixed_iterations = UINT32_MAX;
  CHECK(mpk::batch_begin(&one.rank) == MPK_OK, "begin");
  mpk::batch_state(&one.rank)->iteration = MPK_LAST_ITERATION - 1;
  CHECK(mpk::batch_step(&one.rank, 0, nullptr) == MPK_OK && one.batch.iteration == MPK_LAST_ITERATION && one.batch.epoch == 1, "the last iteration");
  CHECK(mpk::batch_step(&one.rank, 0, nullptr) == MPK_ABORT_ITERATIONS, "an iteration after the last");
  mpk::batch_state(&one.rank)->iteration = 7;
  one.counters[MPK_EVENT_BEGIN * MPK_COUNTER_STRIDE] = MPK_LAST_ITERATION - 1;
  CHECK(mpk::batch_step(&one.rank, 0, nullptr) == MPK_OK && one.batch.epoch == MPK_LAST_ITERATION, "the last epoch");
  one.counters[MPK_EVENT_BEGIN * MPK_COUNTER_STRIDE] = MPK_LAST_ITERATION;
  CHECK(mpk::batch_step(&one.rank, 0, nullptr) == MPK_ABORT_ITERATIONS, "an epoch after the last");
  one.config.fixed_iterations = MPK_LAST_ITERATION;
  mpk::batch_state(&one.rank)->iteration = MPK_LAST_ITERATION;
  CHECK(mpk::batch_step(&one.rank, 0, nullptr) == MPK_OK && one.batch.stop == 1, "a stop after the last iteration");
}

}  // namespace

int main() {
  uint64_t iterations = 0, chunked = 0, finishes[4] = {};
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    const Scenario scenario = random_scenario(seed);
    const Expected expected = simulate(scenario);
    const Driven first = drive(scenario, expected), second = drive(scenario, expected);
    CHECK(first.hashes == second.hashes, "the batch step is not a pure function");
    for (size_t i = 1; i < first.hashes.size(); ++i) CHECK(first.hashes[i] != first.hashes[i - 1], "the hash stands still");
    iterations += expected.steps.size();
    for (const auto& step : expected.steps) {
      for (const auto& [_, share] : step.slots) chunked += share.first != 0 && share.first < scenario.prompts[share.request].size();
    }
    for (uint32_t finish : expected.finish) ++finishes[finish];
  }
  CHECK(chunked > 100 && finishes[MPK_FINISH_LENGTH] > 100 && finishes[MPK_FINISH_EOS] > 100 && finishes[MPK_FINISH_CANCELLED] > 100, "scenarios are too tame");
  CHECK(finishes[MPK_RUNNING] == 0, "a request never ended");
  missing_admission_is_bounded();
  late_admission_moves_no_iteration();
  numbers_do_not_wrap();
  std::printf("batch step: ok, %lu iterations\n", iterations);
}
