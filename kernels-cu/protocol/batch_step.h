/* The batch step: what happens between two iterations. Continuous batching over a fixed number of slots.
 *
 * A pure function of the state, the tokens that the last iteration sampled and the admission log: all ranks run
 * it for themselves and come to the same batch. The clock goes into the timing figures only. Runs on one thread
 * of the rank while no task of the rank runs (see publication.h). */
#ifndef MPK_PROTOCOL_BATCH_STEP_H
#define MPK_PROTOCOL_BATCH_STEP_H

#include "batch_state.h"
#include "publication.h"

namespace mpk {

/* Ends a request; hand_out tells the host. */
MPK_DEVICE void finish_request(const mpk_rank* rank, uint32_t request, uint32_t finish) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  arrays.states[request] = kFinished;
  arrays.ended[state->finished] = request;
  arrays.finishes[state->finished] = finish;
  ++state->finished;
  fold(state, (static_cast<uint64_t>(finish) << 32) | request);
}

MPK_DEVICE int free_slot(const mpk_rank* rank, uint32_t slot, uint32_t finish) {
  BatchSlot* entry = &batch_arrays(rank).slots[slot];
  const uint32_t request = entry->request;
  const int code = pages_release(rank, slot);
  entry->request = kNone;
  finish_request(rank, request, finish);
  return code;
}

/* Keeps a sampled token for the host and ends the request if it was the last. What the next iteration's tasks overwrite is
 * copied: they run while the host gets it. */
MPK_DEVICE int take_token(const mpk_rank* rank, uint32_t slot, uint32_t sample) {
  const mpk_batch_config* config = rank->batch_config;
  const mpk_batch* batch = rank->batch;
  const BatchArrays arrays = batch_arrays(rank);
  BatchSlot* entry = &arrays.slots[slot];
  const int32_t token = batch->next_token[sample];
  arrays.pending[sample] = PendingToken{entry->request, entry->generated, token};
  for (uint64_t k = static_cast<uint64_t>(sample) * config->top_k, end = k + config->top_k; k < end; ++k) {
    arrays.top_tokens[k] = batch->top_token[k];
    arrays.top_logprobs[k] = batch->top_logprob[k];
  }
  entry->last_token = token;
  ++entry->generated;
  fold(batch_state(rank), static_cast<uint32_t>(token));
  for (uint32_t i = 0; i < config->num_eos; ++i) {
    if (config->eos[i] == token) return free_slot(rank, slot, MPK_FINISH_EOS);
  }
  if (entry->generated >= entry->limit) return free_slot(rank, slot, MPK_FINISH_LENGTH);
  return MPK_OK;
}

/* Gives the host what the last batch step found: after the next iteration has been published, since memory of the host is
 * slow to write and no task waits for it; or before a wait for requests. */
MPK_DEVICE void hand_out(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_batch_output* output = &state->output;
  const uint32_t top_k = config->top_k;
  for (uint32_t i = 0; i < state->pending; ++i) {
    const PendingToken pending = arrays.pending[i];
    const uint64_t place = static_cast<uint64_t>(config->requests[pending.request].first_output) + pending.number;
    output->tokens[place] = pending.token;
    for (uint32_t k = 0; k < top_k; ++k) {
      output->top_tokens[place * top_k + k] = arrays.top_tokens[static_cast<uint64_t>(i) * top_k + k];
      output->top_logprobs[place * top_k + k] = arrays.top_logprobs[static_cast<uint64_t>(i) * top_k + k];
    }
    /* Release: pairs with the host's acquire, which then reads the tokens below it. */
    platform::store<platform::Scope::kSystem>(&output->requests[pending.request].num_tokens, pending.number + 1, platform::kRelease);
  }
  state->pending = 0;
  for (; state->told < state->finished; ++state->told) {
    /* Release: pairs with the host's acquire; the number of tokens was stored before. */
    platform::store<platform::Scope::kSystem>(&output->requests[arrays.ended[state->told]].finish, arrays.finishes[state->told], platform::kRelease);
  }
  /* Relaxed: figures for the host, exact once the run has ended. */
  mpk_batch_output* figures = rank->batch_output;
  platform::store<platform::Scope::kSystem>(&figures->prefill_ns, output->prefill_ns, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->prefill_iterations, output->prefill_iterations, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->decode_ns, output->decode_ns, platform::kRelaxed);
  platform::store<platform::Scope::kSystem>(&figures->decode_steps, output->decode_steps, platform::kRelaxed);
}

