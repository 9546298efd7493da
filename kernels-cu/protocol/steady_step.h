/* The batch step of a *steady* iteration, which changes only positions: every request in a slot has one more token, and
 * no request joins, ends, needs a page or has drafts. Decoding consists of such iterations. A team of threads takes
 * the slots side by side: on a GPU, a single thread needs more than a microsecond per slot, because each of its loads
 * waits for memory.
 *
 * The result is the batch that collect, compose and choose_graph would give. Only the hash of the state is computed in
 * another way, so that no slot waits for the slot before it. All ranks take this path together, because the decision
 * depends only on state that is the same on all ranks. */
#ifndef MPK_PROTOCOL_STEADY_STEP_H
#define MPK_PROTOCOL_STEADY_STEP_H

#include <math.h>

#include "requests.h"

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

/* Keeps a sampled token for the host, as the `place`-th that it has not received, and for the slot's next row. Copies what the next
 * iteration's tasks overwrite, because they run while the host receives it. */
MPK_DEVICE void keep_token(const mpk_rank* rank, BatchSlot* slot, uint32_t sample, uint32_t place) {
  const mpk_batch_config* config = rank->batch_config;
  const mpk_batch* batch = rank->batch;
  const BatchArrays arrays = batch_arrays(rank);
  const int32_t token = batch->next_token[sample];
  arrays.pending[place] = PendingToken{slot->request, slot->generated, token, sample};
  for (uint64_t k = static_cast<uint64_t>(sample) * config->top_k, end = k + slot->logprobs; k < end; ++k) {
    arrays.top_tokens[k] = batch->top_token[k];
    arrays.top_logprobs[k] = batch->top_logprob[k];
  }
  if (slot->logprobs != 0) arrays.token_logprobs[sample] = token_logprob(config, batch, sample, slot->logprobs);
  slot->last_token = token;
  if (config->on_demand) config->tokens[static_cast<uint64_t>(slot->first_token) + config->requests[slot->request].num_prompt_tokens + slot->generated] = token;
  ++slot->generated;
}

/* Whether the ended iteration is steady, if `entries` entries of the admission ring are to be in effect. All members
 * get the same result. Nothing is written. */
template <typename Team>
MPK_DEVICE bool is_steady(const Team& team, const mpk_rank* rank, uint32_t entries) {
  const mpk_batch_config* config = rank->batch_config;
  const mpk_batch* batch = rank->batch;
  const BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const uint32_t active = batch->num_active;
  /* Each slot in use had one row, and sampled one token. */
  const bool one_each = active != 0 && active == state->running && active == batch->num_rows && active == batch->num_samples;
  const bool none_comes = entries == state->next_admission && (state->waiting == 0 || state->held_up == state->changes + 1);
  if (!one_each || !none_comes) return false;
  bool changes = false;
  for (uint32_t a = team.member(); a < active; a += Team::kSize) {
    const uint32_t index = static_cast<uint32_t>(batch->active_slot[a]);
    const BatchSlot slot = arrays.slots[index];
    changes |= finish_after(config, slot, slot.generated + 1, batch->next_token[a]) != MPK_RUNNING;
    changes |= config->on_demand && pages_for(config, static_cast<uint64_t>(slot.context) + 2) > slot.pages;
    changes |= batch->num_drafts != nullptr && batch->num_drafts[index] != 0;
  }
  return team.vote(changes) == 0;
}

/* Advances all slots by a token, and their rows in mpk_batch by a position. Returns a digest of the slots' new state. The
 * leader then calls end_steady_step after a barrier of the team. */
template <typename Team>
MPK_DEVICE uint64_t steady_step(const Team& team, const mpk_rank* rank) {
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_batch* batch = rank->batch;
  const uint32_t active = batch->num_active, pending = batch_state(rank)->pending;
  uint64_t digest = 0;
  for (uint32_t a = team.member(); a < active; a += Team::kSize) {
    const uint32_t index = static_cast<uint32_t>(batch->active_slot[a]);
    BatchSlot slot = arrays.slots[index];
    ++slot.context;
    keep_token(rank, &slot, a, pending + a);
    arrays.slots[index] = slot;
    batch->active_context[a] = static_cast<int32_t>(slot.context);
    batch->row_token[a] = slot.last_token;
    batch->row_position[a] = static_cast<int32_t>(slot.context);
    digest += folded(folded((static_cast<uint64_t>(index) << 32) | slot.request, slot.context), static_cast<uint32_t>(slot.last_token));
  }
  return team.sum(digest);
}

/* What mpk_batch and the state have once for all slots. Most of it stays as it is. */
MPK_DEVICE void end_steady_step(const mpk_rank* rank, uint64_t digest) {
  BatchState* state = batch_state(rank);
  fold(state, digest);
  state->pending += rank->batch->num_active;
  rank->batch->prompt_rows = 0;
}

}  // namespace mpk

#endif
