/* The batch step: what happens between two iterations. Continuous batching over a fixed number of slots.
 *
 * A pure function of the state, the tokens that the last iteration sampled, and the entries that rank 0 has decided to put into
 * effect (admission.h). Each rank runs it and computes the same batch. The clock affects only the timing figures and, on rank
 * 0, the decision to end an idle kernel. One team of the rank's threads runs it, while no task of the rank runs (publication.h); only
 * its preparation may run earlier. The whole team takes part in steady_step.h only; its leader does everything else. */
#ifndef MPK_PROTOCOL_BATCH_STEP_H
#define MPK_PROTOCOL_BATCH_STEP_H

#include "steady_step.h"
#include "trace.h"
#ifdef MPK_DEBUG_CHECKS
#include "pages_check.h"
#endif

namespace mpk {

/* Takes a sampled token, and ends the request if it was the last one. */
MPK_DEVICE int take_token(const mpk_rank* rank, uint32_t slot, uint32_t sample) {
  BatchState* state = batch_state(rank);
  BatchSlot* entry = &batch_arrays(rank).slots[slot];
  const int32_t token = rank->batch->next_token[sample];
  batch_arrays(rank).pending[state->pending++] = PendingToken{entry->request, entry->generated, token, sample};
  if (entry->logprobs != 0) keep_logprobs(rank, sample, entry->logprobs);
  entry->last_token = token;
  if (int32_t* const kept = kept_token(rank->batch_config, *entry)) *kept = token;
  ++entry->generated;
  fold(state, static_cast<uint32_t>(entry->last_token));
  const uint32_t finish = finish_after(rank->batch_config, *entry, entry->generated, entry->last_token);
  return finish != MPK_RUNNING ? free_slot(rank, slot, finish) : static_cast<int>(MPK_OK);
}

/* Gives the host the results of the last batch step. It is called after the next iteration has been published, because
 * writing to host memory is slow and no task needs to wait for it. It is also called before a wait for requests. */
MPK_DEVICE void hand_out(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const BatchOutput* output = &state->output;
  const uint32_t top_k = config->top_k;
  /* The host frees table entries, and writes further admission entries. */
  const bool for_host = state->told != state->finished || state->output.entries_taken != state->next_admission;
  bool for_reader = false;
  for (uint32_t i = 0; i < state->pending; ++i) {
    const PendingToken pending = arrays.pending[i];
    const mpk_request* request = &config->requests[pending.request];
    const uint64_t place = static_cast<uint64_t>(request->first_output) + pending.number;
    for_reader = for_reader || pending.number == 0 || request->quiet == 0;
    output->tokens[place] = pending.token;
    const uint32_t logprobs = top_k == 0 ? 0 : logprobs_of(config, request);
    for (uint32_t k = 0; k < logprobs; ++k) {
      output->top_tokens[place * top_k + k] = arrays.top_tokens[static_cast<uint64_t>(pending.sample) * top_k + k];
      output->top_logprobs[place * top_k + k] = arrays.top_logprobs[static_cast<uint64_t>(pending.sample) * top_k + k];
    }
    if (logprobs != 0) output->token_logprobs[place] = arrays.token_logprobs[pending.sample];
    mpk_request_output* result = &output->requests[pending.request];
    if (pending.number == 0) result->cached_tokens = arrays.records[pending.request].cached;
    /* Release: pairs with the host's acquire, which then reads the tokens counted. */
    platform::store<platform::Scope::kSystem>(&result->num_tokens, pending.number + 1, platform::kRelease);
  }
  state->pending = 0;
  const bool ended = state->told != state->finished;
  for (; state->told != state->finished; ++state->told) {
    const EndedRequest request = arrays.ended[state->told % config->num_requests];
    /* Release: pairs with the host's acquire; the number of tokens was stored before. */
    platform::store<platform::Scope::kSystem>(&output->requests[request.request].finish, request.finish, platform::kRelease);
  }
  mpk_batch_output* figures = rank->batch_output;
  /* Relaxed: statistics for the host. They are exact for a reader that has acquired the end of the last request. */
  platform::store<platform::Scope::kSystem>(&figures->prefill_ns, output->prefill_ns, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->prefill_iterations, output->prefill_iterations, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->decode_ns, output->decode_ns, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->decode_steps, output->decode_steps, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->full_ns, output->full_ns, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->full_steps, output->full_steps, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->running, state->running, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->waiting, state->waiting, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->free_pages, pages_available(state), platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->preemptions, state->preemptions, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->prefix_queries, state->prefix_queries, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->prefix_hits, state->prefix_hits, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->evictions, state->evictions, platform::kRelaxed);
  /* Release: pairs with the host's acquire. The memory of an ended request is not written any more, and an entry that
   * was taken is not read again. */
  if (ended) platform::store<platform::Scope::kSystem>(&figures->finished, state->told, platform::kRelease);
  if (state->output.entries_taken != state->next_admission) {
    state->output.entries_taken = state->next_admission;
    platform::store<platform::Scope::kSystem>(&figures->entries_taken, state->next_admission, platform::kRelease);
  }
  if (rank->rank != 0) return; /* other hosts check by themselves while they wait for their kernel */
  /* Waking a thread takes a core from a worker. So a token wakes no thread if no thread waits for it: the host takes
   * such tokens with the next ones, or after a few milliseconds. Other tokens wake only the thread that passes them
   * on. */
  const bool told = for_reader && platform::tell(&figures->reader);
  if (for_host || (for_reader && !told)) platform::ring(&rank->control->bell);
}

/* Takes the results of the iteration that has just ended. A prefix of a slot's samples is accepted: each of them
 * confirms the draft in the row after it. */
MPK_DEVICE int collect(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  const BatchArrays arrays = batch_arrays(rank);
  uint32_t sample = 0;
  for (uint32_t a = 0; a < batch->num_active; ++a) {
    const uint32_t index = static_cast<uint32_t>(batch->active_slot[a]);
    BatchSlot* slot = &arrays.slots[index];
    const uint32_t samples = static_cast<uint32_t>(batch->active_num_samples[a]);
    uint32_t held = samples;
    if (samples > 1 && batch->accepted != nullptr) {
      const int32_t accepted = batch->accepted[a];
      if (accepted < 1 || static_cast<uint32_t>(accepted) > samples) return MPK_ABORT_KERNEL;
      held = static_cast<uint32_t>(accepted);
    }
    slot->context += slot->rows - (samples - held);
    if (slot->kept < slot->keyed) {
      const int code = keep_pages(rank, index);
      if (code != MPK_OK) return code;
    }
    const uint32_t request = slot->request;
    for (uint32_t s = 0; s < held && slot->request == request; ++s) {
      const int code = take_token(rank, index, sample + s);
      if (code != MPK_OK) return code;
    }
    sample += samples;
  }
  return sample == batch->num_samples ? MPK_OK : MPK_ABORT_KERNEL;
}

/* Gives each slot its rows: one row to each slot that generates, then the rest to prompts in the order of admission.
 * Remaining rows go to drafts. */
MPK_DEVICE void share_rows(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_graph* largest = &rank->graphs[0];
  for (uint32_t g = 1; g < rank->num_graphs; ++g) {
    if (rank->graphs[g].rows > largest->rows) largest = &rank->graphs[g];
  }
  uint32_t rows = largest->rows < config->max_rows ? largest->rows : config->max_rows;
  uint32_t active = largest->active, samples = largest->samples < config->max_samples ? largest->samples : config->max_samples, prompts = 0;
  const uint32_t all = rows;
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
    const BatchSlot entry = arrays.slots[slot];
    const bool in_prompt = entry.request != kNone && entry.context < entry.prompt;
    const bool runs = entry.request != kNone && !in_prompt && rows != 0 && active != 0 && samples != 0;
    arrays.slots[slot].rows = runs;
    prompts += in_prompt;
    if (runs) --rows, --active, --samples;
  }
  /* If other slots generate, a long prompt takes only its share of the iteration. */
  const bool limited = config->prefill_rows != 0 && rows != all && rows > config->prefill_rows;
  uint32_t left_over = limited ? rows - config->prefill_rows : 0;
  rows -= left_over;
  for (; prompts != 0 && rows != 0 && active != 0; --prompts) {
    BatchSlot* first = nullptr;
    for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
      BatchSlot* entry = &arrays.slots[slot];
      if (entry->request == kNone || entry->context >= entry->prompt || entry->rows != 0) continue;
      if (first == nullptr || entry->order < first->order) first = entry;
    }
    if (first == nullptr) break;
    const uint32_t left = first->prompt - first->context;
    if (left <= rows && samples == 0) break;
    first->rows = left < rows ? left : rows;
    if (left <= rows) --samples;
    rows -= first->rows;
    --active;
  }
  if (rank->batch->num_drafts == nullptr || prompts != 0) return; /* prompts wait for these rows, so drafts do not get them */
  rows += left_over;
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
    BatchSlot* entry = &arrays.slots[slot];
    if (entry->request == kNone || entry->context < entry->prompt || entry->rows == 0) continue;
    uint32_t drafts = static_cast<uint32_t>(rank->batch->num_drafts[slot]);
    const uint32_t wanted = entry->limit - entry->generated - 1; /* tokens after the next one */
    if (drafts > config->max_drafts) drafts = config->max_drafts;
    if (drafts > wanted) drafts = wanted;
    if (drafts > rows) drafts = rows;
    if (drafts > samples) drafts = samples;
    entry->rows += drafts;
    rows -= drafts;
    samples -= drafts;
  }
}

