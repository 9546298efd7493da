/* The arrays of an mpk_batch with an entry for each slot, for tests with at most one row and one sample a slot. */
#ifndef MPK_PROTOCOL_TEST_SLOT_ARRAYS_H
#define MPK_PROTOCOL_TEST_SLOT_ARRAYS_H

#include <vector>

#include "mpk/abi.h"

struct SlotArrays {
  std::vector<int32_t> active_slot, active_first_row, active_num_rows, active_context, active_num_samples, sample_row, sample_active, next_token, page_table;

  /* Makes them, filled with zeros, and enters their addresses into `batch`. */
  void make(mpk_batch* batch, size_t slots, size_t pages_per_slot) {
    const auto make = [](std::vector<int32_t>& array, size_t size) {
      array.assign(size, 0);
      return array.data();
    };
    batch->active_slot = make(active_slot, slots);
    batch->active_first_row = make(active_first_row, slots);
    batch->active_num_rows = make(active_num_rows, slots);
    batch->active_context = make(active_context, slots);
    batch->active_num_samples = make(active_num_samples, slots);
    batch->sample_row = make(sample_row, slots);
    batch->sample_active = make(sample_active, slots);
    batch->next_token = make(next_token, slots);
    batch->page_table = make(page_table, slots * pages_per_slot);
  }
};

#endif
