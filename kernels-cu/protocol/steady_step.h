/* The batch step of a *steady* iteration, which changes only positions: every request in a slot has one more token, and
 * no request joins, ends, needs a page or has drafts. Decoding consists of such iterations.
 *
 * Two parts. Everything but the tokens is known while the iteration runs: which slots go on, their positions, the numbers of the next
 * iteration, and soon rank 0's decision. `prepare_step` puts it into variables. After the iteration's end `steady_step` only has to
 * read the tokens and to write the next batch. On a GPU, in static placement, the first part runs while the tasks run: each load that
 * depends on another one costs a round trip to the L2 cache, and nothing runs between two iterations. Where a thread claims the
 * step at the end, both parts run one after the other. While the tasks run, the first part writes nothing but the number of the
 * decision, in the batch step's own memory, and reads nothing that the tasks write.
 *
 * A team of threads takes the slots side by side: on a GPU, a single thread needs more than a microsecond per slot, because each of
 * its loads waits for memory. Each member prepares its first slot. Further slots are read at the end.
 *
 * The result is the batch that collect, compose and choose_graph would give. Only the hash of the state is computed in
 * another way, so that no slot waits for the slot before it. All ranks take this path together, because the choice
 * depends only on state that is the same on all ranks. */
#ifndef MPK_PROTOCOL_STEADY_STEP_H
#define MPK_PROTOCOL_STEADY_STEP_H

#include <math.h>

#include "admission.h"
#include "publication.h"

namespace mpk {

/* What becomes of a request with its `generated`-th token: MPK_RUNNING or a finish. */
MPK_DEVICE uint32_t finish_after(const mpk_batch_config* config, const BatchSlot& slot, uint32_t generated, int32_t token) {
  if (generated > slot.min_new_tokens) {
    for (uint32_t i = 0; i < config->num_eos; ++i) {
      if (config->eos[i] == token) return MPK_FINISH_EOS;
    }
  }
  return generated >= slot.limit ? MPK_FINISH_LENGTH : MPK_RUNNING;
}

/* Log-probability of the token of `sample`. NaN if no graph computes it and the token is not among the `wanted` highest. */
MPK_DEVICE float token_logprob(const mpk_batch_config* config, const mpk_batch* batch, uint32_t sample, uint32_t wanted) {
  if (batch->token_logprob != nullptr) return batch->token_logprob[sample];
  const int32_t token = batch->next_token[sample];
  for (uint64_t k = static_cast<uint64_t>(sample) * config->top_k, end = k + wanted; k < end; ++k) {
    if (batch->top_token[k] == token) return batch->top_logprob[k];
  }
  return NAN;
}

/* Copies the log-probabilities of a sample for the host, because the next iteration's tasks overwrite them while the host receives
 * them. */
MPK_DEVICE_COLD void keep_logprobs(const mpk_rank* rank, uint32_t sample, uint32_t wanted) {
  const mpk_batch_config* config = rank->batch_config;
  const mpk_batch* batch = rank->batch;
  const BatchArrays arrays = batch_arrays(rank);
  for (uint64_t k = static_cast<uint64_t>(sample) * config->top_k, end = k + wanted; k < end; ++k) {
    arrays.top_tokens[k] = batch->top_token[k];
    arrays.top_logprobs[k] = batch->top_logprob[k];
  }
  arrays.token_logprobs[sample] = token_logprob(config, batch, sample, wanted);
}

/* Where to store the request's next token, so that its cache can be recomputed after a preemption. NULL if pages are reserved. */
MPK_DEVICE int32_t* kept_token(const mpk_batch_config* config, const BatchSlot& slot) {
  if (!config->on_demand) return nullptr;
  return config->tokens + static_cast<uint64_t>(slot.first_token) + config->requests[slot.request].num_prompt_tokens + slot.generated;
}

/* An active slot in a steady step, as known before its token. */
struct NextToken {
  int32_t* kept;           /* kept_token */
  uint64_t digest;         /* of the slot's next state, without the token */
  uint32_t slot;
  uint32_t request, generated, context; /* as in BatchSlot */
  uint32_t logprobs;
  bool may_end;            /* an end-of-sequence token would end the request */
  bool changes;            /* the step is not steady, whatever the token */
};

MPK_DEVICE NextToken prepare_token(const mpk_rank* rank, uint32_t active) {
  const mpk_batch_config* config = rank->batch_config;
  const uint32_t index = static_cast<uint32_t>(rank->batch->active_slot[active]);
  const BatchSlot slot = batch_arrays(rank).slots[index];
  NextToken next;
  next.kept = kept_token(config, slot);
  next.digest = folded((static_cast<uint64_t>(index) << 32) | slot.request, slot.context + 1);
  next.slot = index;
  next.request = slot.request;
  next.generated = slot.generated;
  next.context = slot.context;
  next.logprobs = slot.logprobs;
  next.may_end = slot.generated + 1 > slot.min_new_tokens && config->num_eos != 0;
  next.changes = slot.generated + 1 >= slot.limit;
  next.changes |= config->on_demand && pages_for(config, static_cast<uint64_t>(slot.context) + 2) > slot.pages;
  return next;
}

/* Whether the token is an end-of-sequence id after the first `from`. */
MPK_DEVICE_COLD bool is_further_eos(const mpk_rank* rank, uint32_t from, int32_t token) {
  const mpk_batch_config* config = rank->batch_config;
  bool found = false;
  for (uint32_t i = from; i < config->num_eos; ++i) found |= config->eos[i] == token;
  return found;
}

/* The first end-of-sequence ids of the configuration; models have one to three. */
struct FirstEos {
  static constexpr uint32_t kKept = 4;
  int32_t ids[kKept]; /* repeated if there are fewer */
  bool more;

