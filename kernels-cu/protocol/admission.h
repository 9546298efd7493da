/* How requests come and go while the kernel runs, and why all ranks apply the same entries in the same batch step.
 *
 * Entries. Every rank has an admission ring of its own: add, cancel, stop. The hosts fill it: rank 0's host numbers an entry and
 * sends it with its payload to the others; each host writes payload and entry, then counts the entry in its rank's
 * mpk_batch_config.num_admissions. Rank 0's host counts an entry last, when all the others have confirmed it.
 *
 * Decisions. Each batch step applies as many entries as rank 0 has decided, and rank 0 decides once for each: right after it has
 * published an iteration it looks how many entries its host has counted, and writes (number of the decision, entries) into a
 * word at every rank. The batch step after that iteration waits for the word with its number. The word leaves rank 0 at the
 * beginning of an iteration in which all ranks exchange data, and is wanted at the end, so nobody waits for it in practice.
 * It does not depend on the graph: iterations of prompt rows, which sample no token, carry it too.
 *
 * Nothing to run. If a decision leaves a rank without work, so it does all others: they have the same state. Rank 0 then applies
 * new entries as they come, without telling anybody, until there is work, the run is to stop, or the kernel has been idle
 * for long enough. Only then it writes its next decision, with all of those entries; the others wait for that. Applying
 * entries one by one or together leaves the same state, since each one is followed by an admission of its own. These
 * waits have no deadline (mpk_control.parks is odd), but look at the abort word. So an iteration takes two decisions at
 * most, and MPK_DECISIONS words are enough. */
#ifndef MPK_PROTOCOL_ADMISSION_H
#define MPK_PROTOCOL_ADMISSION_H

#include "requests.h"
#include "wait.h"

