/* A physical KV cache is kept next to the simulator's schedule. Every row writes a hash of everything that led to it into its page,
 * and reads back all earlier positions of its request. So a page with two writers, a page with wrong contents, a wrong
 * table or a wrong position is found, independently of the simulator. */
#include "batch/driver.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "batch_step.h"
#include "pages_check.h"
#include "thread_team.h"

namespace batch_test {

namespace {

constexpr uint64_t kWrongGuess = 1;

/* Keys in place of the host's, without a hash: each list of tokens has its own key. */
class Keys {
 public:
  explicit Keys(bool crowded) : crowded_(crowded) {}
  mpk_page_key of(const std::vector<int32_t>& tokens) {
    const uint64_t number = numbers_.emplace(tokens, numbers_.size()).first->second;
    return {{crowded_ ? number % 2 : number * 0x9E3779B97F4A7C15ull >> 7, number}};
  }

 private:
  bool crowded_;
  std::map<std::vector<int32_t>, uint64_t> numbers_;
};

std::vector<uint64_t> history_of(const std::vector<int32_t>& prompt, const std::vector<int32_t>& tokens) {
  std::vector<uint64_t> history;
  uint64_t hash = 0x1234567;
  for (const auto* part : {&prompt, &tokens}) {
    for (int32_t token : *part) history.push_back(hash = (hash ^ static_cast<uint64_t>(token + 1)) * 0xD6E8FEB86659FD93ull + 29);
  }
  return history;
}

/* The batch step by one thread, or by a team of threads. */
class Stepper {
 public:
  Stepper(const mpk_rank* rank, bool team) : rank_(rank), team_(team) {}

  void prepare() {
    if (!team_) first_[0] = mpk::prepare_step(mpk::platform::OneThread(), rank_, &prepared_);
    else together([&](const ThreadTeam& self, uint32_t i) { first_[i] = mpk::prepare_step(self, rank_, &prepared_); });
  }
  void find_decision() {
    if (!prepared_.decided) prepared_.decided = mpk::find_decision(rank_, &prepared_.decision);
  }
  bool is_decided() const { return prepared_.decided; }
  int step(uint64_t now) {
    if (!team_) return mpk::batch_step(mpk::platform::OneThread(), rank_, &prepared_, first_[0], now, nullptr, [] {});
    int codes[ThreadTeam::kSize] = {};
    together([&](const ThreadTeam& self, uint32_t i) { codes[i] = mpk::batch_step(self, rank_, &prepared_, first_[i], now, nullptr, [] {}); });
    CHECK(std::count(codes, codes + ThreadTeam::kSize, codes[0]) == ThreadTeam::kSize, "the team's results differ");
    return codes[0];
  }
  bool was_steady() const { return prepared_.steady; }
  void publish(uint64_t now) {
    mpk::publish(rank_, prepared_.next);
    mpk::end_batch_step(rank_, prepared_, now);
  }

 private:
  template <typename Do>
  void together(const Do& run) {
    ThreadTeam::Meeting meeting;
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < ThreadTeam::kSize; ++i) threads.emplace_back([&, i] { run(ThreadTeam{&meeting, i}, i); });
    for (std::thread& thread : threads) thread.join();
  }
  const mpk_rank* rank_;
  bool team_;
  mpk::PreparedStep prepared_ = {};
  mpk::NextToken first_[ThreadTeam::kSize] = {};
};

}  // namespace