/* Rows of one slot in an iteration. */
struct Rows {
  uint32_t first, count, active, context;
};

/* Writes a prompt's rows. `tokens` begins with the first token that is not in the KV cache yet. Several tokens are read before the
 * first is stored, because the compiler cannot know that the arrays do not overlap. If they were read one at a time, each would take a
 * full memory latency (0.34 us on an H200). */
MPK_DEVICE void write_prompt_rows(const mpk_batch* batch, const int32_t* tokens, const Rows& rows) {
  constexpr uint32_t kAtOnce = 16;
  int32_t* const token = batch->row_token + rows.first;
  int32_t* const active = batch->row_active + rows.first;
  int32_t* const position = batch->row_position + rows.first;
  uint32_t i = 0;
  for (; i + kAtOnce <= rows.count; i += kAtOnce) {
    int32_t read[kAtOnce];
    for (uint32_t k = 0; k < kAtOnce; ++k) read[k] = tokens[i + k];
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      token[i + k] = read[k];
      active[i + k] = static_cast<int32_t>(rows.active);
      position[i + k] = static_cast<int32_t>(rows.context + i + k);
    }
  }
  for (; i < rows.count; ++i) {
    token[i] = tokens[i];
    active[i] = static_cast<int32_t>(rows.active);
    position[i] = static_cast<int32_t>(rows.context + i);
  }
}

