#include "batch/scenario.h"

#include <algorithm>

namespace batch_test {

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
  scenario.prefix_cache = random.between(0, 3) != 0;
  scenario.crowded = random.between(0, 3) == 0;
  for (uint32_t rows = 1; rows < scenario.max_batch; rows *= 2) scenario.graphs.push_back({rows, rows, rows});
  scenario.graphs.push_back({scenario.max_batch, scenario.max_batch, scenario.max_batch});
  /* Room for drafts. */
  const uint32_t most = scenario.max_batch + random.between(0, 12);
  scenario.graphs.push_back({most, scenario.max_batch, scenario.max_drafts != 0 ? most : scenario.max_batch});
  if (random.between(0, 1)) std::reverse(scenario.graphs.begin(), scenario.graphs.end());
  /* Texts that many prompts begin with. */
  std::vector<std::vector<int32_t>> texts(random.between(1, 3), std::vector<int32_t>(scenario.max_seq_len + 2));
  for (auto& text : texts) {
    for (int32_t& token : text) token = static_cast<int32_t>(random.between(0, kVocabulary - 1));
  }
  const uint32_t count = random.between(0, 14);
  for (uint32_t r = 0; r < count; ++r) {
    /* Sometimes an empty prompt, one that can never fit, or no token wanted. */
    scenario.prompts.emplace_back(random.between(0, 20) == 0 ? 0 : random.between(1, scenario.max_seq_len + 2));
    if (random.between(0, 1)) scenario.prompts.back().resize(std::min<size_t>(scenario.prompts.back().size(), 5));
    for (int32_t& token : scenario.prompts.back()) token = static_cast<int32_t>(random.between(0, kVocabulary - 1));
    if (random.between(0, 3) != 0) {
      const auto& text = texts[random.between(0, static_cast<uint32_t>(texts.size()) - 1)];
      const size_t common = std::min<size_t>(scenario.prompts.back().size(), random.between(0, scenario.max_seq_len + 2));
      std::copy_n(text.begin(), common, scenario.prompts.back().begin());
    }
    scenario.penalties.push_back(random.between(0, 7) == 0);
    scenario.logprobs.push_back((r + static_cast<uint32_t>(seed)) % (scenario.top_k + 2));
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

}  // namespace batch_test
