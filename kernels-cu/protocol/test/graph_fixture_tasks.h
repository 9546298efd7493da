/* The tasks of the hand-built job (graph_fixture.h). */
#ifndef MPK_TEST_GRAPH_FIXTURE_TASKS_H
#define MPK_TEST_GRAPH_FIXTURE_TASKS_H

#include <atomic>
#include <chrono>
#include <thread>

#include "graph_fixture.h"
#include "kernel_wait.h"

namespace fixture {

inline Job* g_job = nullptr; /* gives the kernels access to the buffers; one job at a time */

inline Rank::Graph& graph_of(const mpk_kernel_args* args) {
  Rank& rank = *g_job->ranks[args->rank->rank];
  return *rank.graphs[args->batch->graph];
}

inline uint32_t mix(uint32_t a, uint32_t b) {
  uint64_t x = (static_cast<uint64_t>(a) << 32 | b) * 0x9E3779B97F4A7C15ull;
  x ^= x >> 29;
  return static_cast<uint32_t>((x * 0xBF58476D1CE4E5B9ull) >> 33);
}

inline float value(uint32_t iteration, uint32_t rank, uint32_t column, int32_t token, int32_t position) {
  return static_cast<float>(mix(mix(iteration, rank * 64 + column), mix(static_cast<uint32_t>(token), static_cast<uint32_t>(position))) & 0xFFF);
}

/* Contents of the KV cache at a position: a hash of everything that led to it. */
inline uint32_t history(uint32_t before, int32_t token, int32_t position) {
  return mix(before ^ static_cast<uint32_t>(token) * 0x9E3779B1u, static_cast<uint32_t>(position) + 1);
}

/* The token that follows that history. */
inline int32_t next_token(uint32_t history) { return static_cast<int32_t>(history % kVocabulary); }

inline uint32_t& kv_place(Rank& rank, uint32_t slot, uint32_t position) {
  const mpk_batch_config& config = rank.config;
  const int32_t page = rank.batch.page_table[slot * config.pages_per_slot + position / config.page_size];
  CHECK(page >= 0 && page < static_cast<int32_t>(config.num_pages), "page %d", page);
  return rank.kv[static_cast<size_t>(page) * config.page_size + position % config.page_size];
}

inline uint64_t* receive_slot(const mpk_kernel_args* args, uint32_t sender) {
  Rank& rank = *g_job->ranks[args->rank->rank];
  return rank.memory.data() + graph_of(args).receive + static_cast<size_t>(sender) * args->graph->rows * kColumns;
}

inline int produce(const mpk_kernel_args* args) {
  Rank::Graph& graph = graph_of(args);
  const mpk_batch* batch = args->batch;
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]) * kTileColumns;
  for (uint32_t row = 0; row < batch->num_rows; ++row) {
    for (uint32_t c = first; c < first + kTileColumns; ++c) {
      const float v = value(batch->iteration, args->rank->rank, c, batch->row_token[row], batch->row_position[row]);
      if (args->task->task_type == kProduce) {
        graph.partial[row * kColumns + c] = v;
        continue;
      }
      uint64_t* word = receive_slot(args, args->rank->rank) + row * kColumns + c;
      for (uint32_t pe = 0; pe < args->rank->world; ++pe) {
        uint64_t* there = mpk::platform::peer_address(args->rank, pe, word);
        if (there != nullptr) {
          mpk_flagged_store(there, v, mpk_flagged_tag(args));
          continue;
        }
        const uint64_t flagged = static_cast<uint64_t>(mpk_flagged_tag(args)) << 32 | mpk::platform::float_bits(v);
        if (!mpk::platform::put_word(args->rank, pe, word, flagged)) return MPK_ABORT_PEER;
      }
    }
  }
  return MPK_OK;
}

inline int copy(const mpk_kernel_args* args) {
  Rank::Graph& graph = graph_of(args);
  const uint32_t peer = static_cast<uint32_t>(args->task->args[1]);
  if (args->task->args[2] == 1) {
    uint64_t* hash = g_job->ranks[args->rank->rank]->memory.data() + graph.hashes + args->rank->rank;
    return mpk::platform::put(args->rank, peer, hash, &args->batch->hash, sizeof(uint64_t)) ? MPK_OK : MPK_ABORT_PEER;
  }
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]) * kTileColumns;
  float* slot = reinterpret_cast<float*>(receive_slot(args, args->rank->rank));
  const bool reached = mpk::platform::put_rows(args->rank, peer, slot + first, kColumns * sizeof(float), graph.partial.data() + first,
                                               kColumns * sizeof(float), args->batch->num_rows, kTileColumns * sizeof(float));
  return reached ? MPK_OK : MPK_ABORT_PEER;
}