/* Writes mpk_batch from the slots' rows. */
MPK_DEVICE void write_batch(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  mpk_batch* batch = rank->batch;
  uint64_t hash = state->hash; /* a local copy, like each slot below: otherwise it would be read again after every store */
  uint32_t row = 0, active = 0, samples = 0, prompt_rows = 0;
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
    const BatchSlot entry = arrays.slots[slot];
    if (entry.request == kNone || entry.rows == 0) continue;
    batch->active_slot[active] = static_cast<int32_t>(slot);
    batch->active_first_row[active] = static_cast<int32_t>(row);
    batch->active_num_rows[active] = static_cast<int32_t>(entry.rows);
    batch->active_context[active] = static_cast<int32_t>(entry.context);
    hash = folded(hash, (static_cast<uint64_t>(slot) << 32) | entry.request);
    hash = folded(hash, (static_cast<uint64_t>(entry.rows) << 32) | entry.context);
    const bool in_prompt = entry.context < entry.prompt;
    const uint32_t sampled = !in_prompt ? entry.rows : entry.context + entry.rows >= entry.prompt;
    if (in_prompt) {
      write_prompt_rows(batch, config->tokens + entry.first_token + entry.context, Rows{row, entry.rows, active, entry.context});
      prompt_rows += entry.rows;
    } else {
      const uint64_t first_draft = static_cast<uint64_t>(slot) * config->max_drafts;
      for (uint32_t i = 0; i < entry.rows; ++i) {
        batch->row_token[row + i] = i == 0 ? entry.last_token : batch->draft_token[first_draft + i - 1];
        batch->row_active[row + i] = static_cast<int32_t>(active);
        batch->row_position[row + i] = static_cast<int32_t>(entry.context + i);
      }
    }
    row += entry.rows;
    batch->active_num_samples[active] = static_cast<int32_t>(sampled);
    for (uint32_t i = sampled; i > 0; --i, ++samples) {
      batch->sample_row[samples] = static_cast<int32_t>(row - i);
      batch->sample_active[samples] = static_cast<int32_t>(active);
    }
    ++active;
  }
  state->hash = hash;
  batch->num_rows = row;
  batch->num_active = active;
  batch->num_samples = samples;
  batch->prompt_rows = prompt_rows;
}

