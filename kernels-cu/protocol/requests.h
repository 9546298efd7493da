/* The life of a request: it waits, gets a slot and pages, may lose them to older requests, and ends. */
#ifndef MPK_PROTOCOL_REQUESTS_H
#define MPK_PROTOCOL_REQUESTS_H

#include "pages.h"

namespace mpk {

/* Number of log-probabilities that are computed for each new token of a request. */
MPK_DEVICE uint32_t logprobs_of(const mpk_batch_config* config, const mpk_request* request) {
  const uint32_t wanted = request->sampling.logprobs;
  return wanted < config->top_k ? wanted : config->top_k;
}

/* Ends a request; hand_out tells the host. */
MPK_DEVICE void finish_request(const mpk_rank* rank, uint32_t request, uint32_t finish) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  arrays.records[request].state = kFinished;
  arrays.ended[state->finished % rank->batch_config->num_requests] = EndedRequest{request, finish};
  ++state->finished;
  fold(state, (static_cast<uint64_t>(finish) << 32) | request);
}

MPK_DEVICE int free_slot(const mpk_rank* rank, uint32_t slot, uint32_t finish) {
  BatchSlot* entry = &batch_arrays(rank).slots[slot];
  const uint32_t request = entry->request;
  const int code = pages_release(rank, slot);
  entry->request = kNone;
  --batch_state(rank)->running;
  finish_request(rank, request, finish);
  return code;
}

MPK_DEVICE uint32_t waiting_place(const mpk_rank* rank, uint32_t index) {
  const uint64_t place = static_cast<uint64_t>(batch_state(rank)->waiting_head) + index;
  const uint32_t places = rank->batch_config->num_requests;
  return static_cast<uint32_t>(place < places ? place : place - places);
}

MPK_DEVICE void leave_waiting(const mpk_rank* rank) {
  BatchState* state = batch_state(rank);
  state->waiting_head = waiting_place(rank, 1);
  --state->waiting;
}

/* Removes a request from the middle of the waiting requests. */
MPK_DEVICE void stop_waiting(const mpk_rank* rank, uint32_t request) {
  BatchState* state = batch_state(rank);
  uint32_t* waiting = batch_arrays(rank).waiting;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < state->waiting; ++i) {
    const uint32_t other = waiting[waiting_place(rank, i)];
    if (other != request) waiting[waiting_place(rank, kept++)] = other;
  }
  state->waiting = kept;
  ++state->changes; /* a different request may now be first */
}

MPK_DEVICE int cancel(const mpk_rank* rank, uint32_t request) {
  const BatchArrays arrays = batch_arrays(rank);
  if (arrays.records[request].state == kWaiting) {
    stop_waiting(rank, request);
    finish_request(rank, request, MPK_FINISH_CANCELLED);
  } else if (arrays.records[request].state == kInSlot) {
    for (uint32_t slot = 0; slot < rank->batch_config->max_batch; ++slot) {
      if (arrays.slots[slot].request == request) return free_slot(rank, slot, MPK_FINISH_CANCELLED);
    }
  }
  return MPK_OK;
}

/* Applies one entry of the admission ring. Returns MPK_ABORT_KERNEL if it contradicts earlier entries. */
MPK_DEVICE int apply_entry(const mpk_rank* rank, const mpk_admission& entry) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  fold(state, (static_cast<uint64_t>(entry.kind) << 32) | entry.request);
  if (entry.kind == MPK_STOP) {
    state->stopping = 1;
    return MPK_OK;
  }
  if (entry.request >= rank->batch_config->num_requests) return MPK_ABORT_KERNEL;
  if (entry.kind == MPK_CANCEL) return cancel(rank, entry.request);
  const uint32_t known = arrays.records[entry.request].state;
  if (entry.kind != MPK_ADMIT || known == kWaiting || known == kInSlot) return MPK_ABORT_KERNEL;
  state->stopping = 0;
  arrays.records[entry.request] = RequestRecord{kWaiting, 0, kNone, 0};
  arrays.waiting[waiting_place(rank, state->waiting++)] = entry.request;
  return MPK_OK;
}

/* Moves waiting requests into free slots, in order. The first one that finds no slot or too few pages holds
 * up the rest, so no request is overtaken forever. */
