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

struct Arrival {
  uint32_t step, kind, request; /* known to rank 0 before batch step number `step`, from 0 */
};

struct Scenario {
  uint32_t max_batch, max_seq_len, page_size, num_pages, top_k;
  uint32_t prefill_rows, on_demand, max_drafts;
  std::vector<GraphShape> graphs;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<uint32_t> max_new;
  std::vector<uint32_t> min_new; /* an end of sequence counts only after so many */
  std::vector<uint32_t> number; /* entry of the request table that the request has; used again after its end */
  std::vector<Arrival> log;
  std::vector<int32_t> eos;
  uint64_t seed;
};

/* What a request samples at a position: of its own history only. */
int32_t sampled(uint32_t request, uint32_t position, int32_t token) {
  return static_cast<int32_t>((request * 7919u + position * 104729u + static_cast<uint32_t>(token) * 31u + 17u) % 1009u % kVocabulary);
}

/* What the lookup guesses to follow `token` at `position`: right for a while. */
std::vector<int32_t> guessed(const Scenario& scenario, uint32_t request, uint32_t position, int32_t token) {
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

/* ---- the simulator: plain containers, one request after another ---- */

struct Expected {
  /* For each iteration: rows of each slot as (request, first position, count), graph, and entries in effect. */
  struct Share {
    uint32_t request, first, count, held; /* `held` rows stay: the others were wrong guesses */
    bool operator==(const Share& other) const { return request == other.request && first == other.first && count == other.count; }
  };
  struct Step {
    uint32_t graph, entries;
    std::map<uint32_t, Share> slots;
  };
  std::vector<Step> steps;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<uint32_t> finish;
  uint64_t preemptions = 0, guesses = 0, wrong = 0, reused = 0;
};

Expected simulate(const Scenario& scenario) {
  struct Running {
    uint32_t slot, done, pages, target;
    std::vector<int32_t> drafts;
  };
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  Expected expected;
  expected.tokens.resize(count);
  expected.finish.assign(count, MPK_RUNNING);
  std::deque<uint32_t> waiting;
  std::map<uint32_t, Running> running;
  std::vector<uint32_t> in_order; /* requests that ever ran, in the order of their first admission */
  std::set<uint32_t> came;
  uint32_t pages_left = scenario.num_pages;
  size_t next = 0;
  auto pages_of = [&](size_t tokens) { return static_cast<uint32_t>((tokens + scenario.page_size - 1) / scenario.page_size); };
  auto most_new = [&](uint32_t request) {
    const size_t prompt = scenario.prompts[request].size();
    return prompt >= scenario.max_seq_len ? 0 : std::min<size_t>(scenario.max_new[request], scenario.max_seq_len - prompt);
  };
  auto leave = [&](uint32_t request) {
    if (!running.count(request)) return;
    pages_left += running[request].pages;
    running.erase(request);
  };
  auto end = [&](uint32_t request, uint32_t why) {
    expected.finish[request] = why;
    leave(request);
    waiting.erase(std::remove(waiting.begin(), waiting.end(), request), waiting.end());
  };
  auto admission = [&] {
    while (!waiting.empty()) {
      const uint32_t request = waiting.front();
      const size_t prompt = scenario.prompts[request].size(), known = prompt + expected.tokens[request].size();
      if (prompt == 0 || most_new(request) == 0 || pages_of(prompt + most_new(request)) > scenario.num_pages) {
        end(request, MPK_FINISH_LENGTH);
        continue;
      }
      const uint32_t pages = scenario.on_demand ? pages_of(known + 1) : pages_of(prompt + most_new(request));
      std::set<uint32_t> free_slots;
      for (uint32_t slot = 0; slot < scenario.max_batch; ++slot) free_slots.insert(slot);
      for (const auto& [_, one] : running) free_slots.erase(one.slot);
      if (free_slots.empty() || pages + (scenario.on_demand ? running.size() : 0) > pages_left) break;
      pages_left -= pages;
      running[request] = {*free_slots.begin(), 0, pages, static_cast<uint32_t>(known), {}};
      if (std::find(in_order.begin(), in_order.end(), request) == in_order.end()) in_order.push_back(request);
      waiting.pop_front();
    }
  };
  auto take_entry = [&] {
    const Arrival& entry = scenario.log[next++];
    if (entry.kind == MPK_CANCEL) {
      if (came.count(entry.request) && expected.finish[entry.request] == MPK_RUNNING) end(entry.request, MPK_FINISH_CANCELLED);
    } else {
      came.insert(entry.request);
      waiting.push_back(entry.request);
    }
    admission();
  };
  for (uint32_t step_number = 0;; ++step_number) {
    admission();
    while (next < scenario.log.size() && (scenario.log[next].step <= step_number || running.empty())) take_entry();
    if (running.empty()) return expected;
    uint32_t budget = 0;
    for (const GraphShape& shape : scenario.graphs) budget = std::max(budget, shape.rows);
    const uint32_t most_rows = budget;
    uint32_t most_samples = 0;
    for (const GraphShape& shape : scenario.graphs) most_samples = shape.rows == most_rows ? std::max(most_samples, shape.samples) : most_samples;
    Expected::Step step{0, static_cast<uint32_t>(next), {}};
    uint32_t rows = 0, samples = 0;
    bool all_prompts = true;
    std::map<uint32_t, uint32_t> shares;
    for (uint32_t request : in_order) {
      if (!running.count(request) || running[request].done < running[request].target) continue;
      shares[request] = 1;
      ++rows, ++samples;
    }
    if (rows > 0 && scenario.prefill_rows > 0) budget = std::min(budget, rows + scenario.prefill_rows);
    for (uint32_t request : in_order) {
      if (!running.count(request) || running[request].done >= running[request].target) continue;
      const uint32_t take = std::min(running[request].target - running[request].done, budget - rows);
      all_prompts = all_prompts && take > 0;
      if (take == 0) continue;
      shares[request] = take;
      rows += take;
      samples += running[request].done + take == running[request].target;
    }
    std::map<uint32_t, uint32_t> by_slot;
    for (const auto& [request, _] : shares) by_slot[running[request].slot] = request;
    for (const auto& [slot, request] : by_slot) {
      Running& one = running[request];
      if (one.done < one.target || !all_prompts || scenario.max_drafts == 0) continue;
      const size_t wanted = most_new(request) - expected.tokens[request].size() - 1;
      const uint32_t drafts = static_cast<uint32_t>(std::min({one.drafts.size(), wanted, static_cast<size_t>(scenario.max_drafts), static_cast<size_t>(most_rows - rows), static_cast<size_t>(most_samples - samples)}));
      shares[request] += drafts;
      rows += drafts;
      samples += drafts;
    }
    /* The oldest take their pages from the youngest. */
    for (uint32_t request : in_order) {
      while (scenario.on_demand && running.count(request)) {
        Running& one = running[request];
        const uint32_t needed = pages_of(one.done + (shares.count(request) ? shares[request] : 0));
        if (needed <= one.pages) break;
        if (needed - one.pages <= pages_left) {
          pages_left -= needed - one.pages;
          one.pages = needed;
          break;
        }
        const uint32_t victim = *std::find_if(in_order.rbegin(), in_order.rend(), [&](uint32_t r) { return running.count(r) != 0; });
        leave(victim);
        shares.erase(victim);
        waiting.push_front(victim);
        ++expected.preemptions;
      }
    }
    rows = samples = 0;
    for (const auto& [request, take] : shares) {
      const Running& one = running[request];
      step.slots[one.slot] = {request, one.done, take, take};
      rows += take;
      samples += one.done < one.target ? one.done + take == one.target : take;
    }
    uint32_t best = UINT32_MAX;
    for (uint32_t g = 0; g < scenario.graphs.size(); ++g) {
      const GraphShape& shape = scenario.graphs[g];
      if (shape.rows < rows || shape.active < step.slots.size() || shape.samples < samples || shape.rows >= best) continue;
      best = shape.rows;
      step.graph = g;
    }
    CHECK(best != UINT32_MAX, "no graph has room");
    for (auto& [_, share] : step.slots) {
      const uint32_t request = share.request;
      const std::vector<int32_t>& prompt = scenario.prompts[request];
      std::vector<int32_t>& tokens = expected.tokens[request];
      Running& one = running[request];
      const bool generates = one.done >= one.target;
      auto token_at = [&](uint32_t position) { return position < prompt.size() ? prompt[position] : tokens[position - prompt.size()]; };
      one.done += generates ? 1 : share.count;
      if (one.done < one.target) continue;
      share.held = generates ? 1 : share.count;
      std::vector<int32_t> drafts = one.drafts;
      for (uint32_t i = 0;; ++i) {
        const int32_t token = sampled(request, one.done - 1, token_at(one.done - 1));
        tokens.push_back(token);
        one.drafts = guessed(scenario, request, one.done, token);
        if (tokens.size() > scenario.min_new[request] && std::count(scenario.eos.begin(), scenario.eos.end(), token)) {
          end(request, MPK_FINISH_EOS);
          break;
        }
        if (tokens.size() == most_new(request)) {
          end(request, MPK_FINISH_LENGTH);
          break;
        }
        if (!generates || i + 1 == share.count) break;
        ++expected.guesses;
        if (drafts[i] != token) {
          ++expected.wrong;
          break;
        }
        ++one.done;
        ++share.held;
      }
    }
    expected.steps.push_back(step);
  }
}

/* ---- the batch step, driven as the workers would ---- */

struct Driven {
  std::vector<uint64_t> hashes;
  uint64_t prefill_ns, decode_ns, prefill_iterations, decode_steps;
};

Driven drive(const Scenario& scenario, const Expected& expected, bool early) {
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  uint32_t table = 1, most_samples = scenario.max_batch, max_rows = 0;
  for (uint32_t number : scenario.number) table = std::max(table, number + 1);
  std::vector<mpk_request> requests(table);
  std::vector<uint32_t> holder(table, UINT32_MAX); /* the request that an entry of the table stands for */
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
    most_samples = std::max(most_samples, graph.samples);
  }
  /* Room of each entry of the table: the longest that it gets. */
  const uint32_t token_room = 2 * scenario.max_seq_len + 40, output_room = 40;
  std::vector<int32_t> prompt_tokens(static_cast<size_t>(table) * token_room, -1);
  std::vector<mpk_admission> ring(4, mpk_admission{});
  uint32_t written = 0, num_admissions = 0;
  mpk_batch_config config{};
  config.max_batch = scenario.max_batch;
  config.max_seq_len = scenario.max_seq_len;
  config.page_size = scenario.page_size;
  config.num_pages = scenario.num_pages;
  config.pages_per_slot = (scenario.max_seq_len + scenario.page_size - 1) / scenario.page_size;
  config.max_rows = max_rows;
  config.max_samples = most_samples;
  config.num_requests = table;
  config.num_eos = static_cast<uint32_t>(scenario.eos.size());
  while (ring.size() < scenario.log.size() + 1) ring.resize(2 * ring.size());
  config.admission_ring = static_cast<uint32_t>(ring.size());
  config.top_k = scenario.top_k;
  config.generate = 1;
  config.prefill_rows = scenario.prefill_rows;
  config.on_demand = scenario.on_demand;
  config.max_drafts = scenario.max_drafts;
  config.tokens = prompt_tokens.data();
  config.requests = requests.data();
  config.eos = scenario.eos.data();
  config.admissions = ring.data();
  config.num_admissions = &num_admissions;
  std::vector<int32_t> row_token(max_rows), row_active(max_rows), row_position(max_rows), page_table(scenario.max_batch * config.pages_per_slot, -1);
  std::vector<int32_t> per_slot[7], per_sample[3];
  for (auto& array : per_slot) array.assign(scenario.max_batch, -1);
  for (auto& array : per_sample) array.assign(most_samples, -1);
  std::vector<int32_t> drafts(scenario.max_batch * scenario.max_drafts + 1, -1), num_drafts(scenario.max_batch, 0);
  std::vector<int32_t> top_token(most_samples * scenario.top_k + 1);
  std::vector<float> top_logprob(most_samples * scenario.top_k + 1);
  mpk_batch batch{};
  batch.row_token = row_token.data();
  batch.row_active = row_active.data();
  batch.row_position = row_position.data();
  batch.active_slot = per_slot[0].data();
  batch.active_first_row = per_slot[1].data();
  batch.active_num_rows = per_slot[2].data();
  batch.active_context = per_slot[3].data();
  batch.active_num_samples = per_slot[4].data();
  batch.sample_row = per_sample[0].data();
  batch.sample_active = per_sample[1].data();
  batch.next_token = per_sample[2].data();
  batch.page_table = page_table.data();
  batch.top_token = top_token.data();
  batch.top_logprob = top_logprob.data();
  if (scenario.max_drafts != 0) {
    batch.accepted = per_slot[5].data();
    batch.num_drafts = num_drafts.data();
    batch.draft_token = drafts.data();
  }
  std::vector<mpk_request_output> request_outputs(table);
  std::vector<int32_t> tokens(table * output_room, -1), top_tokens(tokens.size() * (scenario.top_k + 1), -1);
  std::vector<float> top_logprobs(top_tokens.size(), 1);
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

  /* The host's part: what an entry of the table has yielded, when it has ended; then the entry is free. */
  std::vector<bool> checked(count, false);
  auto drain = [&](uint32_t number) {
    const uint32_t r = holder[number];
    if (r == UINT32_MAX || request_outputs[number].finish == MPK_RUNNING) return;
    CHECK(request_outputs[number].finish == expected.finish[r], "request %u: finish %u, wanted %u", r, request_outputs[number].finish, expected.finish[r]);
    CHECK(request_outputs[number].num_tokens == expected.tokens[r].size(), "request %u: %u tokens, wanted %zu", r, request_outputs[number].num_tokens, expected.tokens[r].size());
    for (uint32_t i = 0; i < expected.tokens[r].size(); ++i) {
      const size_t place = requests[number].first_output + i;
      CHECK(tokens[place] == expected.tokens[r][i], "request %u token %u", r, i);
      for (uint32_t k = 0; k < scenario.top_k; ++k) {
        CHECK(top_tokens[place * scenario.top_k + k] == tokens[place] * 100 + static_cast<int32_t>(k), "top token");
        CHECK(top_logprobs[place * scenario.top_k + k] == -static_cast<float>(tokens[place] + static_cast<int32_t>(k)), "top log-probability");
      }
    }
    checked[r] = true;
    holder[number] = UINT32_MAX;
  };
  auto write_entry = [&](const Arrival& arrival) {
    const uint32_t r = arrival.request, number = scenario.number[r];
    if (arrival.kind == MPK_ADMIT) {
      CHECK(holder[number] == UINT32_MAX, "entry %u of the table is in use", number);
      holder[number] = r;
      requests[number] = mpk_request{};
      requests[number].first_token = number * token_room;
      requests[number].num_prompt_tokens = static_cast<uint32_t>(scenario.prompts[r].size());
      requests[number].max_new_tokens = scenario.max_new[r];
      requests[number].min_new_tokens = scenario.min_new[r];
      requests[number].first_output = number * output_room;
      std::fill_n(prompt_tokens.begin() + number * token_room, token_room, -1);
      std::copy(scenario.prompts[r].begin(), scenario.prompts[r].end(), prompt_tokens.begin() + number * token_room);
      request_outputs[number] = {0, MPK_RUNNING};
    }
    ring[written++ % ring.size()] = mpk_admission{arrival.kind, number};
  };

  struct Written {
    uint32_t request, position;
    int32_t token;
  };
  std::vector<Written> cache(static_cast<size_t>(scenario.num_pages) * scenario.page_size, {UINT32_MAX, 0, -1});
  std::vector<uint32_t> epochs(graphs.size(), 0);
  Driven driven{};
  CHECK(mpk::batch_begin(&rank) == MPK_OK, "begin");
  uint64_t now = 1000;
  for (size_t i = 0;; ++i, now += 10) {
    for (uint32_t number = 0; number < table; ++number) drain(number);
    const bool last = i == expected.steps.size();
    while (written < (last ? scenario.log.size() : expected.steps[i].entries)) write_entry(scenario.log[written]);
    if (last) ring[written++ % ring.size()] = mpk_admission{MPK_STOP, 0};
    num_admissions = written;
    /* As next_iteration does after an iteration has been published; or as the first batch step of a launch. */
    if (early) CHECK(mpk::decide(&rank), "decide");
    CHECK(mpk::batch_step(&rank, now, nullptr) == MPK_OK, "step %zu", i);
    CHECK(mpk::pages_consistent(&rank), "pages after step %zu", i);
    mpk::publish(&rank);
    /* What the next iteration writes may be gone when the host gets its results. */
    std::fill(per_sample[2].begin(), per_sample[2].end(), -5);
    std::fill(top_token.begin(), top_token.end(), -5);
    std::fill(top_logprob.begin(), top_logprob.end(), 5.0f);
    mpk::hand_out(&rank);
    CHECK(output.entries_taken == written, "%u entries in effect, wanted %u", output.entries_taken, written);
    if (batch.stop) {
      CHECK(last, "%zu iterations, wanted %zu", i, expected.steps.size());
      break;
    }
    CHECK(!last, "more iterations than wanted");
    const Expected::Step& step = expected.steps[i];
    CHECK(batch.iteration == i + 1 && control.iteration == i + 1, "iteration %u, wanted %zu", batch.iteration, i + 1);
    CHECK(batch.graph == step.graph && control.launch == step.graph, "step %zu: graph %u, wanted %u", i, batch.graph, step.graph);
    CHECK(batch.epoch == ++epochs[batch.graph], "epoch");
    CHECK(batch.num_active == step.slots.size(), "step %zu: %u active, wanted %zu", i, batch.num_active, step.slots.size());
    driven.hashes.push_back(batch.hash);
    std::fill(num_drafts.begin(), num_drafts.end(), 0);
    uint32_t row = 0, samples = 0, prompt_rows = 0;
    for (uint32_t a = 0; a < batch.num_active; ++a) {
      const uint32_t slot = static_cast<uint32_t>(batch.active_slot[a]);
      CHECK(step.slots.count(slot), "step %zu: slot %u", i, slot);
      const Expected::Share share = step.slots.at(slot);
      const std::vector<int32_t>& prompt = scenario.prompts[share.request];
      const std::vector<int32_t>& all = expected.tokens[share.request];
      CHECK(static_cast<uint32_t>(batch.active_first_row[a]) == row && static_cast<uint32_t>(batch.active_num_rows[a]) == share.count &&
            static_cast<uint32_t>(batch.active_context[a]) == share.first, "step %zu: share of slot %u", i, slot);
      auto token_at = [&](uint32_t position) { return position < prompt.size() ? prompt[position] : all[position - prompt.size()]; };
      for (uint32_t j = 0; j < share.count; ++j, ++row) {
        const uint32_t position = share.first + j;
        if (j < share.held) CHECK(row_token[row] == token_at(position), "step %zu row %u: token %d, wanted %d", i, row, row_token[row], token_at(position));
        CHECK(row_position[row] == static_cast<int32_t>(position) && row_active[row] == static_cast<int32_t>(a), "step %zu row %u", i, row);
        auto place = [&](uint32_t p) -> Written& {
          const int32_t page = page_table[slot * config.pages_per_slot + p / scenario.page_size];
          CHECK(page >= 0 && page < static_cast<int32_t>(scenario.num_pages), "page %d", page);
          return cache[static_cast<size_t>(page) * scenario.page_size + p % scenario.page_size];
        };
        place(position) = {share.request, position, row_token[row]};
        for (uint32_t p = 0; p <= position && j < share.held; ++p) {
          CHECK(place(p).request == share.request && place(p).position == p && place(p).token == token_at(p), "step %zu: KV of request %u at %u was overwritten", i, share.request, p);
        }
      }
      const uint32_t of_slot = static_cast<uint32_t>(batch.active_num_samples[a]);
      CHECK(of_slot <= share.count && samples + of_slot <= batch.num_samples, "step %zu: %u samples of slot %u", i, of_slot, slot);
      uint32_t accepted = 0;
      for (uint32_t s = 0; s < of_slot; ++s, ++samples) {
        const uint32_t of_row = row - of_slot + s;
        CHECK(batch.sample_row[samples] == static_cast<int32_t>(of_row) && batch.sample_active[samples] == static_cast<int32_t>(a), "step %zu: sample %u", i, samples);
        const int32_t token = sampled(share.request, share.first + share.count - of_slot + s, row_token[of_row]);
        batch.next_token[samples] = token;
        for (uint32_t k = 0; k < scenario.top_k; ++k) {
          top_token[samples * scenario.top_k + k] = token * 100 + static_cast<int32_t>(k);
          top_logprob[samples * scenario.top_k + k] = -static_cast<float>(token + static_cast<int32_t>(k));
        }
        if (accepted == s && (s == 0 || row_token[of_row] == batch.next_token[samples - 1])) ++accepted;
      }
      if (of_slot != 0) {
        per_slot[5][a] = static_cast<int32_t>(accepted);
        const uint32_t position = share.first + share.count - of_slot + accepted;
        const std::vector<int32_t> guess = guessed(scenario, share.request, position, batch.next_token[samples - of_slot + accepted - 1]);
        num_drafts[slot] = static_cast<int32_t>(guess.size());
        for (uint32_t d = 0; d < guess.size() && d < scenario.max_drafts; ++d) drafts[slot * scenario.max_drafts + d] = guess[d];
      } else {
        CHECK(share.first + share.count < prompt.size() + all.size(), "step %zu: slot %u without a sample", i, slot);
      }
      if (of_slot == 0 || share.count != of_slot || (share.first == 0 && share.count == 1)) prompt_rows += share.count;
      else if (share.first < prompt.size()) prompt_rows += share.count;
    }
    CHECK(row == batch.num_rows && samples == batch.num_samples, "step %zu: totals", i);
    if (expected.preemptions == 0) CHECK(prompt_rows == batch.prompt_rows, "step %zu: %u prompt rows, wanted %u", i, batch.prompt_rows, prompt_rows);
  }
  for (uint32_t number = 0; number < table; ++number) drain(number);
  for (uint32_t r = 0; r < count; ++r) CHECK(checked[r], "request %u never ended", r);
  CHECK(output.finished == count && output.running == 0 && output.waiting == 0 && output.free_pages == scenario.num_pages, "%lu of %u ended, %u run, %u wait, %u of %u pages free",
        output.finished, count, output.running, output.waiting, output.free_pages, scenario.num_pages);
  CHECK(output.preemptions == expected.preemptions, "%lu preemptions, wanted %lu", output.preemptions, expected.preemptions);
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
  scenario.seed = seed;
  scenario.max_batch = random.between(1, 6);
  scenario.page_size = 1u << random.between(0, 4);
  scenario.max_seq_len = random.between(4, 60);
  const uint32_t per_slot = (scenario.max_seq_len + scenario.page_size - 1) / scenario.page_size;
  scenario.num_pages = random.between(1, per_slot * scenario.max_batch);
  scenario.top_k = random.between(0, 3);
  scenario.prefill_rows = random.between(0, 1) ? 0 : random.between(1, 8);
  scenario.on_demand = random.between(0, 1);
  scenario.max_drafts = random.between(0, 1) ? 0 : random.between(1, 4);
  for (uint32_t rows = 1; rows < scenario.max_batch; rows *= 2) scenario.graphs.push_back({rows, rows, rows});
  scenario.graphs.push_back({scenario.max_batch, scenario.max_batch, scenario.max_batch});
  /* Room for guesses. */
  const uint32_t most = scenario.max_batch + random.between(0, 12);
  scenario.graphs.push_back({most, scenario.max_batch, scenario.max_drafts != 0 ? most : scenario.max_batch});
  if (random.between(0, 1)) std::reverse(scenario.graphs.begin(), scenario.graphs.end());
  const uint32_t count = random.between(0, 14);
  for (uint32_t r = 0; r < count; ++r) {
    /* Now and then an empty prompt, one that can never fit, or no token wanted. */
    scenario.prompts.emplace_back(random.between(0, 20) == 0 ? 0 : random.between(1, scenario.max_seq_len + 2));
    if (random.between(0, 1)) scenario.prompts.back().resize(std::min<size_t>(scenario.prompts.back().size(), 5));
    for (int32_t& token : scenario.prompts.back()) token = static_cast<int32_t>(random.between(0, kVocabulary - 1));
    scenario.max_new.push_back(random.between(0, 20) == 0 ? 0 : random.between(1, 30));
    scenario.min_new.push_back(random.between(0, 3) != 0 ? 0 : random.between(0, 4) == 0 ? UINT32_MAX : random.between(0, 30));
    scenario.number.push_back(r);
    const uint32_t arrives = random.between(0, 1) ? 0 : random.between(0, 60);
    scenario.log.push_back({arrives, MPK_ADMIT, r});
    if (random.between(0, 4) == 0) scenario.log.push_back({arrives + random.between(0, 30), MPK_CANCEL, r});
  }
  std::stable_sort(scenario.log.begin(), scenario.log.end(), [](const Arrival& a, const Arrival& b) { return a.step < b.step; });
  for (uint32_t e = random.between(0, 2); e > 0; --e) scenario.eos.push_back(static_cast<int32_t>(random.between(0, kVocabulary - 1)));
  return scenario;
}

