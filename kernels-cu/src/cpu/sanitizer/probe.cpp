// Test kernels of the region sanitizer (src/sanitizer/test.rs), compiled like a task's kernel.
#include <string.h>

#include <algorithm>

#include "cpu/task.h"
#include "kernel_wait.h"

namespace {

const uint32_t constants[] = {3, 1, 4, 1, 5, 9, 2, 6};

// All that a task may do without waiting: operands, its stack and scratch, its own descriptor, and the batch.
int permitted(const mpk_kernel_args* a) {
  const mpk_batch* batch = a->batch;
  const mpk_batch_config* config = a->rank->batch_config;
  int32_t sum = 0;
  uint32_t local[64];
  for (uint32_t i = 0; i < 64; ++i) local[i] = constants[i % 8] * static_cast<uint32_t>(a->task->args[0] + 1);
  std::sort(local, local + 64);
  memcpy(a->scratch, local, sizeof(local)); // all that the variant asked for
  auto* const scratch = reinterpret_cast<uint32_t*>(a->scratch);
  std::sort(scratch, scratch + 64);
  sum += static_cast<int32_t>(scratch[63] + a->params[0]);
  for (uint32_t r = 0; r < config->max_rows; ++r) sum += batch->row_token[r] + batch->row_active[r] + batch->row_position[r];
  for (uint32_t s = 0; s < config->max_batch; ++s) {
    sum += batch->active_slot[s] + batch->active_first_row[s] + batch->active_num_rows[s] + batch->active_context[s];
    for (uint32_t p = 0; p < config->pages_per_slot; ++p) sum += batch->page_table[s * config->pages_per_slot + p];
  }
  for (uint32_t s = 0; s < config->max_samples; ++s) sum += batch->sample_row[s] + batch->sample_active[s];
  if (a->rank->sym[a->rank->rank] == nullptr) return MPK_ABORT_KERNEL;
  const auto* from = reinterpret_cast<const float*>(a->inputs[0].addr);
  auto* to = reinterpret_cast<float*>(a->outputs[0].addr);
  const uint64_t n = uint64_t{a->outputs[0].dims[0]} * a->outputs[0].dims[1];
  for (uint64_t i = 0; i < n; ++i) to[i] = from[i] + static_cast<float>(sum);
  memmove(to, to + 1, (n - 1) * sizeof(float)); // what it has written, it may read
  return MPK_OK;
}

} // namespace

// args: what to do, then the address in two halves.
extern "C" int mpk_task_probe(const mpk_kernel_args* a) {
  const int32_t* args = a->task->args;
  const uint64_t address = static_cast<uint32_t>(args[1]) | uint64_t{static_cast<uint32_t>(args[2])} << 32;
  auto* const word = reinterpret_cast<uint32_t*>(address);
  uint32_t local[16] = {};
  switch (args[0]) {
    case 0: return permitted(a);
    case 1: return *const_cast<const volatile uint32_t*>(word) == 0x12345678 ? MPK_ABORT_QUEUE : MPK_OK;
    case 2: *const_cast<volatile uint32_t*>(word) = 7; return MPK_OK;
    case 3: memcpy(local, word, sizeof(local)); return local[5] == 0x12345678 ? MPK_ABORT_QUEUE : MPK_OK;
    case 4: memset(word, 0, sizeof(local)); return MPK_OK;
    case 5: __atomic_fetch_add(word, 1u, __ATOMIC_RELAXED); return MPK_OK;
    default: return MPK_ABORT_KERNEL;
  }
}

// A wait for the flagged words of input 0: it also reads and writes status, abort word and timeline.
extern "C" int mpk_task_probe_wait(const mpk_kernel_args* a) {
  return mpk_wait_flagged(a, reinterpret_cast<const uint64_t*>(a->inputs[0].addr), 4);
}

// A test of flagged words that reads whatever is at the address of args.
extern "C" int mpk_task_probe_ready(const mpk_kernel_args* a) {
  mpk_task_probe(a);
  return 0;
}
