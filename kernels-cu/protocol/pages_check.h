/* Checks the whole invariant of the page allocator, for debug builds and tests (MPK_DEBUG_CHECKS). Takes time linear
 * in the number of pages. */
#ifndef MPK_PROTOCOL_PAGES_CHECK_H
#define MPK_PROTOCOL_PAGES_CHECK_H

#include "pages.h"

namespace mpk {

/* A slot's pages: kept pages first, then its own. The rows of the iteration write only its own. */
MPK_DEVICE bool slot_pages_consistent(const mpk_rank* rank, uint32_t slot) {
  const mpk_batch_config* config = rank->batch_config;
  const BatchArrays arrays = batch_arrays(rank);
  const BatchSlot entry = arrays.slots[slot];
  const int32_t* table = page_table_of(rank, slot);
  if (entry.kept > entry.pages || entry.pages > config->pages_per_slot) return false;
  for (uint32_t i = 0; i < entry.pages; ++i) {
    if (table[i] < 0 || static_cast<uint32_t>(table[i]) >= config->num_pages) return false;
    if (arrays.pages[table[i]].owner != (i < entry.kept ? kKept : slot)) return false;
    for (uint32_t j = 0; j < i; ++j) {
      if (table[j] == table[i]) return false;
    }
  }
  if (entry.request == kNone) return entry.pages == 0;
  const uint32_t first = entry.context / config->page_size, end = pages_for(config, static_cast<uint64_t>(entry.context) + entry.rows);
  return entry.rows == 0 || (first >= entry.kept && end <= entry.pages);
}

/* Slots' own pages, kept pages and free pages add up to all pages. Readers are counted. A kept page is found by its key. Exactly the kept
 * pages without readers are in the order of last use. */
MPK_DEVICE bool pages_consistent(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  const BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  uint64_t own = 0, reading = 0;
  for (uint32_t slot = 0; slot < config->max_batch; ++slot) {
    if (!slot_pages_consistent(rank, slot)) return false;
    own += arrays.slots[slot].pages - arrays.slots[slot].kept;
    reading += arrays.slots[slot].kept;
  }
  uint64_t written = 0, kept = 0, readers = 0, unused = 0;
  for (uint32_t index = 0; index < config->num_pages; ++index) {
    const Page& page = arrays.pages[index];
    if (page.owner == kKept) {
      ++kept;
      readers += page.readers;
      unused += page.readers == 0;
      if (find_page(state, arrays, page.key) != index) return false;
    } else if (page.owner != kNone) {
      ++written;
    }
  }
  for (uint32_t i = 0; i < state->free_pages; ++i) {
    if (arrays.pages[arrays.free_list[i]].owner != kNone) return false;
  }
  uint64_t in_order = 0;
  for (uint32_t at = arrays.pages[config->num_pages].newer; at != config->num_pages; at = arrays.pages[at].newer) {
    const Page& page = arrays.pages[at];
    if (page.owner != kKept || page.readers != 0 || arrays.pages[page.newer].older != at || ++in_order > unused) return false;
  }
  return own == written && reading == readers && in_order == unused && unused == state->unused_pages && own + kept + state->free_pages == config->num_pages;
}

}  // namespace mpk

#endif