/* Gives later requests the numbers of earlier ones that have ended well before they come. */
void reuse_numbers(Scenario* scenario, Expected* expected) {
  const uint32_t count = static_cast<uint32_t>(scenario->prompts.size());
  std::vector<size_t> last(count, 0), first(count, SIZE_MAX); /* steps */
  for (size_t i = 0; i < expected->steps.size(); ++i) {
    for (const auto& [_, share] : expected->steps[i].slots) last[share.request] = i;
  }
  size_t entry = 0;
  for (size_t i = 0; i < expected->steps.size(); ++i) {
    for (; entry < expected->steps[i].entries; ++entry) {
      const Arrival& arrival = scenario->log[entry];
      if (arrival.kind == MPK_ADMIT) first[arrival.request] = i;
      else last[arrival.request] = std::max(last[arrival.request], i); /* its cancel has come */
    }
  }
  for (; entry < scenario->log.size(); ++entry) last[scenario->log[entry].request] = SIZE_MAX;
  for (uint32_t r = 0; r < count; ++r) {
    if (expected->tokens[r].empty() && expected->finish[r] == MPK_FINISH_LENGTH) last[r] = SIZE_MAX; /* refused at some time */
  }
  std::vector<uint32_t> by_arrival;
  for (const Arrival& arrival : scenario->log) {
    if (arrival.kind == MPK_ADMIT) by_arrival.push_back(arrival.request);
  }
  std::vector<size_t> busy_until; /* by number */
  for (uint32_t r : by_arrival) {
    size_t number = 0;
    const size_t begins = first[r] == SIZE_MAX ? 0 : first[r];
    while (number < busy_until.size() && (busy_until[number] == SIZE_MAX || busy_until[number] + 1 >= begins)) ++number;
    if (number == busy_until.size()) busy_until.push_back(0);
    else ++expected->reused;
    busy_until[number] = std::max(last[r], begins);
    if (first[r] == SIZE_MAX || last[r] == SIZE_MAX) busy_until[number] = SIZE_MAX;
    scenario->number[r] = static_cast<uint32_t>(number);
  }
}

