/* How requests come and go while the kernel runs, and why all ranks apply the same entries in the same batch step.
 *
 * Entries. Every rank has its own admission ring of entries: admit, cancel, stop. The hosts fill it. Rank 0's host numbers an
 * entry and sends it, with its payload, to the other hosts. Each host writes payload and entry, then counts the entry in its
 * rank's mpk_batch_config.num_admissions. Rank 0's host counts an entry last, after all others have confirmed it.
 *
 * Decisions. Each batch step applies as many entries as rank 0 has decided. Rank 0 decides once per batch step. Right after it
 * has published an iteration, it reads how many entries its host has counted, and writes (number of the decision, entries) into
 * a word at every rank. The batch step after that iteration waits for the word with its number. The word leaves rank 0
 * at the start of an iteration in which all ranks exchange data, and is needed at the end, so in practice no rank waits
 * for it. It does not depend on the graph: iterations of prompt rows, which sample no token, carry it too.
 *
 * Nothing to run. If a decision leaves one rank without work, it leaves all ranks without work, because they have the same
 * state. Rank 0 then applies new entries as they arrive, until there is work, the run is to stop, or the kernel has been idle for
 * long enough. Its next decision contains all of those entries. Until then it writes that decision's word repeatedly as an
 * interim word, with the entries so far. The others apply these too, since their hosts wait for that, and keep waiting. A late
 * rank sees only the last of these words. This makes no difference: each entry is followed by its own admission step, so
 * entries give the same state whether they are applied one by one or together. These waits have no deadline (mpk_control.parks
 * is odd), but they check the abort word. So there are at most two decisions per iteration, and MPK_DECISIONS words are
 * enough. */
#ifndef MPK_PROTOCOL_ADMISSION_H
#define MPK_PROTOCOL_ADMISSION_H

#include "requests.h"
#include "wait.h"

namespace mpk {

/* Word of a decision. High half: its number, from 1, modulo 2^32. Low half: whether the kernel ends, whether the word is
 * interim, and the entries modulo 2^30. */
constexpr uint32_t kLeave = 0x80000000u, kInterim = 0x40000000u;
static_assert((kLeave | kInterim) == ~MPK_ENTRY_COUNT_MASK, "the rest of the low half");

struct Decision {
  uint32_t entries;
  uint32_t flags;

