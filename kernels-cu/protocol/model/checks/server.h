/* A rank that serves: its batch's graphs, its tables, and its host's side. */
#ifndef MPK_MODEL_SERVER_H
#define MPK_MODEL_SERVER_H

#include "cpu/worker.h"
#include "model/checks/world.h"

namespace mpk {
namespace model {

constexpr uint32_t kPrompt = 2, kMostNewTokens = 5;

/* A rank that serves one request at a time, and its host's side. */
struct Server {
  mpk_rank* rank;
  mpk_graph* graphs; /* decode with 1 row, prefill with 2 */
  mpk_batch_config* config;
  mpk_request* requests;
  mpk_admission* admissions;
  uint32_t* num_admissions;
  mpk_batch_output* output;
  uint32_t new_tokens;
  uint32_t written = 0; /* entries that the host has written */

  void build(mpk_rank* of, uint32_t num_events, uint32_t ring, uint32_t tokens) {
    rank = of;
    new_tokens = tokens;
    written = 0;
    rank->num_workers = 2;
    rank->placement = MPK_STATIC;
    rank->num_graphs = 2;
    rank->stall_op = 0xFFFFFFFFu;
    rank->graphs = graphs = make<mpk_graph>(2);
    for (uint32_t g = 0; g < 2; ++g) {
      graphs[g].num_events = num_events;
      mpk_event* events = make<mpk_event>(num_events);
      events[0] = {1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0};
      events[1] = {1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0};
      events[2] = {1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0};
      for (uint32_t e = 3; e < num_events; ++e) events[e] = {1, 0, 0, MPK_EVENT_EMPTY, static_cast<uint16_t>(rank->world > 1)};
      graphs[g].events = events;
      graphs[g].counters = heap<uint64_t>(*rank) + g * 64;
      graphs[g].rows = g + 1;
      graphs[g].active = graphs[g].samples = 1;
      graphs[g].num_workers = 2;
      graphs[g].worker_first = make<uint32_t>(3);
      label(graphs[g].counters, g == 0 ? "decode's counters of rank" : "prefill's counters of rank", static_cast<int>(rank->rank));
    }
    rank->batch_config = config = make<mpk_batch_config>();
    config->max_batch = config->max_samples = config->num_requests = config->num_pages = config->pages_per_slot = 1;
    config->max_seq_len = config->page_size = 8;
    config->max_rows = 2;
    config->admission_ring = ring;
    config->generate = 1;
    config->tokens = make<int32_t>(kPrompt + kMostNewTokens);
    config->requests = requests = make<mpk_request>();
    config->admissions = admissions = make<mpk_admission>(ring);
    config->num_admissions = num_admissions = make<uint32_t>();
    mpk_batch* batch = rank->batch = make<mpk_batch>();
    batch->row_token = make<int32_t>(2);
    batch->row_active = make<int32_t>(2);
    batch->row_position = make<int32_t>(2);
    for (int32_t** one : {&batch->active_slot, &batch->active_first_row, &batch->active_num_rows, &batch->active_context, &batch->sample_row,
                          &batch->sample_active, &batch->active_num_samples, &batch->page_table, &batch->next_token})
      *one = make<int32_t>();
    rank->batch_output = output = make<mpk_batch_output>();
    output->requests = make<mpk_request_output>();
    output->tokens = make<int32_t>(kMostNewTokens);
    rank->status = make<mpk_status>(2);
    label(config, "config");
    label(config->tokens, "tokens of the table");
    label(requests, "requests");
    label(admissions, "admission ring");
    label(num_admissions, "num_admissions of rank", static_cast<int>(rank->rank));
    label(batch, "batch");
    label(batch->row_token, "rows");
    label(batch->next_token, "next_token");
    label(output, "figures");
    label(output->requests, "request's output");
    label(output->tokens, "output tokens");
  }
  void set_private() {
    rank->batch_private = make<uint8_t>(batch_state_bytes(config));
    label(rank->batch_private, "batch state of rank", static_cast<int>(rank->rank));
  }

  /* The token that is sampled at a position. */
  static int32_t token_after(int32_t token, int32_t position) { return token * 10 + position; }
  void sample() const {
    const mpk_batch* batch = rank->batch;
    for (uint32_t s = 0; s < batch->num_samples; ++s) {
      const int32_t row = batch->sample_row[s];
      batch->next_token[s] = token_after(batch->row_token[row], batch->row_position[row]);
    }
  }

  /* ---- the host ---- */
  void write_entry(uint32_t kind) {
    admissions[written & (config->admission_ring - 1)] = mpk_admission{kind, 0};
    ++written;
  }
  void write_request(int32_t number) {
    for (uint32_t i = 0; i < kPrompt; ++i) config->tokens[i] = number + static_cast<int32_t>(i);
    requests[0] = mpk_request{};
    requests[0].num_prompt_tokens = kPrompt;
    requests[0].max_new_tokens = new_tokens;
    write_entry(MPK_ADMIT);
  }
  /* Release, as the host does. */
  void count() const { platform::store<platform::Scope::kSystem>(num_admissions, written, platform::kRelease); }
  template <typename T>
  bool await(const T* word, T value) const {
    return wait_until(rank, [&] { return platform::load<platform::Scope::kSystem>(word, platform::kAcquire) == value; });
  }
  void check_result(int32_t number) const {
    MODEL_CHECK(output->requests[0].cached_tokens == 0, "%u cached tokens", output->requests[0].cached_tokens);
    int32_t token = number + 1;
    for (uint32_t i = 0; i < new_tokens; ++i) {
      token = token_after(token, static_cast<int32_t>(kPrompt - 1 + i));
      MODEL_CHECK(output->tokens[i] == token, "token %u of request %d is %d, not %d", i, number, output->tokens[i], token);
    }
  }
};

}  // namespace model
}  // namespace mpk

#endif