/* Takes over what the iteration that has just ended did. */
MPK_DEVICE int collect(const mpk_rank* rank) {
  const mpk_batch* batch = rank->batch;
  const BatchArrays arrays = batch_arrays(rank);
  for (uint32_t a = 0; a < batch->num_active; ++a) {
    BatchSlot* slot = &arrays.slots[batch->active_slot[a]];
    slot->context += slot->rows;
  }
  for (uint32_t s = 0; s < batch->num_samples; ++s) {
    const int code = take_token(rank, static_cast<uint32_t>(batch->active_slot[batch->sample_active[s]]), s);
    if (code != MPK_OK) return code;
    batch_state(rank)->pending = s + 1;
  }
  return MPK_OK;
}

/* Applies those of the admission log's first `entries` that take effect in iteration `iteration` or before. */
MPK_DEVICE int read_admission_log(const mpk_rank* rank, uint32_t iteration, uint32_t entries) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  for (; state->next_admission < entries; ++state->next_admission) {
    const mpk_admission* admission = &config->admissions[state->next_admission];
    if (admission->iteration > iteration) break;
    const uint32_t request = admission->request;
    if (request >= config->num_requests) return MPK_ABORT_KERNEL;
    fold(state, (static_cast<uint64_t>(admission->kind) << 32) | request);
    if (admission->kind == MPK_ADMIT) {
      if (arrays.states[request] != kUnknown) continue; /* cancelled before it came, or named twice */
      arrays.states[request] = kWaiting;
      arrays.waiting[state->waiting_tail++] = request;
    } else if (arrays.states[request] == kInSlot) {
      for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
        if (arrays.slots[slot].request != request) continue;
        const int code = free_slot(rank, slot, MPK_FINISH_CANCELLED);
        if (code != MPK_OK) return code;
        break;
      }
    } else if (arrays.states[request] != kFinished) {
      finish_request(rank, request, MPK_FINISH_CANCELLED); /* its place in the waiting list is skipped */
    }
  }
  return MPK_OK;
}

/* Moves waiting requests into free slots, in order: the first that finds no slot or no pages holds up the rest,
 * so that none is overtaken for ever. */
MPK_DEVICE int admit(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  while (state->waiting_head < state->waiting_tail) {
    const uint32_t request = arrays.waiting[state->waiting_head];
    if (arrays.states[request] != kWaiting) {
      ++state->waiting_head;
      continue;
    }
    const mpk_request* wanted = &config->requests[request];
    const uint32_t prompt = wanted->num_prompt_tokens;
    const uint32_t room = prompt < config->max_seq_len ? config->max_seq_len - prompt : 0;
    const uint32_t limit = wanted->max_new_tokens < room ? wanted->max_new_tokens : room;
    const uint32_t pages = static_cast<uint32_t>((static_cast<uint64_t>(prompt) + limit + config->page_size - 1) / config->page_size);
    if (prompt == 0 || limit == 0 || pages > config->num_pages || pages > config->pages_per_slot) {
      /* Nothing can come of it, now or later. The host refuses such a request before the launch. */
      ++state->waiting_head;
      finish_request(rank, request, MPK_FINISH_LENGTH);
      continue;
    }
    uint32_t slot = 0;
    while (slot < config->max_batch && arrays.slots[slot].request != kNone) ++slot;
    if (slot == config->max_batch || pages > state->free_pages) return MPK_OK;
    ++state->waiting_head;
    arrays.states[request] = kInSlot;
    arrays.slots[slot] = BatchSlot{request, state->admitted++, 0, prompt, 0, limit, 0, 0, 0};
    if (rank->batch->sampling != nullptr) rank->batch->sampling[slot] = wanted->sampling;
    fold(state, (static_cast<uint64_t>(slot) << 32) | request);
    const int code = pages_take(rank, slot, pages);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

/* Gives each slot its rows: one to each slot that generates, the rest to prompts in the order of admission. */
MPK_DEVICE void share_rows(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_graph* largest = &rank->graphs[0];
  for (uint32_t g = 1; g < rank->num_graphs; ++g) {
    if (rank->graphs[g].rows > largest->rows) largest = &rank->graphs[g];
  }
  uint32_t rows = largest->rows < config->max_rows ? largest->rows : config->max_rows;
  uint32_t active = largest->active, samples = largest->samples, prompts = 0;
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
    const BatchSlot entry = arrays.slots[slot];
    const bool in_prompt = entry.request != kNone && entry.context < entry.prompt;
    const bool runs = entry.request != kNone && !in_prompt && rows != 0 && active != 0 && samples != 0;
    arrays.slots[slot].rows = runs;
    prompts += in_prompt;
    if (runs) --rows, --active, --samples;
  }
  for (; prompts != 0 && rows != 0 && active != 0; --prompts) {
    BatchSlot* first = nullptr;
    for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
      BatchSlot* entry = &arrays.slots[slot];
      if (entry->request == kNone || entry->context >= entry->prompt || entry->rows != 0) continue;
      if (first == nullptr || entry->order < first->order) first = entry;
    }
    if (first == nullptr) return;
    const uint32_t left = first->prompt - first->context;
    if (left <= rows && samples == 0) return;
    first->rows = left < rows ? left : rows;
    if (left <= rows) --samples;
    rows -= first->rows;
    --active;
  }
}