  MPK_DEVICE void read(const mpk_batch_config* config) {
    for (uint32_t i = 0; i < kKept; ++i) ids[i] = config->num_eos != 0 ? config->eos[i < config->num_eos ? i : 0] : 0;
    more = config->num_eos > kKept;
  }
  MPK_DEVICE bool has(const mpk_rank* rank, int32_t token) const {
    bool found = false;
    for (uint32_t i = 0; i < kKept; ++i) found |= ids[i] == token;
    if (!found && more) found = is_further_eos(rank, kKept, token);
    return found;
  }
};

/* What a team has prepared for the end of the running iteration, apart from the members' first slots. The leader writes it. On a GPU it
 * is in shared memory: registers would be spilled, and reading them back after an acquire takes as long as reading the batch. */
struct PreparedStep {
  bool steady;   /* unless the decision, a token or a draft says otherwise; after the step: whether it was steady */
  bool decided;  /* `decision` is rank 0's, or there is nothing to decide */
  bool prefilled, full; /* the running iteration, for its time: it has prompt rows; every slot is active */
  uint32_t active;
  Decision decision;
  uint32_t next_admission, pending; /* BatchState's */
  uint32_t iteration, epoch; /* of the next iteration */
  uint64_t hash;             /* of the state now */
  uint64_t expected;         /* BatchState.expected of the next iteration */
  NextIteration next;        /* what is to be published after a steady step; another step sets it itself */
  FirstEos eos;
  /* Addresses in mpk_batch and BatchArrays. */
  const int32_t* next_token;
  const int32_t* num_drafts; /* NULL: there are no drafts */
  int32_t *row_token, *row_position, *active_context;
  BatchSlot* slots;
  PendingToken* pending_tokens; /* where the tokens of this step go */
};

/* Prepares for the end of the running iteration. Called by the whole team, after the results of the iteration before have been handed
 * out. It does not wait for rank 0's decision. Returns the member's first slot, if it has one. */
template <typename Team>
MPK_DEVICE NextToken prepare_step(const Team& team, const mpk_rank* rank, PreparedStep* prepared) {
  const mpk_batch_config* config = rank->batch_config;
  const mpk_batch* batch = rank->batch;
  const BatchState* state = batch_state(rank);
  const bool leads = team.member() == 0;
  NextToken first = {};
  team.sync(); /* the leader has written what the others read */
  const uint32_t active = batch->num_active;
  /* Each slot in use has one row, and samples one token; and no request that waits can get a slot. */
  bool steady = config->generate && active != 0 && active == state->running && active == batch->num_rows && active == batch->num_samples;
  steady = steady && (state->waiting == 0 || state->held_up == state->changes + 1);
  /* The end of the numbers is number_iteration's to report. */
  steady = steady && batch->iteration < MPK_LAST_ITERATION && batch->epoch < MPK_LAST_ITERATION;
  bool changes = !steady;
  for (uint32_t a = team.member(); a < active && steady; a += Team::kSize) {
    const NextToken next = prepare_token(rank, a);
    changes |= next.changes;
    if (a == team.member()) first = next;
  }
  steady = team.vote(changes) == 0;
  if (!leads) return first;
  prepared->steady = steady;
  prepared->active = steady ? active : 0;
  prepared->decision = {0, 0};
  prepared->decided = !config->generate || find_decision(rank, &prepared->decision);
  if (!steady) return first;
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_graph* graph = &rank->graphs[batch->graph];
  prepared->prefilled = batch->prompt_rows != 0;
  prepared->full = active == config->max_batch;
  prepared->next_admission = state->next_admission;
  prepared->pending = state->pending;
  prepared->iteration = batch->iteration + 1;
  prepared->epoch = batch->epoch + 1;
  prepared->hash = state->hash;
  prepared->expected = state->expected + counted_tasks(graph);
  prepared->next = next_iteration_of(graph, batch->graph, batch->iteration + 1);
  prepared->eos.read(config);
  prepared->next_token = batch->next_token;
  prepared->num_drafts = batch->num_drafts;
  prepared->row_token = batch->row_token;
  prepared->row_position = batch->row_position;
  prepared->active_context = batch->active_context;
  prepared->slots = arrays.slots;
  prepared->pending_tokens = arrays.pending + state->pending;
  return first;
}

/* The part of active slot `a` in a steady step: its next state, its row in mpk_batch, its token for the host. Returns a digest of its
 * state. */
MPK_DEVICE uint64_t take_next_token(const mpk_rank* rank, const PreparedStep& prepared, uint32_t a, const NextToken& next, int32_t token) {
  const uint32_t context = next.context + 1;
  prepared.row_token[a] = token;
  prepared.row_position[a] = static_cast<int32_t>(context);
  prepared.active_context[a] = static_cast<int32_t>(context);
  BatchSlot* const slot = prepared.slots + next.slot;
  slot->context = context;
  slot->generated = next.generated + 1;
  slot->last_token = token;
  prepared.pending_tokens[a] = PendingToken{next.request, next.generated, token, a};
  if (next.kept != nullptr) *next.kept = token;
  if (next.logprobs != 0) keep_logprobs(rank, a, next.logprobs);
  return folded(next.digest, static_cast<uint32_t>(token));
}

/* The iteration has ended, and the leader has acquired that. If the step is steady, advances all slots by a token and their rows in
 * mpk_batch by a position; the leader publishes prepared->next. Otherwise it writes nothing, except that it takes the
 * decision, or leaves in `code` why there is none. All members get the same result: whether the step is steady. */
template <typename Team>
MPK_DEVICE bool steady_step(const Team& team, const mpk_rank* rank, PreparedStep* prepared, const NextToken& first, mpk_status* status, int* code) {
  team.sync(); /* what the leader acquired comes before what the others read */
  const PreparedStep step = *prepared; /* read together, and not again after each store */
  const uint32_t member = team.member(), active = step.active;
  bool changes = !step.steady;
  Decision decision = step.decision;
  int32_t token = 0;
  if (member < active) {
    token = step.next_token[member];
    changes |= step.num_drafts != nullptr && step.num_drafts[first.slot] != 0;
    changes |= first.may_end && step.eos.has(rank, token);
  }
  for (uint32_t a = member + Team::kSize; a < active; a += Team::kSize) {
    const NextToken next = prepare_token(rank, a);
    changes |= step.num_drafts != nullptr && step.num_drafts[next.slot] != 0;
    changes |= next.may_end && step.eos.has(rank, step.next_token[a]);
  }
  if (member == 0) {
    if (!step.decided) *code = await_decision(rank, status, false, &decision);
    changes |= *code != MPK_OK || decision.entries != step.next_admission;
  }
  const bool steady = team.vote(changes) == 0;
  if (!steady) {
    team.sync(); /* the leader rewrites what the others have read */
    if (member != 0) return false;
    prepared->steady = false;
    prepared->decision = decision;
    return false;
  }
  uint64_t digest = 0;
  if (member < active) digest = take_next_token(rank, step, member, first, token);
  for (uint32_t a = member + Team::kSize; a < active; a += Team::kSize)
    digest += take_next_token(rank, step, a, prepare_token(rank, a), step.next_token[a]);
  if (active != 1) digest = team.sum(digest);
  team.sync(); /* the leader rewrites what the others have read, and publishes what they have written */
  if (member != 0) return true;
  BatchState* state = batch_state(rank);
  mpk_batch* batch = rank->batch;
  uint64_t hash = folded(step.hash, digest);
  hash = folded(hash, (static_cast<uint64_t>(step.next.graph) << 32) | step.iteration);
  batch->prompt_rows = 0;
  batch->iteration = step.iteration;
  batch->epoch = step.epoch;
  batch->hash = hash;
  state->iteration = step.iteration;
  state->hash = hash;
  state->pending = step.pending + active;
  /* Relaxed: see claim_batch_step. */
  platform::store<platform::Scope::kDevice>(&state->expected, step.expected, platform::kRelaxed);
  return true;
}

}  // namespace mpk

#endif
