#include "batch/simulator.h"

#include <algorithm>
#include <deque>
#include <set>

namespace batch_test {

Expected simulate(const Scenario& scenario) {
  struct Running {
    uint32_t slot, done, pages, kept, target; /* the first `kept` pages are in the cache; the others are its own */
    std::vector<int32_t> drafts;
  };
  struct Kept {
    uint32_t readers;
    uint64_t left; /* when the last reader left */
  };
  const uint32_t count = static_cast<uint32_t>(scenario.prompts.size());
  Expected expected;
  expected.tokens.resize(count);
  expected.finish.assign(count, MPK_RUNNING);
  expected.cached.assign(count, 0);
  std::deque<uint32_t> waiting;
  std::map<uint32_t, Running> running;
  std::vector<uint32_t> in_order; /* requests that have run, in the order of their first admission */
  std::set<uint32_t> came;
  std::map<std::vector<int32_t>, Kept> cache;
  uint64_t clock = 0;
  size_t next = 0;
  auto pages_of = [&](size_t tokens) { return static_cast<uint32_t>((tokens + scenario.page_size - 1) / scenario.page_size); };
  auto most_new = [&](uint32_t request) {
    const size_t prompt = scenario.prompts[request].size();
    return prompt >= scenario.max_seq_len ? 0 : std::min<size_t>(scenario.max_new[request], scenario.max_seq_len - prompt);
  };
  /* The tokens up to the end of page `index` of a prompt. */
  auto up_to = [&](uint32_t request, size_t index) {
    const std::vector<int32_t>& prompt = scenario.prompts[request];
    return std::vector<int32_t>(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>((index + 1) * scenario.page_size));
  };
  auto unused_pages = [&] {
    uint32_t unused = 0;
    for (const auto& [_, page] : cache) unused += page.readers == 0;
    return unused;
  };
  auto empty_pages = [&] {
    size_t used = cache.size();
    for (const auto& [_, one] : running) used += one.pages - one.kept;
    CHECK(used <= scenario.num_pages, "more pages than there are");
    return static_cast<uint32_t>(scenario.num_pages - used);
  };
  auto available = [&] { return empty_pages() + unused_pages(); };
  auto take_pages = [&](uint32_t request, uint32_t more) {
    for (; more > 0; --more, ++running[request].pages) {
      if (empty_pages() > 0) continue;
      auto oldest = cache.end();
      for (auto page = cache.begin(); page != cache.end(); ++page) {
        if (page->second.readers == 0 && (oldest == cache.end() || page->second.left < oldest->second.left)) oldest = page;
      }
      CHECK(oldest != cache.end(), "no page to give up");
      for (const auto& [tokens, _] : cache) {
        CHECK(tokens.size() <= oldest->first.size() || !std::equal(oldest->first.begin(), oldest->first.end(), tokens.begin()), "a page that another one continues is given up first");
      }
      cache.erase(oldest);
      ++expected.evictions;
    }
  };
  auto leave = [&](uint32_t request) {
    if (!running.count(request)) return;
    for (uint32_t i = running[request].kept; i-- > 0;) {
      Kept& page = cache.at(up_to(request, i));
      if (--page.readers == 0) page.left = ++clock;
    }
    running.erase(request);
  };
  auto keep = [&](uint32_t request) {
    Running& one = running[request];
    for (; scenario.prefix_cache && (one.kept + 1) * scenario.page_size <= std::min<size_t>(one.done, scenario.prompts[request].size()); ++one.kept) {
      Kept& page = cache[up_to(request, one.kept)];
      expected.joined += page.readers++ != 0;
    }
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
      uint32_t found = 0, back_in_use = 0;
      const bool looks = scenario.prefix_cache && !scenario.penalties[request] && prompt >= scenario.page_size;
      while (looks && (found + 1) * scenario.page_size <= std::min(prompt, known - 1) && cache.count(up_to(request, found))) {
        back_in_use += cache[up_to(request, found++)].readers == 0;
      }
      if (free_slots.empty() || pages - found + back_in_use + (scenario.on_demand ? running.size() : 0) > available()) break;
      for (uint32_t i = 0; i < found; ++i) ++cache[up_to(request, i)].readers;
      running[request] = {*free_slots.begin(), found * scenario.page_size, found, found, static_cast<uint32_t>(known), {}};
      take_pages(request, pages - found);
      if (std::find(in_order.begin(), in_order.end(), request) == in_order.end()) {
        in_order.push_back(request);
        expected.cached[request] = found * scenario.page_size;
        expected.prefix_queries += looks ? prompt : 0;
        expected.prefix_hits += found * scenario.page_size;
      }
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
    /* The oldest requests take their pages from the youngest. */
    for (uint32_t request : in_order) {
      while (scenario.on_demand && running.count(request)) {
        Running& one = running[request];
        const uint32_t needed = pages_of(one.done + (shares.count(request) ? shares[request] : 0));
        if (needed <= one.pages) break;
        if (needed - one.pages <= available()) {
          take_pages(request, needed - one.pages);
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
      keep(request);
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

void reuse_numbers(Scenario* scenario, Expected* expected) {
  const uint32_t count = static_cast<uint32_t>(scenario->prompts.size());
  std::vector<size_t> last(count, 0), first(count, SIZE_MAX); /* in steps */
  for (size_t i = 0; i < expected->steps.size(); ++i) {
    for (const auto& [_, share] : expected->steps[i].slots) last[share.request] = i;
  }
  size_t entry = 0;
  for (size_t i = 0; i < expected->steps.size(); ++i) {
    for (; entry < expected->steps[i].entries; ++entry) {
      const Arrival& arrival = scenario->log[entry];
      if (arrival.kind == MPK_ADMIT) first[arrival.request] = i;
      else last[arrival.request] = std::max(last[arrival.request], i); /* its cancel has arrived */
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

}  // namespace batch_test
