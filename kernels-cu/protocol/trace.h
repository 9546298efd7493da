/* The timeline that a rank records on request: rows of records in the rank's memory, which the host reads after the launch. Row w
 * belongs to worker w; the row after the last worker's belongs to the batch step. A row is a ring: it keeps the newest records.
 *
 * On the CPU target this is decided per launch (mpk_rank.trace). A GPU kernel contains the code only if it is compiled with MPK_TRACE.
 * So a kernel without a timeline is the same, instruction for instruction, as if timelines did not exist. */
#ifndef MPK_PROTOCOL_TRACE_H
#define MPK_PROTOCOL_TRACE_H

#include "mpk/abi.h"
#include "platform/platform.h"

namespace mpk {

MPK_DEVICE bool is_traced(const mpk_rank* rank) { return platform::kTraces && rank->trace != nullptr; }

/* The current time; 0 if no timeline is recorded. */
MPK_DEVICE uint64_t trace_clock(const mpk_rank* rank) { return is_traced(rank) ? platform::clock_ns() : 0; }

/* The row's record after `count` others. */
MPK_DEVICE mpk_trace_record* trace_at(const mpk_rank* rank, uint32_t row, uint64_t count) {
  return rank->trace + row * rank->trace_capacity + (count & (rank->trace_capacity - 1));
}

/* The next record of the row. The row's only writer may fill it over time. */
MPK_DEVICE mpk_trace_record* trace_next(const mpk_rank* rank, uint32_t row) { return trace_at(rank, row, rank->trace_count[row]); }

/* Keeps the row's record after `count` others, which is now complete. */
MPK_DEVICE void trace_keep_at(const mpk_rank* rank, uint32_t row, uint64_t count) {
  /* Relaxed: the host reads rows after the launch. The batch step's row passes from thread to thread together with the
   * step (BatchState.open). */
  platform::store<platform::Scope::kSystem>(&rank->trace_count[row], count + 1, platform::kRelaxed);
}

/* Keeps the record from trace_next, which is now complete. */
MPK_DEVICE void trace_keep(const mpk_rank* rank, uint32_t row) { trace_keep_at(rank, row, rank->trace_count[row]); }

/* Records a batch step that has published the iteration in mpk_batch: the time before the publication, and the time after it. The tasks
 * of the iteration only read the fields used here, and the next batch step cannot begin before this one has returned. */
MPK_DEVICE_COLD void trace_batch_step(const mpk_rank* rank, uint64_t began_ns, uint64_t published_ns) {
  const mpk_batch* batch = rank->batch;
  mpk_trace_record* entry = trace_next(rank, rank->num_workers);
  uint32_t context = 0;
  for (uint32_t a = 0; a < batch->num_active; ++a) context += static_cast<uint32_t>(batch->active_context[a]);
  entry->fetched_ns = began_ns;
  entry->ready_ns = published_ns;
  entry->done_ns = platform::clock_ns();
  entry->iteration = batch->iteration;
  entry->task = MPK_TASK_BEGIN;
  entry->graph = static_cast<uint16_t>(batch->graph);
  entry->worker = static_cast<uint16_t>(rank->num_workers);
  entry->waited_for = batch->num_active;
  entry->peer_ns = batch->num_rows;
  entry->page_ns = context;
  trace_keep(rank, rank->num_workers);
}

}  // namespace mpk

#endif