/* A rank with one request of one token, of which no entry says anything yet, and `slots` slots. */
struct OneRequest {
  mpk_request request = {0, 1, 1, 0, {}, 0, 0};
  mpk_admission admissions[4] = {{MPK_ADMIT, 0}};
  uint32_t num_admissions = 0;
  int32_t token = 1, row = 0;
  std::vector<int32_t> per_slot[9];
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
    config.max_batch = config.max_samples = slots;
    config.admission_ring = 4;
    config.page_size = config.num_pages = config.pages_per_slot = config.max_rows = config.num_requests = config.generate = 1;
    config.max_seq_len = 4;
    config.page_size = 4;
    config.tokens = &token;
    config.requests = &request;
    config.admissions = admissions;
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
    batch.active_num_samples = per_slot[7].data();
    batch.next_token = per_slot[8].data();
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

/* Nothing to do: the batch step waits without a deadline, until an entry comes, an abort, or the time after which the kernel is to
 * end. Then the next launch goes on with the same state. */
void idle_ends_as_told() {
  OneRequest one(1);
  one.rank.deadline_ns = 20000000; /* shorter than the waits */
  one.config.idle_exit_ns = 100000000;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_OK && one.batch.stop == 1 && one.control.parks == 2, "no end");
  /* Another launch, to which an entry comes, and later the wish to stop. */
  one.config.idle_exit_ns = 0;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    __atomic_store_n(&one.num_admissions, 1u, __ATOMIC_RELEASE);
    mpk_cpu_wake(&one.num_admissions);
  });
  CHECK(mpk_cpu_begin(&one.rank) == MPK_OK && one.batch.stop == 0 && one.batch.num_rows == 1 && one.control.parks == 4, "no work");
  host.join();
  one.batch.next_token[0] = 7;
  one.admissions[1] = {MPK_STOP, 0};
  int32_t yielded = 0;
  one.output.tokens = mpk::batch_state(&one.rank)->output.tokens = &yielded;
  std::thread stop([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    __atomic_store_n(&one.num_admissions, 2u, __ATOMIC_RELEASE); /* and nobody wakes it: it looks on its own */
  });
  CHECK(mpk::next_iteration(&one.rank, nullptr) == MPK_OK && one.batch.stop == 1, "no stop");
  stop.join();
  CHECK(yielded == 7 && one.request_output.finish == MPK_FINISH_LENGTH && one.output.decode_steps + one.output.prefill_iterations == 1, "the token is lost");
  /* An abort. */
  OneRequest other(1);
  std::thread abort([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    mpk_cpu_abort(&other.rank, MPK_ABORT_INTERRUPT);
  });
  CHECK(mpk_cpu_begin(&other.rank) == MPK_ABORT_INTERRUPT, "an endless wait");
  abort.join();
  other.control = {};
  other.rank.abi_version = MPK_ABI_VERSION + 1;
  CHECK(mpk_cpu_begin(&other.rank) == MPK_ABORT_KERNEL, "a foreign ABI is accepted");
}