/* Writes mpk_batch from the slots' rows. */
MPK_DEVICE void write_batch(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  mpk_batch* batch = rank->batch;
  uint64_t hash = state->hash; /* not read again after every store; nor is a slot */
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
    const int32_t* prompt = in_prompt ? config->prompt_tokens + config->requests[entry.request].first_prompt_token : nullptr;
    for (uint32_t i = 0; i < entry.rows; ++i, ++row) {
      const uint32_t position = entry.context + i;
      batch->row_token[row] = in_prompt ? prompt[position] : entry.last_token;
      batch->row_active[row] = static_cast<int32_t>(active);
      batch->row_position[row] = static_cast<int32_t>(position);
    }
    if (in_prompt) prompt_rows += entry.rows;
    if (entry.context + entry.rows >= entry.prompt) {
      batch->sample_row[samples] = static_cast<int32_t>(row - 1);
      batch->sample_active[samples] = static_cast<int32_t>(active);
      ++samples;
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

MPK_DEVICE void account_time(const mpk_rank* rank, uint64_t now_ns) {
  BatchState* state = batch_state(rank);
  mpk_batch_output* so_far = &state->output;
  if (state->iteration != 0) {
    const uint64_t ns = now_ns - state->started_ns;
    if (rank->batch->prompt_rows != 0) {
      so_far->prefill_ns += ns;
      ++so_far->prefill_iterations;
    } else {
      so_far->decode_ns += ns;
      ++so_far->decode_steps;
    }
  }
  state->started_ns = now_ns;
}

/* Fills slots and rows for the next iteration; leaves num_rows 0 when all requests are finished. */
MPK_DEVICE int compose(const mpk_rank* rank, mpk_status* status) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  Wait wait(rank, status);
  for (;;) {
    /* Once a turn: an entry that came between two looks could be of an iteration that is over. Acquire: pairs with the
     * release of rank 0 that made the log longer. */
    const uint32_t entries = platform::load<platform::Scope::kSystem>(config->num_admissions, platform::kAcquire);
    int code = read_admission_log(rank, state->iteration, entries);
    if (code == MPK_OK) code = admit(rank);
    if (code != MPK_OK) return code;
    share_rows(rank);
    write_batch(rank);
    if (rank->batch->num_rows != 0 || state->finished == config->num_requests) return MPK_OK;
    /* Nothing to run now, but requests to come. The log's next entry decides the next iteration's number: a later one, since
     * all up to this one have been applied. */
    if (state->next_admission < entries) {
      state->iteration = config->admissions[state->next_admission].iteration;
      continue;
    }
    hand_out(rank); /* the wait may be long */
    code = wait.poll(entries);
    if (code != MPK_OK) return code;
  }
}

/* Tasks that an iteration of this graph counts in mpk_control.progress: those of the lists, or all that events
 * launch (every one but terminate and begin). */
MPK_DEVICE uint64_t counted_tasks(const mpk_graph* graph) {
  if (graph->placement == MPK_STATIC) return graph->worker_first[graph->num_workers];
  return graph->num_tasks > 2 ? graph->num_tasks - 2 : 0;
}

/* Prepares the next iteration in mpk_batch; the caller publishes it. `status` is the caller's, or NULL. Returns
 * MPK_OK or an abort code. */
MPK_DEVICE int batch_step(const mpk_rank* rank, uint64_t now_ns, mpk_status* status) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  mpk_batch* batch = rank->batch;
  account_time(rank, now_ns);
  if (config->generate) {
    if (state->iteration != 0) {
      const int code = collect(rank);
      if (code != MPK_OK) return code;
    }
    ++state->iteration;
    const int code = compose(rank, status);
    if (code != MPK_OK) return code;
#ifdef MPK_DEBUG_CHECKS
    if (!pages_consistent(rank)) return MPK_ABORT_KERNEL;
#endif
    batch->stop = batch->num_rows == 0;
    batch->graph = batch->stop ? 0 : choose_graph(rank);
    if (batch->graph >= rank->num_graphs) return MPK_ABORT_KERNEL;
  } else {
    ++state->iteration;
    batch->stop = state->iteration > config->fixed_iterations;
    batch->graph = 0;
  }
  batch->iteration = state->iteration;
  fold(state, (static_cast<uint64_t>(batch->graph) << 32) | batch->iteration);
  batch->hash = state->hash;
  if (!batch->stop) {
    /* The begin event is triggered once for each run of its graph (publish), so its counter counts them. */
    const mpk_graph* graph = &rank->graphs[batch->graph];
    const uint64_t epoch = event_count(graph, MPK_EVENT_BEGIN) / graph->events[MPK_EVENT_BEGIN].num_triggers + 1;
    /* All ranks come to the same end: iterations and epochs are part of the state. */
    if (epoch > MPK_LAST_ITERATION || batch->iteration > MPK_LAST_ITERATION) return MPK_ABORT_ITERATIONS;
    batch->epoch = static_cast<uint32_t>(epoch);
    /* Relaxed: see claim_batch_step. */
    platform::store<platform::Scope::kDevice>(&state->expected, state->expected + counted_tasks(graph), platform::kRelaxed);
  }
  return MPK_OK;
}