/* The smallest graph that has room for the batch; rank->num_graphs if none has. */
MPK_DEVICE uint32_t choose_graph(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  uint32_t best = rank->num_graphs;
  for (uint32_t g = 0; g < rank->num_graphs; ++g) {
    const mpk_graph* graph = &rank->graphs[g];
    if (graph->rows < batch->num_rows || graph->active < batch->num_active || graph->samples < batch->num_samples) continue;
    if (best == rank->num_graphs || graph->rows < rank->graphs[best].rows) best = g;
  }
  return best;
}

/* Accounts for the time of an iteration that has ended at `now_ns`. */
MPK_DEVICE void account_time(BatchState* state, bool prefilled, bool full, uint64_t now_ns) {
  BatchOutput* so_far = &state->output;
  const uint64_t ns = now_ns - state->started_ns;
  if (prefilled) {
    so_far->prefill_ns += ns;
    ++so_far->prefill_iterations;
  } else {
    so_far->decode_ns += ns;
    ++so_far->decode_steps;
    if (full) {
      so_far->full_ns += ns;
      ++so_far->full_steps;
    }
  }
  state->started_ns = now_ns;
}
MPK_DEVICE void account_time(const mpk_rank* rank, uint64_t now_ns) {
  BatchState* state = batch_state(rank);
  const mpk_batch* batch = rank->batch;
  if (state->iteration == 0 || batch->stop) state->started_ns = now_ns; /* a launch has just begun */
  else account_time(state, batch->prompt_rows != 0, batch->num_active == rank->batch_config->max_batch, now_ns);
}

/* Applies a decision. Free slots are filled first: the order must be the same on all ranks. */
MPK_DEVICE int apply_decision(const mpk_rank* rank, uint32_t entries, mpk_status* status) {
  const int code = admit(rank);
  return code != MPK_OK ? code : apply_entries(rank, entries, status);
}

/* Waits for work after a decision that left none, and applies the decisions that follow. This wait has no deadline. */
MPK_DEVICE_COLD int compose_parked(const mpk_rank* rank, mpk_status* status, Decision* decision) {
  BatchState* state = batch_state(rank);
  hand_out(rank); /* the wait may be long */
  const Parked parked(rank);
  int code = MPK_OK;
  if (rank->rank == 0) code = await_entries(rank, status, [rank] { hand_out(rank); });
  while (code == MPK_OK) {
    code = await_decision(rank, status, true, decision);
    if (code == MPK_OK) code = apply_entries(rank, decision->entries, status);
    if (code != MPK_OK || !decision->interim()) break;
    hand_out(rank); /* the host may wait for the results */
  }
  state->started_ns = platform::clock_ns();
  return code;
}

/* Fills slots and rows for the next iteration after a decision; leaves num_rows at 0 if the kernel is to end. */
MPK_DEVICE int compose(const mpk_rank* rank, Decision decision, mpk_status* status) {
  BatchState* state = batch_state(rank);
  int code = apply_decision(rank, decision.entries, status);
  if (code == MPK_OK && !has_work(rank) && !decision.leave() && !state->stopping) {
    code = compose_parked(rank, status, &decision);
    /* All ranks now have the entries that rank 0 had when it made the decision. */
    if (code == MPK_OK && !has_work(rank) && !decision.leave() && !state->stopping) return MPK_ABORT_DIVERGED;
  }
  if (code != MPK_OK) return code;
  share_rows(rank);
  if (rank->batch_config->on_demand) code = take_pages_on_demand(rank);
  write_batch(rank);
  return code;
}

/* Takes the results of the iteration that has ended, if there was one, and fills mpk_batch for the next one. `decided` is MPK_OK, or
 * the code that says why there is no decision. */
MPK_DEVICE int change_batch(const mpk_rank* rank, int decided, const Decision& decision, mpk_status* status) {
  int code = batch_state(rank)->iteration != 0 ? collect(rank) : static_cast<int>(MPK_OK);
  if (code == MPK_OK) code = decided;
  if (code == MPK_OK) code = compose(rank, decision, status);
  if (code != MPK_OK) return code;
  mpk_batch* batch = rank->batch;
  batch->stop = batch->num_rows == 0;
  batch->graph = batch->stop ? 0 : choose_graph(rank);
  return batch->graph < rank->num_graphs ? MPK_OK : MPK_ABORT_KERNEL;
}