Driven drive(const Scenario& scenario, const Expected& expected, When when, bool team) {
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  uint32_t table = 1, most_samples = scenario.max_batch, max_rows = 0;
  for (uint32_t number : scenario.number) table = std::max(table, number + 1);
  std::vector<mpk_request> requests(table);
  std::vector<uint32_t> holder(table, UINT32_MAX); /* the request that holds an entry of the table */
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
  /* Room for each entry of the table: enough for its longest request. */
  const uint32_t token_room = 2 * scenario.max_seq_len + 40, output_room = 40;
  std::vector<int32_t> prompt_tokens(static_cast<size_t>(table) * token_room, -1);
  std::vector<mpk_page_key> page_keys(MPK_PAGE_KEYS(prompt_tokens.size(), scenario.page_size));
  Keys keys(scenario.crowded);
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
  if (scenario.prefix_cache) config.num_page_keys = static_cast<uint32_t>(page_keys.size());
  config.page_keys = page_keys.data();
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
  std::vector<float> top_logprob(most_samples * scenario.top_k + 1), token_logprob(most_samples);
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
  /* Without it, the token is looked up among the highest. */
  const bool own_logprob = scenario.seed % 2 == 0;
  if (own_logprob) batch.token_logprob = token_logprob.data();
  if (scenario.max_drafts != 0) {
    batch.accepted = per_slot[5].data();
    batch.num_drafts = num_drafts.data();
    batch.draft_token = drafts.data();
  }
  std::vector<mpk_request_output> request_outputs(table);
  std::vector<int32_t> tokens(table * output_room, -1), top_tokens(tokens.size() * (scenario.top_k + 1), -1);
  std::vector<float> top_logprobs(top_tokens.size(), 1), token_logprobs(tokens.size(), 1);
  const auto listed = [&](uint32_t r) { return std::min(scenario.logprobs[r], scenario.top_k); };
  mpk_batch_output output{};
  output.requests = request_outputs.data();
  output.tokens = tokens.data();
  output.top_tokens = top_tokens.data();
  output.top_logprobs = top_logprobs.data();
  output.token_logprobs = token_logprobs.data();
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

  /* The host's part: checks what an entry of the table has yielded once its request has ended; then the entry is
   * free. */
  std::vector<bool> checked(count, false);
  /* Even tokens are the last ones of their list, odd ones are not listed. */
  auto top_of = [&](uint32_t r, int32_t token, uint32_t k) { return token % 2 == 0 && k + 1 == listed(r) ? token : token * 100 + static_cast<int32_t>(k) + 1; };
  auto own_of = [](int32_t token) { return -0.25f * static_cast<float>(token) - 1.0f; };
  auto drain = [&](uint32_t number) {
    const uint32_t r = holder[number];
    if (r == UINT32_MAX || request_outputs[number].finish == MPK_RUNNING) return;
    CHECK(request_outputs[number].finish == expected.finish[r], "request %u: finish %u, wanted %u", r, request_outputs[number].finish, expected.finish[r]);
    if (!expected.tokens[r].empty()) CHECK(request_outputs[number].cached_tokens == expected.cached[r], "request %u: %u cached tokens, wanted %u", r, request_outputs[number].cached_tokens, expected.cached[r]);
    CHECK(request_outputs[number].num_tokens == expected.tokens[r].size(), "request %u: %u tokens, wanted %zu", r, request_outputs[number].num_tokens, expected.tokens[r].size());
    for (uint32_t i = 0; i < expected.tokens[r].size(); ++i) {
      const size_t place = requests[number].first_output + i;
      CHECK(tokens[place] == expected.tokens[r][i], "request %u token %u", r, i);
      for (uint32_t k = 0; k < listed(r); ++k) {
        CHECK(top_tokens[place * scenario.top_k + k] == top_of(r, tokens[place], k), "top token");
        CHECK(top_logprobs[place * scenario.top_k + k] == -static_cast<float>(tokens[place] + static_cast<int32_t>(k)), "top log-probability");
      }
      for (uint32_t k = listed(r); k < scenario.top_k; ++k) CHECK(top_tokens[place * scenario.top_k + k] == -1, "a log-probability that nobody wants");
      if (listed(r) == 0) {
        CHECK(token_logprobs[place] == 1.0f, "a log-probability that nobody wants");
        continue;
      }
      const float logprob = token_logprobs[place];
      if (own_logprob) CHECK(logprob == own_of(tokens[place]), "log-probability %f", static_cast<double>(logprob));
      else if (tokens[place] % 2 == 0) CHECK(logprob == -static_cast<float>(tokens[place] + static_cast<int32_t>(listed(r)) - 1), "log-probability %f from the list", static_cast<double>(logprob));
      else CHECK(logprob != logprob, "log-probability %f of a token that is not listed", static_cast<double>(logprob));
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
      requests[number].quiet = r % 2;
      std::fill_n(prompt_tokens.begin() + number * token_room, token_room, -1);
      std::copy(scenario.prompts[r].begin(), scenario.prompts[r].end(), prompt_tokens.begin() + number * token_room);
      requests[number].sampling.logprobs = scenario.logprobs[r];
      std::fill_n(top_tokens.begin() + number * output_room * scenario.top_k, output_room * scenario.top_k, -1);
      std::fill_n(token_logprobs.begin() + number * output_room, output_room, 1.0f);
      if (scenario.penalties[r]) requests[number].sampling.flags = MPK_SAMPLING_ON | MPK_SAMPLING_PENALTIES;
      const uint32_t first_key = MPK_FIRST_PAGE_KEY(requests[number].first_token, scenario.page_size);
      for (size_t page = 0; (page + 1) * scenario.page_size <= scenario.prompts[r].size(); ++page) {
        page_keys[first_key + page] = keys.of({scenario.prompts[r].begin(), scenario.prompts[r].begin() + static_cast<std::ptrdiff_t>((page + 1) * scenario.page_size)});
      }
      request_outputs[number] = {0, MPK_RUNNING, 0};
    }
    ring[written++ % ring.size()] = mpk_admission{arrival.kind, number};
  };

  /* Contents of each position of the cache: a hash of everything that led to it. */
  std::vector<uint64_t> cache(static_cast<size_t>(scenario.num_pages) * scenario.page_size, 0);
  std::vector<std::vector<uint64_t>> histories;
  for (uint32_t r = 0; r < count; ++r) histories.push_back(history_of(scenario.prompts[r], expected.tokens[r]));
  std::vector<uint32_t> epochs(graphs.size(), 0);
  Driven driven{};
  uint64_t full_steps = 0;
  CHECK(mpk::batch_begin(&rank) == MPK_OK, "begin");
  /* The host takes results, and writes the entries that are to be in effect in iteration `i`. */
  auto arrive = [&](size_t i) {
    for (uint32_t number = 0; number < table; ++number) drain(number);
    const bool last = i == expected.steps.size();
    while (written < (last ? scenario.log.size() : expected.steps[i].entries)) write_entry(scenario.log[written]);
    if (last) ring[written++ % ring.size()] = mpk_admission{MPK_STOP, 0};
    num_admissions = written;
  };
  /* Everything that the tasks of an iteration read. */
  auto what_tasks_read = [&] {
    std::vector<int32_t> all;
    for (const auto* part : {&row_token, &row_active, &row_position, &per_slot[0], &per_slot[1], &per_slot[2], &per_slot[3], &per_slot[4], &per_sample[0], &per_sample[1], &page_table})
      all.insert(all.end(), part->begin(), part->end());
    all.resize(all.size() + sizeof(batch) / 4);
    std::memcpy(&*(all.end() - sizeof(batch) / 4), &batch, sizeof(batch));
    return all;
  };
  const bool ahead = when == When::kAhead || when == When::kUndecided || when == When::kLate;
  Stepper stepper(&rank, team);
  uint64_t now = 1000;
  for (size_t i = 0;; ++i, now += 10) {
    const bool last = i == expected.steps.size();
    if (i == 0 || !ahead) {
      arrive(i);
      /* As next_iteration does after it has published an iteration; otherwise as in the first batch step of a launch. */
      if (when == When::kDecided) CHECK(mpk::decide(&rank), "decide");
      stepper.prepare();
    }
    CHECK(stepper.step(now) == MPK_OK, "step %zu", i);
    driven.steady += stepper.was_steady();
    CHECK(mpk::pages_consistent(&rank), "pages after step %zu", i);
    stepper.publish(now);
    /* The next iteration's tasks may overwrite these before the host gets the results. */
    std::fill(per_sample[2].begin(), per_sample[2].end(), -5);
    std::fill(top_token.begin(), top_token.end(), -5);
    std::fill(top_logprob.begin(), top_logprob.end(), 5.0f);
    std::fill(token_logprob.begin(), token_logprob.end(), 5.0f);
    const std::vector<mpk_request_output> before = request_outputs;
    const uint32_t bell = control.bell, taken = output.entries_taken;
    mpk::hand_out(&rank);
    /* The host is woken for results that it may wait for, but not for further tokens of a request that is wanted as
     * a whole. */
    bool loud = output.entries_taken != taken;
    for (uint32_t n = 0; n < table; ++n) {
      const bool more = request_outputs[n].num_tokens != before[n].num_tokens;
      loud = loud || request_outputs[n].finish != before[n].finish || (more && (before[n].num_tokens == 0 || requests[n].quiet == 0));
    }
    CHECK((control.bell != bell) == loud, "step %zu: the bell was %srung", i, loud ? "not " : "");
    CHECK(output.entries_taken == written, "%u entries in effect, wanted %u", output.entries_taken, written);
    if (batch.stop) {
      CHECK(last, "%zu iterations, wanted %zu", i, expected.steps.size());
      break;
    }
    CHECK(!last, "more iterations than wanted");
    if (ahead) {
      arrive(i + 1);
      if (when == When::kAhead) CHECK(mpk::decide(&rank), "decide");
      const std::vector<int32_t> before_preparation = what_tasks_read();
      stepper.prepare();
      CHECK(stepper.is_decided() == (when == When::kAhead), "step %zu: the decision is %s", i, stepper.is_decided() ? "there" : "not found");
      if (when == When::kLate) {
        CHECK(mpk::decide(&rank), "decide");
        stepper.find_decision();
        CHECK(stepper.is_decided(), "step %zu: the decision is not found", i);
      }
      CHECK(what_tasks_read() == before_preparation, "step %zu: the batch changes while its tasks run", i);
    }
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
        const int32_t* table = &page_table[slot * config.pages_per_slot];
        auto place = [&](uint32_t p) -> uint64_t& {
          const int32_t page = table[p / scenario.page_size];
          CHECK(page >= 0 && page < static_cast<int32_t>(scenario.num_pages), "page %d", page);
          return cache[static_cast<size_t>(page) * scenario.page_size + p % scenario.page_size];
        };
        const int32_t written = table[position / scenario.page_size];
        CHECK(std::count(page_table.begin(), page_table.end(), written) == 1, "step %zu: page %d is written, and more than one slot has it", i, written);
        const std::vector<uint64_t>& history = histories[share.request];
        place(position) = j < share.held ? history[position] : kWrongGuess;
        for (uint32_t p = 0; p <= position && j < share.held; ++p) {
          CHECK(place(p) == history[p], "step %zu: KV of request %u at %u is not that of its tokens", i, share.request, p);
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
        token_logprob[samples] = own_of(token);
        for (uint32_t k = 0; k < scenario.top_k; ++k) {
          top_token[samples * scenario.top_k + k] = top_of(share.request, token, k);
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
    if (batch.prompt_rows == 0 && step.slots.size() == scenario.max_batch) ++full_steps;
    if (expected.preemptions == 0) CHECK(prompt_rows == batch.prompt_rows, "step %zu: %u prompt rows, wanted %u", i, batch.prompt_rows, prompt_rows);
  }
  for (uint32_t number = 0; number < table; ++number) drain(number);
  for (uint32_t r = 0; r < count; ++r) CHECK(checked[r], "request %u never ended", r);
  CHECK(output.finished == count && output.running == 0 && output.waiting == 0 && output.free_pages == scenario.num_pages, "%lu of %u ended, %u run, %u wait, %u of %u pages free",
        output.finished, count, output.running, output.waiting, output.free_pages, scenario.num_pages);
  CHECK(output.preemptions == expected.preemptions, "%lu preemptions, wanted %lu", output.preemptions, expected.preemptions);
  CHECK(output.prefix_queries == expected.prefix_queries && output.prefix_hits == expected.prefix_hits && output.evictions == expected.evictions,
        "%lu of %lu tokens found, wanted %lu of %lu; %lu pages given up, wanted %lu", output.prefix_hits, output.prefix_queries, expected.prefix_hits, expected.prefix_queries,
        output.evictions, expected.evictions);
  driven.prefill_ns = output.prefill_ns;
  driven.decode_ns = output.decode_ns;
  driven.prefill_iterations = output.prefill_iterations;
  driven.decode_steps = output.decode_steps;
  CHECK(driven.prefill_iterations + driven.decode_steps == expected.steps.size(), "counts of iterations");
  CHECK(output.full_steps == full_steps && output.full_ns == 10 * full_steps, "%lu steps of a full batch, wanted %lu", output.full_steps, full_steps);
  CHECK(driven.prefill_ns == 10 * driven.prefill_iterations && driven.decode_ns == 10 * driven.decode_steps, "times");
  return driven;
}

}  // namespace batch_test