/* Another rank than 0 waits for the decision that follows an iteration no longer than its deadline, and never takes a later one. */
void missing_decision_is_bounded() {
  OneRequest one(1);
  uint8_t* sym[2] = {nullptr, reinterpret_cast<uint8_t*>(&one.control)};
  one.rank.rank = 1;
  one.rank.world = 2;
  one.rank.sym = sym;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DEADLINE && one.control.abort == MPK_ABORT_DEADLINE, "an endless wait");
  one.control = {};
  one.control.decisions[1] = 5ull << 32;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DIVERGED, "a decision is skipped");
  /* An entry that this rank's host has not counted: it is waited for, no longer than the deadline. */
  one.control = {};
  one.control.decisions[1] = (1ull << 32) | 1;
  CHECK(mpk_cpu_begin(&one.rank) == MPK_ABORT_DEADLINE, "an entry that never comes");
}

/* Entries may come at any moment of a batch step, and their count may wrap. */
void entries_come_at_any_time() {
  for (uint32_t trial = 0; trial < 100; ++trial) {
    OneRequest one(4096);
    one.rank.deadline_ns = 10000000000ull;
    CHECK(mpk::batch_begin(&one.rank) == MPK_OK, "begin");
    mpk::batch_state(&one.rank)->iteration = 5;
    const uint32_t before = trial % 2 ? MPK_ENTRY_COUNT_MASK : 0;
    mpk::batch_state(&one.rank)->next_admission = before;
    one.admissions[before % 4] = {MPK_ADMIT, 0};
    __atomic_store_n(&one.num_admissions, before, __ATOMIC_RELEASE);
    std::thread step([&] { CHECK(mpk::compose(&one.rank, nullptr) == MPK_OK, "compose"); });
    std::this_thread::sleep_for(std::chrono::microseconds(50 + trial * 7));
    __atomic_store_n(&one.num_admissions, (before + 1) & MPK_ENTRY_COUNT_MASK, __ATOMIC_RELEASE);
    mpk_cpu_wake(&one.num_admissions);
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
  uint64_t iterations = 0, chunked = 0, finishes[4] = {}, preemptions = 0, guesses = 0, wrong = 0, reused = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    Scenario scenario = random_scenario(seed);
    Expected expected = simulate(scenario);
    const Driven alone = drive(scenario, expected, false);
    reuse_numbers(&scenario, &expected);
    const Driven first = drive(scenario, expected, false), second = drive(scenario, expected, true);
    CHECK(first.hashes == second.hashes && alone.hashes.size() == first.hashes.size(), "the batch step is not a pure function");
    for (size_t i = 1; i < first.hashes.size(); ++i) CHECK(first.hashes[i] != first.hashes[i - 1], "the hash stands still");
    iterations += expected.steps.size();
    for (const auto& step : expected.steps) {
      for (const auto& [_, share] : step.slots) chunked += share.first != 0 && share.first < scenario.prompts[share.request].size();
    }
    for (uint32_t finish : expected.finish) ++finishes[finish];
    preemptions += expected.preemptions;
    guesses += expected.guesses;
    wrong += expected.wrong;
    reused += expected.reused;
  }
  CHECK(chunked > 100 && finishes[MPK_FINISH_LENGTH] > 100 && finishes[MPK_FINISH_EOS] > 100 && finishes[MPK_FINISH_CANCELLED] > 100, "scenarios are too tame");
  CHECK(preemptions > 100 && guesses > 1000 && wrong > 100 && reused > 1000, "%lu preemptions, %lu guesses, %lu wrong ones, %lu numbers used again", preemptions, guesses, wrong, reused);
  CHECK(finishes[MPK_RUNNING] == 0, "a request never ended");
  idle_ends_as_told();
  missing_decision_is_bounded();
  entries_come_at_any_time();
  numbers_do_not_wrap();
  std::printf("batch step: ok, %lu iterations, %lu preemptions, %lu guesses\n", iterations, preemptions, guesses);
}