  MPK_DEVICE bool leave() const { return (flags & kLeave) != 0; }
  MPK_DEVICE bool interim() const { return (flags & kInterim) != 0; }
};

MPK_DEVICE uint64_t* decision_word(const mpk_rank* rank, uint32_t number) { return &rank->control->decisions[number % MPK_DECISIONS]; }

/* The halves of a word, for a thread that sleeps until one changes. */
MPK_DEVICE uint32_t* entries_half(uint64_t* word) { return reinterpret_cast<uint32_t*>(word); }
MPK_DEVICE uint32_t* number_half(uint64_t* word) { return reinterpret_cast<uint32_t*>(word) + 1; }

/* Rank 0: sends decision `number` to all ranks. Relaxed: a reader looks for the entries in its own ring, with a separate
 * acquire (entries_here). */
MPK_DEVICE bool write_decision(const mpk_rank* rank, uint32_t number, const Decision& decision) {
  const uint64_t word = (static_cast<uint64_t>(number) << 32) | decision.entries | decision.flags;
  bool reached = true;
  for (uint32_t pe = 0; pe < rank->world; ++pe) reached = platform::put_word(rank, pe, decision_word(rank, number), word) && reached;
  return reached;
}

/* Entries that this rank's host has counted. Acquire: pairs with the host's release; the entries counted and their
 * payloads are visible. */
MPK_DEVICE uint32_t entries_here(const mpk_rank* rank) {
  return platform::load<platform::Scope::kSystem>(rank->batch_config->num_admissions, platform::kAcquire) & MPK_ENTRY_COUNT_MASK;
}

/* Rank 0: decides what the next batch step applies, unless it has already decided. False if a rank is out of reach. */
MPK_DEVICE bool decide(const mpk_rank* rank) {
  BatchState* state = batch_state(rank);
  if (rank->rank != 0 || state->decided != state->decision) return true;
  ++state->decided;
  return write_decision(rank, state->decided, {entries_here(rank), 0});
}

/* Takes decision number state->decision + 1 if it has arrived; it does not wait. In doubt it leaves the decision to
 * await_decision. */
MPK_DEVICE bool find_decision(const mpk_rank* rank, Decision* decision) {
  BatchState* state = batch_state(rank);
  const uint32_t wanted = state->decision + 1;
  /* Relaxed: pairs with write_decision. */
  const uint64_t seen = platform::load<platform::Scope::kSystem>(decision_word(rank, wanted), platform::kRelaxed);
  const uint32_t low = static_cast<uint32_t>(seen);
  if (static_cast<uint32_t>(seen >> 32) != wanted || (low & kInterim) != 0) return false;
  *decision = {low & MPK_ENTRY_COUNT_MASK, low & ~MPK_ENTRY_COUNT_MASK};
  state->decision = wanted;
  return true;
}

/* Waits for decision number state->decision + 1. Returns MPK_OK or an abort code. `parked`: there is no deadline, and an interim
 * word counts as news if it has more entries than are in effect. */
MPK_DEVICE int await_decision(const mpk_rank* rank, mpk_status* status, bool parked, Decision* decision) {
  BatchState* state = batch_state(rank);
  if (!decide(rank)) return MPK_ABORT_PEER;
  const uint32_t wanted = state->decision + 1;
  uint64_t* word = decision_word(rank, wanted);
  Wait wait(rank, status, follower_deadline_ns(rank));
  for (;;) {
    /* Relaxed: pairs with write_decision. */
    const uint64_t seen = platform::load<platform::Scope::kSystem>(word, platform::kRelaxed);
    const uint32_t number = static_cast<uint32_t>(seen >> 32), low = static_cast<uint32_t>(seen);
    if (number == wanted) {
      *decision = {low & MPK_ENTRY_COUNT_MASK, low & ~MPK_ENTRY_COUNT_MASK};
      if (!decision->interim()) {
        state->decision = wanted;
        return MPK_OK;
      }
      if (decision->entries != state->next_admission) return MPK_OK;
    }
    /* A later decision has overwritten it: this rank is further behind than the exchanges between ranks allow. */
    if (static_cast<int32_t>(number - wanted) > 0) return MPK_ABORT_DIVERGED;
    int code = MPK_OK;
    if (!parked) code = wait.poll(seen);
    else if (number == wanted) code = park(rank, entries_half(word), low);
    else code = park(rank, number_half(word), number);
    if (code != MPK_OK) return code;
  }
}

/* Waits until this rank's host has counted `entries`. It did so before rank 0 decided on them, but the decision's word orders
 * nothing. So this rank may see the word before the count, which takes another path. Returns MPK_OK or an abort code. */
MPK_DEVICE int await_entries_here(const mpk_rank* rank, uint32_t entries, mpk_status* status) {
  const uint32_t most = rank->batch_config->admission_ring;
  uint32_t here = entries_here(rank);
  if (((here - entries) & MPK_ENTRY_COUNT_MASK) <= most) return MPK_OK;
  Wait wait(rank, status, follower_deadline_ns(rank));
  do {
    const int code = wait.poll(here);
    if (code != MPK_OK) return code;
    here = entries_here(rank);
  } while (((here - entries) & MPK_ENTRY_COUNT_MASK) > most);
  return MPK_OK;
}

/* Entries up to number `entries` take effect, one after the other. Each one is followed by its own admission step, so it does
 * not matter how many are applied together. Other requests are admitted only when slots become free. */
MPK_DEVICE int apply_entries(const mpk_rank* rank, uint32_t entries, mpk_status* status) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  if (entries == state->next_admission) return MPK_OK;
  if (((entries - state->next_admission) & MPK_ENTRY_COUNT_MASK) > config->admission_ring) return MPK_ABORT_QUEUE;
  const int here = await_entries_here(rank, entries, status);
  if (here != MPK_OK) return here;
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

/* Rank 0: sends the decision that sleeping ranks wait for. All of its words go to the same place, in order. */
MPK_DEVICE bool write_to_parked(const mpk_rank* rank, uint32_t number, const Decision& decision) {
  platform::order_puts(rank);
  const bool reached = write_decision(rank, number, decision);
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    uint64_t* word = platform::peer_address(rank, pe, decision_word(rank, number));
    if (word == nullptr || pe == rank->rank) continue;
    platform::wake(entries_half(word));
    platform::wake(number_half(word));
  }
  return reached;
}

/* Rank 0, without work: applies entries as they arrive until there is work or the kernel must end, and decides that. Calls
 * `told()` after it has applied entries. */
template <typename Told>
MPK_DEVICE int await_entries(const mpk_rank* rank, mpk_status* status, const Told& told) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const uint64_t since = platform::clock_ns();
  uint32_t flags = 0;
  while (!has_work(rank) && !state->stopping) {
    const uint32_t entries = entries_here(rank);
    if (entries != state->next_admission) {
      const int code = apply_entries(rank, entries, status);
      if (code != MPK_OK) return code;
      told();
      if (has_work(rank) || state->stopping) break;
      if (!write_to_parked(rank, state->decided + 1, {entries, kInterim})) return MPK_ABORT_PEER;
      continue;
    }
    uint64_t longest_ns = kLongestParkNs;
    if (config->idle_exit_ns != 0) {
      const uint64_t idle_ns = platform::clock_ns() - since;
      if (idle_ns >= config->idle_exit_ns) {
        flags = kLeave;
        break;
      }
      if (config->idle_exit_ns - idle_ns < longest_ns) longest_ns = config->idle_exit_ns - idle_ns;
    }
    const int code = park(rank, config->num_admissions, entries, longest_ns);
    if (code != MPK_OK) return code;
  }
  ++state->decided;
  return write_to_parked(rank, state->decided, {state->next_admission, flags}) ? MPK_OK : MPK_ABORT_PEER;
}

}  // namespace mpk

#endif
