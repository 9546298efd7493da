#include "cpu/sanitizer/parts.h"

#include <link.h>
#include <pthread.h>

#include <algorithm>

namespace mpk {
namespace sanitizer {
namespace {

using Ranges = std::vector<Range>;

template <typename T> void add(Ranges* found, const T* first, uint64_t count, uint32_t number = 0) {
  if (first == nullptr || count == 0) return;
  const auto start = reinterpret_cast<uintptr_t>(first);
  found->push_back({start, start + count * sizeof(T), number, false});
}

uintptr_t lowest_of_stack() {
  pthread_attr_t attributes;
  void* lowest = nullptr;
  size_t bytes = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return 0;
  pthread_attr_getstack(&attributes, &lowest, &bytes);
  pthread_attr_destroy(&attributes);
  return reinterpret_cast<uintptr_t>(lowest);
}

// This library's code and static data in memory.
Range image() {
  Range found{UINTPTR_MAX, 0, 0, false};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        Range here{UINTPTR_MAX, 0, 0, false};
        for (uint32_t i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
          here.start = std::min(here.start, start);
          here.end = std::max(here.end, start + info->dlpi_phdr[i].p_memsz);
        }
        const auto own = reinterpret_cast<uintptr_t>(&image);
        if (own < here.start || own >= here.end) return 0;
        *static_cast<Range*>(out) = here;
        return 1;
      },
      &found);
  return found;
}

// The number of scratch bytes that the graph's largest variant needs.
uint64_t most_scratch(const mpk_rank* rank) {
  uint64_t most = 0;
  for (uint32_t g = 0; g < rank->num_graphs && rank->graphs != nullptr; ++g)
    for (uint32_t v = 0; v < rank->graphs[g].num_variants; ++v) most = std::max<uint64_t>(most, rank->graphs[g].variants[v].scratch_bytes);
  return most;
}

bool waits(const mpk_kernel_args* a) { return a->task->flag_count != 0; }
bool puts(const mpk_kernel_args* a) {
  return std::any_of(a->outputs, a->outputs + a->task->num_outputs, [](const mpk_operand& o) { return o.pe != -1; });
}
bool sends(const mpk_kernel_args* a) { return a->rank->proxy != nullptr && puts(a); }

// One line for each place: its name, what a task may do there, why, and its memory.
#define MPK_PART(name, allowed, reason, ...) \
  {name, Allowed::allowed, reason, [](const Call& call, Ranges* found) { const mpk_kernel_args* a = call.args; const mpk_rank* r = a->rank; (void)r; __VA_ARGS__; }}
#define MPK_BATCH(field, count) \
  MPK_PART("mpk_batch." #field, READ, "what the iteration works on; only the batch step writes it", add(found, a->batch->field, count))

const Part parts[] = {
    // What a task may access besides its operands.
    MPK_PART("the stack of the kernel", WRITE, "local variables", {
      static thread_local const uintptr_t lowest = lowest_of_stack();
      found->push_back({lowest, call.frame, 0, false});
    }),
    MPK_PART("the scratch memory of the task", WRITE, "the bytes that its variant asked for, of its worker, while it runs",
             if (a->graph->num_variants > a->task->variant) add(found, a->scratch, a->graph->variants[a->task->variant].scratch_bytes)),
    MPK_PART("mpk_kernel_args", READ, "the arguments of the call", add(found, a, 1)),
    MPK_PART("the task's descriptor", READ, "its constants", add(found, a->task, 1)),
    MPK_PART("the task's operand descriptors", READ, "addresses and shapes of inputs", add(found, a->inputs, a->task->num_inputs)),
    MPK_PART("the task's operand descriptors", READ, "addresses and shapes of outputs", add(found, a->outputs, a->task->num_outputs)),
    MPK_PART("the parameters of its variant", READ, "shapes and flags of the variant", add(found, a->params, MPK_MAX_PARAMS)),
    MPK_PART("mpk_rank", READ, "number of the rank and of all ranks, and the addresses of the following", add(found, r, 1)),
    MPK_PART("mpk_rank.sym", READ, "where the peers' memory is", add(found, r->sym, r->world)),
    MPK_PART("mpk_batch_config", READ, "size of pages, pages of a slot", add(found, r->batch_config, 1)),
    MPK_PART("mpk_batch", READ, "numbers of rows, samples and slots in use, epoch, hash", add(found, a->batch, 1)),
    MPK_BATCH(row_token, r->batch_config->max_rows),
    MPK_BATCH(row_active, r->batch_config->max_rows),
    MPK_BATCH(row_position, r->batch_config->max_rows),
    MPK_BATCH(active_slot, r->batch_config->max_batch),
    MPK_BATCH(active_first_row, r->batch_config->max_batch),
    MPK_BATCH(active_num_rows, r->batch_config->max_batch),
    MPK_BATCH(active_context, r->batch_config->max_batch),
    MPK_BATCH(active_num_samples, r->batch_config->max_batch),
    MPK_BATCH(sample_row, r->batch_config->max_samples),
    MPK_BATCH(sample_active, r->batch_config->max_samples),
    MPK_BATCH(page_table, uint64_t{r->batch_config->max_batch} * r->batch_config->pages_per_slot),
    MPK_BATCH(sampling, r->batch_config->max_batch),
    MPK_PART("mpk_status of the task's worker", WRITE, "a wait for flagged words reports what it waits for",
             if (waits(a) && r->status != nullptr) add(found, r->status + a->worker, 1)),
    MPK_PART("mpk_control.abort", WRITE, "a wait for flagged words ends on an abort, and aborts the rank after its deadline",
             if (waits(a) || sends(a)) add(found, &r->control->abort, 2)),
    MPK_PART("mpk_control.progress", READ, "no deadline runs while other tasks of the rank make progress",
             if (waits(a)) add(found, &r->control->progress, 1)),
    MPK_PART("mpk_control.parks", READ, "no deadline runs while the rank has nothing to do", if (waits(a)) add(found, &r->control->parks, 1)),
    MPK_PART("the number of timeline records", READ, "where the record of the task is",
             if (waits(a) && r->trace != nullptr) add(found, r->trace_count + a->worker, 1)),
    MPK_PART("the timeline record of the task", WRITE, "a wait for flagged words adds its time", {
      if (waits(a) && r->trace != nullptr)
        add(found, r->trace + a->worker * r->trace_capacity + (r->trace_count[a->worker] & (r->trace_capacity - 1)), 1);
    }),
    MPK_PART("mpk_proxy", WRITE, "a put to another node takes room in the ring of frames", if (sends(a)) add(found, r->proxy, 1)),
    MPK_PART("mpk_proxy.head", READ, "how far the proxy is", if (sends(a)) add(found, r->proxy->head, 1)),
    MPK_PART("mpk_proxy.written", WRITE, "a put marks its frame as complete",
             if (sends(a)) add(found, r->proxy->written, r->proxy->capacity / MPK_FRAME_ALIGN)),
    MPK_PART("mpk_proxy.bytes", WRITE, "a put writes its frame", if (sends(a)) add(found, r->proxy->bytes, r->proxy->capacity)),
    MPK_PART("the kernels' static data", READ, "constants", {
      static const Range loaded = image();
      found->push_back(loaded);
    }),
    // Memory that no task may access. The list only provides names for reports: memory that is not in it is refused
    // too.
    MPK_PART("the scratch memory of worker %u", NOTHING, nullptr, {
      for (uint32_t w = 0; w < r->num_workers && r->scratch != nullptr; ++w) add(found, r->scratch[w], most_scratch(r), w);
    }),
    MPK_PART("mpk_status of worker %u", NOTHING, nullptr, {
      for (uint32_t w = 0; w < r->num_workers + r->num_schedulers && r->status != nullptr; ++w) add(found, r->status + w, 1, w);
    }),
    MPK_PART("the timeline of worker %u", NOTHING, nullptr, {
      for (uint32_t w = 0; w <= r->num_workers && r->trace != nullptr; ++w) add(found, r->trace + w * r->trace_capacity, r->trace_capacity, w);
    }),
    MPK_PART("mpk_control of rank %u", NOTHING, nullptr, {
      add(found, r->control, 1, r->rank);
      for (uint32_t pe = 0; pe < r->world && r->world > 1; ++pe) add(found, reinterpret_cast<const mpk_control*>(r->sym[pe]), 1, pe);
    }),
    MPK_PART("the ring of frames", NOTHING, nullptr, {
      if (r->proxy != nullptr) add(found, r->proxy, 1), add(found, r->proxy->bytes, r->proxy->capacity);
    }),
    MPK_PART("the event counters of graph %u", NOTHING, nullptr, {
      for (uint32_t g = 0; g < r->num_graphs && r->graphs != nullptr; ++g)
        add(found, r->graphs[g].counters, uint64_t{r->graphs[g].num_events} * MPK_COUNTER_STRIDE, g);
    }),
    MPK_PART("the ring of remote triggers of rank %u", NOTHING, nullptr, {
      for (uint32_t pe = 0; pe < r->world && r->remote_ring_capacity != 0; ++pe)
        add(found, r->sym[r->rank] + r->remote_rings + pe * r->remote_ring_bytes, r->remote_ring_bytes, pe);
    }),
    MPK_PART("the numbers of remote triggers pushed", NOTHING, nullptr, add(found, r->remote_pushed, r->world)),
    MPK_PART("the queues of worker %u", NOTHING, nullptr, {
      for (uint32_t w = 0; w < r->num_workers && r->worker_queues != nullptr; ++w)
        add(found, r->worker_queues + uint64_t{w} * r->num_schedulers, r->num_schedulers, w);
    }),
    MPK_PART("the queue of scheduler %u", NOTHING, nullptr, {
      const uint32_t local = r->num_schedulers - (r->world > 1 ? 1 : 0);
      for (uint32_t s = 0; r->scheduler_queues != nullptr && s < local; ++s) add(found, r->scheduler_queues + s, 1, s);
    }),
    MPK_PART("the graphs", NOTHING, nullptr, add(found, r->graphs, r->num_graphs)),
    MPK_PART("the tasks of graph %u", NOTHING, nullptr, {
      for (uint32_t g = 0; g < r->num_graphs && r->graphs != nullptr; ++g) add(found, r->graphs[g].tasks, r->graphs[g].num_tasks, g);
    }),
    MPK_PART("the events of graph %u", NOTHING, nullptr, {
      for (uint32_t g = 0; g < r->num_graphs && r->graphs != nullptr; ++g) add(found, r->graphs[g].events, r->graphs[g].num_events, g);
    }),
    MPK_PART("the operand descriptors of graph %u", NOTHING, nullptr, {
      for (uint32_t g = 0; g < r->num_graphs && r->graphs != nullptr; ++g) add(found, r->graphs[g].operands, r->graphs[g].num_operands, g);
    }),
    MPK_PART("the variants of graph %u", NOTHING, nullptr, {
      for (uint32_t g = 0; g < r->num_graphs && r->graphs != nullptr; ++g) add(found, r->graphs[g].variants, r->graphs[g].num_variants, g);
    }),
    MPK_PART("the private state of the batch step", NOTHING, nullptr,
             if (r->batch_private != nullptr) add(found, static_cast<const uint8_t*>(r->batch_private), mpk_batch_private_bytes(r->batch_config))),
    MPK_PART("the request table", NOTHING, nullptr, add(found, r->batch_config->requests, r->batch_config->num_requests)),
    MPK_PART("the admission ring", NOTHING, nullptr, add(found, r->batch_config->admissions, r->batch_config->admission_ring)),
    MPK_PART("the page keys", NOTHING, nullptr, add(found, r->batch_config->page_keys, r->batch_config->num_page_keys)),
    MPK_PART("the end-of-sequence ids", NOTHING, nullptr, add(found, r->batch_config->eos, r->batch_config->num_eos)),
    MPK_PART("mpk_batch_output", NOTHING, nullptr, add(found, r->batch_output, 1)),
    MPK_PART("the results of request %u", NOTHING, nullptr, {
      for (uint32_t i = 0; i < r->batch_config->num_requests && r->batch_output != nullptr && r->batch_output->requests != nullptr; ++i)
        add(found, r->batch_output->requests + i, 1, i);
    }),
};

} // namespace

void add_permitted(const Call& call, Ranges* found) {
  for (const Part& part : parts) {
    if (part.allowed == Allowed::NOTHING) break;
    const size_t first = found->size();
    part.ranges(call, found);
    for (size_t i = first; i < found->size(); ++i) (*found)[i].write = part.allowed == Allowed::WRITE;
  }
}

const Part* part_of(const Call& call, uintptr_t at, Range* range) {
  Ranges found;
  for (const Part& part : parts) {
    found.clear();
    part.ranges(call, &found);
    for (const Range& one : found) {
      if (at < one.start || at >= one.end) continue;
      *range = one;
      return &part;
    }
  }
  return nullptr;
}

} // namespace sanitizer
} // namespace mpk