/* Numbers the iteration that mpk_batch describes. */
MPK_DEVICE int number_iteration(const mpk_rank* rank) {
  BatchState* state = batch_state(rank);
  mpk_batch* batch = rank->batch;
  batch->iteration = ++state->iteration;
  if (!rank->batch_config->generate) {
    batch->stop = state->iteration > rank->batch_config->fixed_iterations;
    batch->graph = 0;
  }
  fold(state, (static_cast<uint64_t>(batch->graph) << 32) | batch->iteration);
  batch->hash = state->hash;
  if (batch->stop) return MPK_OK;
  /* The begin event is triggered once per run of its graph (publish), so its counter counts the runs. Relaxed: only
   * batch steps write it, and this one comes after all others (claim_batch_step). */
  const mpk_graph* graph = &rank->graphs[batch->graph];
  const uint64_t begun = platform::load<platform::Scope::kDevice>(event_counter(graph, MPK_EVENT_BEGIN), platform::kRelaxed);
  const uint64_t epoch = begun / graph->events[MPK_EVENT_BEGIN].num_triggers + 1;
  /* All ranks end here together: iterations and epochs are part of the state. */
  if (epoch > MPK_LAST_ITERATION || batch->iteration > MPK_LAST_ITERATION) return MPK_ABORT_ITERATIONS;
  batch->epoch = static_cast<uint32_t>(epoch);
  /* Relaxed: see claim_batch_step. */
  platform::store<platform::Scope::kDevice>(&state->expected, state->expected + counted_tasks(graph), platform::kRelaxed);
  return MPK_OK;
}

/* Describes the next iteration in mpk_batch and in prepared->next; the caller publishes it, and then calls end_batch_step. `prepared` and
 * `first` come from prepare_step. All threads of the team call this, and all get the same result: MPK_OK or an abort code. `status`
 * belongs to the leader, or is NULL. The team calls `before_change()` if the step is not steady. */
template <typename Team, typename BeforeChange>
MPK_DEVICE int batch_step(const Team& team, const mpk_rank* rank, PreparedStep* prepared, const NextToken& first, uint64_t now_ns, mpk_status* status, const BeforeChange& before_change) {
  const bool leads = team.member() == 0;
  int code = MPK_OK;
  const bool steady = steady_step(team, rank, prepared, first, status, &code);
#ifdef MPK_DEBUG_CHECKS
  if (leads && steady && !pages_consistent(rank)) code = MPK_ABORT_KERNEL;
  if (steady) return team.from_leader(code);
#endif
  if (steady) return MPK_OK;
  before_change();
  if (leads) {
    const bool generates = rank->batch_config->generate != 0;
    account_time(rank, now_ns);
    if (generates) code = change_batch(rank, code, prepared->decision, status);
#ifdef MPK_DEBUG_CHECKS
    if (generates && code == MPK_OK && !pages_consistent(rank)) code = MPK_ABORT_KERNEL;
#endif
    if (code == MPK_OK) code = number_iteration(rank);
    if (code == MPK_OK) prepared->next = next_iteration_of(rank);
  }
  return team.from_leader(code);
}

/* The leader, after the publication: what no task waits for. A step that was not steady has done it before. */
MPK_DEVICE void end_batch_step(const mpk_rank* rank, const PreparedStep& prepared, uint64_t now_ns) {
  if (prepared.steady) account_time(batch_state(rank), prepared.prefilled, prepared.full, now_ns);
}

/* Sets up the state before the first batch step of the first launch; later launches continue with it. Returns
 * MPK_ABORT_KERNEL if the rank's description contradicts itself. */