/* Sets the state up; before the first batch step. MPK_ABORT_KERNEL if the rank's description contradicts itself. */
MPK_DEVICE int batch_begin(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  if (rank->num_graphs == 0) return MPK_ABORT_KERNEL;
  for (uint32_t g = 0; g < rank->num_graphs; ++g) {
    const mpk_graph* graph = &rank->graphs[g];
    if (graph->num_events <= MPK_EVENT_END || graph->events[MPK_EVENT_BEGIN].num_triggers == 0 ||
        graph->events[MPK_EVENT_END].num_triggers == 0 || graph->placement != rank->placement ||
        graph->events[MPK_EVENT_END].event_type != MPK_EVENT_END_OF_TASK_GRAPH ||
        (graph->placement == MPK_STATIC && graph->num_workers > rank->num_workers)) {
      return MPK_ABORT_KERNEL;
    }
    if (config->generate && (graph->rows == 0 || graph->active == 0 || graph->samples == 0)) return MPK_ABORT_KERNEL;
  }
  state->expected = platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kRelaxed);
  state->output = *rank->batch_output;
  if (!config->generate) return MPK_OK;
  if (config->page_size == 0 || config->max_batch == 0 || config->max_rows == 0) return MPK_ABORT_KERNEL;
  const BatchArrays arrays = batch_arrays(rank);
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) arrays.slots[slot].request = kNone;
  /* The lowest page lies on top of the stack. */
  for (uint32_t page = 0; page < config->num_pages; ++page) {
    arrays.free_list[page] = config->num_pages - 1 - page;
    arrays.page_owner[page] = kNone;
  }
  state->free_pages = config->num_pages;
  return MPK_OK;
}

/* True for the one thread that is to run the batch step after iteration `ended`: all its tasks are done, the host has got the
 * results of the step before, and nobody else has claimed that. The caller has found the iteration's end event ready. */
MPK_DEVICE bool claim_batch_step(const mpk_rank* rank, uint32_t ended) {
  BatchState* state = batch_state(rank);
  /* Relaxed: who finds the number of a later iteration here fails to claim below. */
  const uint64_t expected = platform::load<platform::Scope::kDevice>(&state->expected, platform::kRelaxed);
  /* Acquire: pairs with the release of each count_progress; the tasks are over and their work is visible. */
  if (platform::load<platform::Scope::kDevice>(&rank->control->progress, platform::kAcquire) < expected) return false;
  uint32_t open = platform::load<platform::Scope::kDevice>(&state->open, platform::kRelaxed);
  /* Acquire: pairs with the release in next_iteration; hand_out has read what this thread is about to change. */
  return open == ended && platform::compare_exchange<platform::Scope::kDevice>(&state->open, &open, 0u, platform::kAcquire);
}

/* The current iteration has ended and the caller has claimed that: next batch, published; then the results of the one that has
 * ended. */
MPK_DEVICE int next_iteration(const mpk_rank* rank, mpk_status* status) {
  const int code = batch_step(rank, platform::clock_ns(), status);
  if (code == MPK_OK) publish(rank);
  else abort_broadcast(rank, static_cast<uint32_t>(code));
  hand_out(rank);
  /* Release: pairs with claim_batch_step. The state is this thread's until then, whatever the tasks have done meanwhile. */
  BatchState* state = batch_state(rank);
  if (code == MPK_OK) platform::store<platform::Scope::kDevice>(&state->open, state->iteration, platform::kRelease);
  return code;
}

}  // namespace mpk

#endif