MPK_DEVICE int admit(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  while (state->waiting != 0) {
    if (state->held_up == state->changes + 1) return MPK_OK; /* nothing has changed for the first one */
    const uint32_t request = arrays.waiting[state->waiting_head];
    const RequestRecord record = arrays.records[request];
    const mpk_request* wanted = &config->requests[request];
    const uint32_t prompt = wanted->num_prompt_tokens;
    const uint32_t room = prompt < config->max_seq_len ? config->max_seq_len - prompt : 0;
    const uint32_t limit = wanted->max_new_tokens < room ? wanted->max_new_tokens : room;
    const uint32_t most = pages_for(config, static_cast<uint64_t>(prompt) + limit);
    if (prompt == 0 || limit == 0 || most > config->num_pages || most > config->pages_per_slot) {
      /* This request can never run. The host refuses such a request before it gets here. */
      leave_waiting(rank);
      finish_request(rank, request, MPK_FINISH_LENGTH);
      continue;
    }
    uint32_t slot = 0;
    while (slot < config->max_batch && arrays.slots[slot].request != kNone) ++slot;
    if (slot == config->max_batch) {
      state->held_up = state->changes + 1; /* a slot becomes free together with its pages */
      return MPK_OK;
    }
    /* On demand: the pages that the next token needs, and one spare page for each running request, so that they do
     * not take these pages back at once. */
    const uint32_t known = prompt + record.generated;
    const uint32_t pages = config->on_demand ? pages_for(config, static_cast<uint64_t>(known) + 1) : most;
    const uint32_t spare = config->on_demand ? state->running : 0;
    const uint32_t keyed = config->num_page_keys != 0 ? prompt / config->page_size : 0;
    /* The last token is always computed, because the next one is sampled after it. Penalties need the counts of all tokens, and
     * token_counts counts only tokens that are computed. */
    const bool looks = keyed != 0 && (wanted->sampling.flags & MPK_SAMPLING_PENALTIES) == 0;
    const uint32_t useful = (known - 1) / config->page_size;
    CachedPrefix found = {0, 0};
    if (looks) found = find_prefix(rank, slot, wanted->first_token, keyed < useful ? keyed : useful);
    if (static_cast<uint64_t>(pages - found.pages) + found.unused + spare > pages_available(state)) {
      forget_prefix(rank, slot, found.pages);
      state->held_up = state->changes + 1;
      return MPK_OK;
    }
    leave_waiting(rank);
    const uint32_t cached = found.pages * config->page_size;
    if (record.order == kNone) {
      arrays.records[request].order = state->admitted++;
      arrays.records[request].cached = cached;
      if (looks) state->prefix_queries += prompt;
      state->prefix_hits += cached;
    }
    arrays.records[request].state = kInSlot;
    BatchSlot entry{};
    entry.request = request;
    entry.order = arrays.records[request].order;
    entry.context = cached;
    entry.prompt = known;
    entry.generated = record.generated;
    entry.limit = limit;
    entry.keyed = keyed;
    entry.first_token = wanted->first_token;
    entry.min_new_tokens = wanted->min_new_tokens;
    entry.logprobs = logprobs_of(config, wanted);
    arrays.slots[slot] = entry;
    if (rank->batch->sampling != nullptr) rank->batch->sampling[slot] = wanted->sampling;
    ++state->running;
    fold(state, (static_cast<uint64_t>(slot) << 32) | request);
    if (found.pages != 0) share_prefix(rank, slot, found.pages);
    const int code = pages_take(rank, slot, pages - found.pages);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

/* Takes pages and slot from a request, which waits again, ahead of all others. Its cache is computed again. */
MPK_DEVICE int preempt(const mpk_rank* rank, uint32_t slot) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  BatchSlot* entry = &arrays.slots[slot];
  RequestRecord* record = &arrays.records[entry->request];
  record->state = kWaiting;
  record->generated = entry->generated;
  state->waiting_head = state->waiting_head == 0 ? rank->batch_config->num_requests - 1 : state->waiting_head - 1;
  arrays.waiting[state->waiting_head] = entry->request;
  ++state->waiting;
  ++state->preemptions;
  --state->running;
  fold(state, (uint64_t{1} << 63) | entry->request);
  entry->request = kNone;
  entry->rows = 0;
  return pages_release(rank, slot);
}

/* On demand: takes pages for the rows of the iteration, for the oldest request first. If none is left, the youngest request
 * gives up its pages. The oldest always makes progress, because it has room when it is alone (admit), so every request gets
 * its turn. */
MPK_DEVICE_COLD int take_pages_on_demand(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  uint32_t after = 0; /* requests with a lower order have all their pages */
  for (;;) {
    uint32_t oldest = kNone, youngest = kNone;
    for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
      if (arrays.slots[slot].request == kNone) continue;
      const uint32_t order = arrays.slots[slot].order;
      if (order >= after && (oldest == kNone || order < arrays.slots[oldest].order)) oldest = slot;
      if (youngest == kNone || order > arrays.slots[youngest].order) youngest = slot;
    }
    if (oldest == kNone) return MPK_OK;
    const BatchSlot* entry = &arrays.slots[oldest];
    const uint32_t needed = pages_for(config, static_cast<uint64_t>(entry->context) + entry->rows);
    const uint32_t missing = needed > entry->pages ? needed - entry->pages : 0;
    if (missing > pages_available(state)) {
      const int code = preempt(rank, youngest);
      if (code != MPK_OK) return code;
      continue;
    }
    if (missing != 0) {
      const int code = pages_take(rank, oldest, missing);
      if (code != MPK_OK) return code;
    }
    after = entry->order + 1;
  }
}

}  // namespace mpk

#endif