namespace mpk {

/* Word of a decision: its number, from 1, modulo 2^32 in the high half; whether the kernel ends, and the entries modulo 2^31 in
 * the low half. */
constexpr uint32_t kLeave = 0x80000000u;
static_assert(kLeave == MPK_ENTRY_COUNT_MASK + 1u, "the rest of the low half");

struct Decision {
  uint32_t entries;
  bool leave;
};

MPK_DEVICE uint64_t* decision_word(const mpk_rank* rank, uint32_t number) { return &rank->control->decisions[number % MPK_DECISIONS]; }

/* The half of the word that says which decision it is: what a thread that waits for it may sleep on. */
template <typename T>
MPK_DEVICE T* number_half(T* word) {
  return word + 1;
}

/* Rank 0: makes decision `number` known to all ranks. Relaxed: whoever reads it looks for the entries in its own ring, with an
 * acquire of its own (entries_here). */
MPK_DEVICE bool write_decision(const mpk_rank* rank, uint32_t number, const Decision& decision) {
  const uint64_t word = (static_cast<uint64_t>(number) << 32) | decision.entries | (decision.leave ? kLeave : 0u);
  bool reached = true;
  for (uint32_t pe = 0; pe < rank->world; ++pe) reached = platform::put_word(rank, pe, decision_word(rank, number), word) && reached;
  return reached;
}

/* Entries that this rank's host has counted. Acquire: pairs with the host's release; entries and payloads below are visible. */
MPK_DEVICE uint32_t entries_here(const mpk_rank* rank) {
  return platform::load<platform::Scope::kSystem>(rank->batch_config->num_admissions, platform::kAcquire) & MPK_ENTRY_COUNT_MASK;
}

/* Rank 0: decides what the next batch step applies, unless it has. False where a rank can't be reached. */
MPK_DEVICE bool decide(const mpk_rank* rank) {
  BatchState* state = batch_state(rank);
  if (rank->rank != 0 || state->decided != state->decision) return true;
  ++state->decided;
  return write_decision(rank, state->decided, {entries_here(rank), false});
}

/* Decision number state->decision + 1. MPK_OK, or an abort code; `parked`: there is no deadline. */
MPK_DEVICE int await_decision(const mpk_rank* rank, mpk_status* status, bool parked, Decision* decision) {
  BatchState* state = batch_state(rank);
  if (!decide(rank)) return MPK_ABORT_PEER;
  const uint32_t wanted = state->decision + 1;
  const uint64_t* word = decision_word(rank, wanted);
  Wait wait(rank, status, follower_deadline_ns(rank));
  for (;;) {
    /* Relaxed: pairs with write_decision. */
    const uint64_t seen = platform::load<platform::Scope::kSystem>(word, platform::kRelaxed);
    const uint32_t number = static_cast<uint32_t>(seen >> 32);
    if (number == wanted) {
      state->decision = wanted;
      *decision = {static_cast<uint32_t>(seen) & MPK_ENTRY_COUNT_MASK, (static_cast<uint32_t>(seen) & kLeave) != 0};
      return MPK_OK;
    }
    /* A later one has taken its place: this rank is further behind than the exchanges between the ranks allow. */
    if (static_cast<int32_t>(number - wanted) > 0) return MPK_ABORT_DIVERGED;
    const int code = parked ? park(rank, number_half(reinterpret_cast<const uint32_t*>(word)), number) : wait.poll(seen);
    if (code != MPK_OK) return code;
  }
}

/* Entries up to number `entries` take effect, one after the other. Each one is followed by an admission of its own, so that it does
 * not matter how many are applied together. Others than these come to admissions only through slots that have come free. */
MPK_DEVICE int apply_entries(const mpk_rank* rank, uint32_t entries) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  if (entries == state->next_admission) return MPK_OK;
  if (((entries - state->next_admission) & MPK_ENTRY_COUNT_MASK) > config->admission_ring) return MPK_ABORT_QUEUE;
  /* Rank 0 has been told that they are here. */
  if (((entries_here(rank) - entries) & MPK_ENTRY_COUNT_MASK) > config->admission_ring) return MPK_ABORT_QUEUE;
  while (state->next_admission != entries) {
    const mpk_admission entry = config->admissions[state->next_admission & (config->admission_ring - 1)];
    state->next_admission = (state->next_admission + 1) & MPK_ENTRY_COUNT_MASK;
    int code = apply_entry(rank, entry);
    if (code == MPK_OK) code = admit(rank);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

MPK_DEVICE bool has_work(const mpk_rank* rank) { return batch_state(rank)->running != 0; }

/* Rank 0, without work: applies entries as they come until there is work or the kernel is to end, and decides that. `told()` is
 * called after entries have been applied. */
template <typename Told>
MPK_DEVICE int await_entries(const mpk_rank* rank, const Told& told) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const uint64_t since = platform::clock_ns();
  bool leave = false;
  while (!has_work(rank) && !state->stopping && !leave) {
    const uint32_t entries = entries_here(rank);
    if (entries != state->next_admission) {
      const int code = apply_entries(rank, entries);
      if (code != MPK_OK) return code;
      told();
      continue;
    }
    uint64_t longest_ns = kLongestParkNs;
    if (config->idle_exit_ns != 0) {
      const uint64_t idle_ns = platform::clock_ns() - since;
      leave = idle_ns >= config->idle_exit_ns;
      if (leave) break;
      if (config->idle_exit_ns - idle_ns < longest_ns) longest_ns = config->idle_exit_ns - idle_ns;
    }
    const int code = park(rank, config->num_admissions, entries, longest_ns);
    if (code != MPK_OK) return code;
  }
  ++state->decided;
  if (!write_decision(rank, state->decided, {state->next_admission, leave})) return MPK_ABORT_PEER;
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    uint64_t* word = platform::peer_address(rank, pe, decision_word(rank, state->decided));
    if (word != nullptr) platform::wake(number_half(reinterpret_cast<uint32_t*>(word)));
  }
  return MPK_OK;
}

}  // namespace mpk

#endif
