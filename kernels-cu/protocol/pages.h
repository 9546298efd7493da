/* Pages of the KV cache: which slot has which page, and which pages are kept for later prompts (the prefix cache).
 *
 * A page is free, or owned by one slot, or kept. Each page has at most one writer: a slot writes only its own pages,
 * and no slot writes a kept page. With a prefix cache, a page is kept from the moment it is full of prompt tokens. It
 * is read by the slot that wrote it, and by any slot whose prompt begins with the same tokens. Kept pages come first in
 * a slot's table. If a page is needed and none is free, the kept page that no slot has and that was used least recently
 * is evicted.
 *
 * Keys. A kept page is found by a 128-bit key: a hash of its tokens and of all tokens before them. Rank 0's host computes the keys, and
 * they reach every rank with the prompt. So all ranks find the same pages, and the batch step hashes nothing: it looks up one key for
 * each page that it finds, and one that it does not find. Tokens are not compared. The hash is keyed with a secret of the process, so
 * nobody can construct prompts that share a key. The probability that any two of n different pages share a key by chance is below n^2 /
 * 2^129; for 2^40 pages that is 2^-49.
 *
 * A slot that has a kept page also has the kept pages of all tokens before it. Pages are released from the last to the first. So if one
 * page continues another, it is evicted first, and a lookup may stop at the first key that it does not find. */
#ifndef MPK_PROTOCOL_PAGES_H
#define MPK_PROTOCOL_PAGES_H

#include "batch_state.h"

namespace mpk {

MPK_DEVICE uint32_t pages_for(const mpk_batch_config* config, uint64_t tokens) {
  return static_cast<uint32_t>((tokens + config->page_size - 1) / config->page_size);
}

MPK_DEVICE int32_t* page_table_of(const mpk_rank* rank, uint32_t slot) {
  return rank->batch->page_table + static_cast<uint64_t>(slot) * rank->batch_config->pages_per_slot;
}

/* Pages that slots can be given. */
MPK_DEVICE uint32_t pages_available(const BatchState* state) { return state->free_pages + state->unused_pages; }

MPK_DEVICE void pages_begin(const mpk_rank* rank) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  /* The lowest page is on top of the stack. */
  for (uint32_t page = 0; page < config->num_pages; ++page) {
    arrays.free_list[page] = config->num_pages - 1 - page;
    arrays.pages[page].owner = kNone;
  }
  arrays.pages[config->num_pages].older = arrays.pages[config->num_pages].newer = config->num_pages;
  state->free_pages = config->num_pages;
  state->bucket_mask = page_buckets(config) - 1;
}

/* ---- kept pages ---- */

/* First key of a prompt's pages. */
MPK_DEVICE const mpk_page_key* page_keys_of(const mpk_batch_config* config, uint32_t first_token) {
  return config->page_keys + MPK_FIRST_PAGE_KEY(first_token, config->page_size);
}

MPK_DEVICE uint32_t* bucket_of(const BatchState* state, const BatchArrays& arrays, const mpk_page_key& key) {
  return &arrays.buckets[static_cast<uint32_t>(key.words[0]) & state->bucket_mask];
}

/* The kept page with this key, or kNone. */
MPK_DEVICE uint32_t find_page(const BatchState* state, const BatchArrays& arrays, const mpk_page_key& key) {
  uint32_t at = *bucket_of(state, arrays, key);
  while (at != 0 && (arrays.pages[at - 1].key.words[0] != key.words[0] || arrays.pages[at - 1].key.words[1] != key.words[1])) at = arrays.pages[at - 1].next;
  return at - 1;
}

/* Adds a reader to a kept page. */
MPK_DEVICE void begin_reading(BatchState* state, const BatchArrays& arrays, uint32_t index) {
  Page* page = &arrays.pages[index];
  if (page->readers++ != 0) return;
  arrays.pages[page->older].newer = page->newer;
  arrays.pages[page->newer].older = page->older;
  --state->unused_pages;
}

/* Removes a reader from a kept page. A page without readers becomes the most recently used one. */
MPK_DEVICE void end_reading(const mpk_batch_config* config, BatchState* state, const BatchArrays& arrays, uint32_t index) {
  Page* page = &arrays.pages[index];
  if (--page->readers != 0) return;
  Page* end = &arrays.pages[config->num_pages];
  page->older = end->older;
  page->newer = config->num_pages;
  arrays.pages[end->older].newer = index;
  end->older = index;
  ++state->unused_pages;
}

/* Evicts the kept page that has been without readers for longest. The caller has checked that there is one. */
MPK_DEVICE_COLD int give_page_up(const mpk_rank* rank) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const uint32_t index = arrays.pages[rank->batch_config->num_pages].newer;
  Page* page = &arrays.pages[index];
  if (state->unused_pages == 0 || page->owner != kKept || page->readers != 0) return MPK_ABORT_KERNEL;
  begin_reading(state, arrays, index); /* unlinks it from the order of last use */
  uint32_t* link = bucket_of(state, arrays, page->key);
  while (*link != index + 1) {
    if (*link == 0) return MPK_ABORT_KERNEL;
    link = &arrays.pages[*link - 1].next;
  }
  *link = page->next;
  page->owner = kNone;
  page->readers = 0;
  arrays.free_list[state->free_pages++] = index;
  ++state->evictions;
  return MPK_OK;
}