MPK_DEVICE int batch_begin(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  if (rank->num_graphs == 0) return MPK_ABORT_KERNEL;
  for (uint32_t g = 0; g < rank->num_graphs; ++g) {
    const mpk_graph* graph = &rank->graphs[g];
    if (graph->num_events <= MPK_EVENT_END || graph->events[MPK_EVENT_BEGIN].num_triggers == 0 || graph->events[MPK_EVENT_BEGIN].remote_triggers ||
        graph->events[MPK_EVENT_END].num_triggers == 0 || (graph->placement != rank->placement && !(platform::kMixedPlacement && rank->placement == MPK_MIXED)) ||
        graph->events[MPK_EVENT_END].event_type != MPK_EVENT_END_OF_TASK_GRAPH ||
        (graph->placement == MPK_STATIC && graph->num_workers > rank->num_workers)) {
      return MPK_ABORT_KERNEL;
    }
    if (config->generate && (graph->rows == 0 || graph->active == 0 || graph->samples == 0)) return MPK_ABORT_KERNEL;
  }
  state->expected = platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kRelaxed);
  if (state->begun) return MPK_OK;
  state->begun = 1;
  const mpk_batch_output* given = rank->batch_output;
  state->output = {given->requests,   given->tokens,            given->top_tokens,   given->top_logprobs, given->token_logprobs, given->prefill_ns,  given->decode_ns,
                   given->prefill_iterations, given->decode_steps, given->full_ns, given->full_steps, given->entries_taken};
  if (!config->generate) return MPK_OK;
  if (config->page_size == 0 || config->max_batch == 0 || config->max_rows == 0 || config->max_samples < config->max_batch ||
      config->admission_ring == 0 || (config->admission_ring & (config->admission_ring - 1)) != 0 || config->num_requests == 0) {
    return MPK_ABORT_KERNEL;
  }
  const BatchArrays arrays = batch_arrays(rank);
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) arrays.slots[slot].request = kNone;
  pages_begin(rank);
  return MPK_OK;
}

/* True for the one thread that is to run the batch step after iteration `ended`: all its tasks are done, the host has
 * received the results of the step before, and no other thread has claimed it. The caller has found the iteration's end
 * event ready. */
MPK_DEVICE bool claim_batch_step(const mpk_rank* rank, uint32_t ended) {
  BatchState* state = batch_state(rank);
  /* Relaxed: a thread that reads the value of a later iteration here fails to claim below. */
  const uint64_t expected = platform::load<platform::Scope::kDevice>(&state->expected, platform::kRelaxed);
  /* Acquire: pairs with the release of each count_progress; the tasks are done and their work is visible. */
  if (platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kAcquire) < expected) return false;
  uint32_t open = platform::load<platform::Scope::kDevice>(&state->open, platform::kRelaxed);
  /* Acquire: pairs with the release in next_iteration; hand_out has read what this thread is about to change. */
  return open == ended && platform::compare_exchange<platform::Scope::kDevice>(&state->open, &open, 0u, platform::kAcquire);
}

/* The current iteration has ended, and the team's leader has claimed its end. Computes the next batch and publishes it, then hands
 * out the results of the iteration that ended. The leader calls `published()` between the two. All threads of the team call this, and
 * all get the same result. `before_change`: see batch_step. */
template <typename Team, typename Published, typename BeforeChange>
MPK_DEVICE int next_iteration(const Team& team, const mpk_rank* rank, PreparedStep* prepared, const NextToken& first, mpk_status* status, const Published& published, const BeforeChange& before_change) {
  const uint64_t began_ns = platform::clock_ns();
  const int code = batch_step(team, rank, prepared, first, began_ns, status, before_change);
  if (team.member() != 0) return code;
  if (code == MPK_OK) publish(rank, prepared->next);
  else abort_broadcast(rank, static_cast<uint32_t>(code));
  published();
  const uint64_t published_ns = trace_clock(rank);
  const bool runs = code == MPK_OK && (prepared->next.graph & MPK_LAUNCH_STOP) == 0;
  /* This comes before anything slow: the other ranks need it at the end of this iteration. */
  if (runs && rank->batch_config->generate && !decide(rank)) abort_broadcast(rank, MPK_ABORT_PEER);
  end_batch_step(rank, *prepared, began_ns);
  hand_out(rank);
  if (is_traced(rank) && runs) trace_batch_step(rank, began_ns, published_ns);
  /* Release: pairs with claim_batch_step. This thread owns the state until then, even while tasks run. */
  BatchState* state = batch_state(rank);
  if (code == MPK_OK) platform::store<platform::Scope::kDevice>(&state->open, state->iteration, platform::kRelease);
  return code;
}
/* For a thread that has claimed the end alone: both parts of the step. */
MPK_DEVICE int next_iteration(const mpk_rank* rank, PreparedStep* prepared, mpk_status* status) {
  const NextToken first = prepare_step(platform::OneThread(), rank, prepared);
  return next_iteration(platform::OneThread(), rank, prepared, first, status, [] {}, [] {});
}
MPK_DEVICE int next_iteration(const mpk_rank* rank, mpk_status* status) {
  PreparedStep prepared = {};
  return next_iteration(rank, &prepared, status);
}

}  // namespace mpk

#endif