inline int reduce(const mpk_kernel_args* args) {
  Rank::Graph& graph = graph_of(args);
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]) * kTileColumns;
  for (uint32_t row = 0; row < args->batch->num_rows; ++row) {
    for (uint32_t c = first; c < first + kTileColumns; ++c) {
      float sum = 0;
      for (uint32_t pe = 0; pe < args->rank->world; ++pe) {
        sum += pe == args->rank->rank ? graph.partial[row * kColumns + c] : reinterpret_cast<float*>(receive_slot(args, pe))[row * kColumns + c];
      }
      graph.out[row * kColumns + c] = sum;
    }
  }
  return MPK_OK;
}

inline int reduce_flagged_ready(const mpk_kernel_args* args) {
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]) * kTileColumns;
  for (uint32_t pe = 0; pe < args->rank->world; ++pe) {
    for (uint32_t row = 0; row < args->batch->num_rows; ++row) {
      if (!mpk_flagged_ready(args, receive_slot(args, pe) + row * kColumns + first, kTileColumns)) return 0;
    }
  }
  return 1;
}

inline int reduce_flagged(const mpk_kernel_args* args) {
  Rank::Graph& graph = graph_of(args);
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]) * kTileColumns;
  for (uint32_t row = 0; row < args->batch->num_rows; ++row) {
    for (uint32_t c = first; c < first + kTileColumns; ++c) graph.out[row * kColumns + c] = 0;
    for (uint32_t pe = 0; pe < args->rank->world; ++pe) {
      const uint64_t* words = receive_slot(args, pe) + row * kColumns + first;
      const int code = mpk_wait_flagged(args, words, kTileColumns);
      if (code != MPK_OK) return code;
      for (uint32_t c = 0; c < kTileColumns; ++c) graph.out[row * kColumns + first + c] += mpk_flagged_value(words[c]);
    }
  }
  return MPK_OK;
}

inline int final_task(const mpk_kernel_args* args) {
  Rank& rank = *g_job->ranks[args->rank->rank];
  Rank::Graph& graph = graph_of(args);
  const mpk_batch* batch = args->batch;
  if (g_job->options.failing_rank == static_cast<int>(args->rank->rank) && batch->iteration == 5) return MPK_ABORT_KERNEL;
  for (uint32_t row = 0; row < batch->num_rows; ++row) {
    for (uint32_t c = 0; c < kColumns; ++c) {
      float sum = 0;
      for (uint32_t pe = 0; pe < args->rank->world; ++pe) sum += value(batch->iteration, pe, c, batch->row_token[row], batch->row_position[row]);
      CHECK(graph.out[row * kColumns + c] == sum, "rank %u iteration %u row %u column %u: %g, wanted %g", args->rank->rank,
            batch->iteration, row, c, static_cast<double>(graph.out[row * kColumns + c]), static_cast<double>(sum));
    }
  }
  if (graph.lowering != Lowering::kCopy) {
    for (uint32_t pe = 0; pe < args->rank->world; ++pe) {
      if (pe == args->rank->rank) continue;
      CHECK(rank.memory[graph.hashes + pe] == batch->hash, "rank %u iteration %u: batch differs from rank %u", args->rank->rank, batch->iteration, pe);
    }
  }
  for (uint32_t row = 0; row < batch->num_rows; ++row) {
    const uint32_t slot = static_cast<uint32_t>(batch->active_slot[batch->row_active[row]]), position = static_cast<uint32_t>(batch->row_position[row]);
    kv_place(rank, slot, position) = history(position == 0 ? 0 : kv_place(rank, slot, position - 1), batch->row_token[row], batch->row_position[row]);
  }
  for (uint32_t s = 0; s < batch->num_samples; ++s) {
    const int32_t row = batch->sample_row[s];
    batch->next_token[s] = next_token(kv_place(rank, static_cast<uint32_t>(batch->active_slot[batch->sample_active[s]]), static_cast<uint32_t>(batch->row_position[row])));
  }
  return MPK_OK;
}

/* A random pause before some tasks; each thread has its own generator. */
inline void stall() {
  if (!g_job->options.stalls) return;
  static std::atomic<uint64_t> threads{0};
  thread_local Random random(g_job->options.seed * 1000 + threads.fetch_add(1, std::memory_order_relaxed));
  const uint32_t drawn = random.between(0, 19999);
  if (drawn >= 100) return;
  std::this_thread::sleep_for(std::chrono::microseconds(drawn == 0 ? 2000 : drawn));
}

template <mpk_kernel_fn Run>
int stalled(const mpk_kernel_args* args) {
  stall();
  return Run(args);
}

}  // namespace fixture

#endif