/* The pages of a prompt that the prefix cache holds. */
struct CachedPrefix {
  uint32_t pages;
  uint32_t unused; /* number of these that have no readers */
};

/* Looks up at most `most` pages of a prompt, and writes the pages found into the table of a free slot. */
MPK_DEVICE_COLD CachedPrefix find_prefix(const mpk_rank* rank, uint32_t slot, uint32_t first_token, uint32_t most) {
  const BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const mpk_page_key* keys = page_keys_of(rank->batch_config, first_token);
  int32_t* table = page_table_of(rank, slot);
  CachedPrefix found = {0, 0};
  for (; found.pages < most; ++found.pages) {
    const uint32_t page = find_page(state, arrays, keys[found.pages]);
    if (page == kNone) break;
    found.unused += arrays.pages[page].readers == 0;
    table[found.pages] = static_cast<int32_t>(page);
  }
  return found;
}

/* Gives the slot the first `count` pages of its table, which are kept pages. */
MPK_DEVICE_COLD void share_prefix(const mpk_rank* rank, uint32_t slot, uint32_t count) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const int32_t* table = page_table_of(rank, slot);
  for (uint32_t i = 0; i < count; ++i) {
    begin_reading(state, arrays, static_cast<uint32_t>(table[i]));
    fold(state, static_cast<uint32_t>(table[i]));
  }
  arrays.slots[slot].pages = arrays.slots[slot].kept = count;
}

/* Clears the table again: a free slot has no pages. */
MPK_DEVICE void forget_prefix(const mpk_rank* rank, uint32_t slot, uint32_t count) {
  int32_t* table = page_table_of(rank, slot);
  for (uint32_t i = 0; i < count; ++i) table[i] = -1;
}

/* Keeps the pages of the slot's prompt that are now full. If another slot has computed the same page meanwhile, one of the two is
 * freed. No task runs now. */
MPK_DEVICE_COLD int keep_pages(const mpk_rank* rank, uint32_t slot) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  BatchSlot* entry = &arrays.slots[slot];
  const mpk_page_key* keys = page_keys_of(config, entry->first_token);
  int32_t* table = page_table_of(rank, slot);
  const uint32_t full = entry->context / config->page_size;
  for (; entry->kept < entry->keyed && entry->kept < full; ++entry->kept) {
    const uint32_t own = static_cast<uint32_t>(table[entry->kept]);
    Page* page = &arrays.pages[own];
    if (page->owner != slot) return MPK_ABORT_KERNEL;
    const mpk_page_key key = keys[entry->kept];
    const uint32_t same = find_page(state, arrays, key);
    if (same != kNone) {
      begin_reading(state, arrays, same);
      table[entry->kept] = static_cast<int32_t>(same);
      page->owner = kNone;
      arrays.free_list[state->free_pages++] = own;
      fold(state, (static_cast<uint64_t>(slot) << 32) | same);
    } else {
      uint32_t* bucket = bucket_of(state, arrays, key);
      *page = Page{key, kKept, 1, *bucket, 0, 0, 0};
      *bucket = own + 1;
    }
    ++state->changes;
  }
  return MPK_OK;
}

/* ---- a slot's pages ---- */

/* Takes `count` more pages for a slot to own. Returns MPK_OK, or MPK_ABORT_KERNEL if a page already has an owner: then the
 * allocator's invariant is broken and the KV cache would be corrupted. The caller has checked that enough pages are
 * available. */
MPK_DEVICE int pages_take(const mpk_rank* rank, uint32_t slot, uint32_t count) {
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  const uint32_t held = arrays.slots[slot].pages;
  int32_t* table = page_table_of(rank, slot);
  for (uint32_t i = held; i < held + count; ++i) {
    if (state->free_pages == 0) {
      const int code = give_page_up(rank);
      if (code != MPK_OK) return code;
    }
    const uint32_t page = arrays.free_list[--state->free_pages];
    if (arrays.pages[page].owner != kNone) return MPK_ABORT_KERNEL;
    arrays.pages[page].owner = slot;
    table[i] = static_cast<int32_t>(page);
    fold(state, page);
  }
  arrays.slots[slot].pages = held + count;
  return MPK_OK;
}

/* Releases from the last page to the first: see above. */
MPK_DEVICE int pages_release(const mpk_rank* rank, uint32_t slot) {
  const mpk_batch_config* config = rank->batch_config;
  BatchState* state = batch_state(rank);
  const BatchArrays arrays = batch_arrays(rank);
  BatchSlot* entry = &arrays.slots[slot];
  int32_t* table = page_table_of(rank, slot);
  for (uint32_t i = entry->pages; i-- > 0;) {
    const uint32_t page = static_cast<uint32_t>(table[i]);
    if (page >= config->num_pages) return MPK_ABORT_KERNEL;
    if (i < entry->kept) {
      if (arrays.pages[page].owner != kKept || arrays.pages[page].readers == 0) return MPK_ABORT_KERNEL;
      end_reading(config, state, arrays, page);
    } else {
      if (arrays.pages[page].owner != slot) return MPK_ABORT_KERNEL;
      arrays.pages[page].owner = kNone;
      arrays.free_list[state->free_pages++] = page;
    }
    table[i] = -1;
  }
  entry->pages = entry->kept = 0;
  ++state->changes;
  return MPK_OK;
}

}  // namespace mpk

#endif
