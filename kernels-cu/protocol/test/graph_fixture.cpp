#include "graph_fixture.h"

#include <algorithm>
#include <bit>

#include "graph_fixture_tasks.h"
#include "identifiers.h"
#include "scheduler_loop.h"

namespace fixture {

namespace {

/* A task that has no place in the graph yet. */
struct Draft {
  uint16_t type;
  uint64_t trigger;
  std::vector<uint32_t> needs; /* events of this iteration (static) */
  uint32_t launcher;           /* the only event that launches it (dynamic) */
  int32_t args[3];
  int carried = -1;            /* event of the epoch before */
};

}  // namespace

void Job::build_graph(Rank& rank, uint32_t index, uint64_t* words) {
  rank.graphs.push_back(std::make_unique<Rank::Graph>());
  Rank::Graph& graph = *rank.graphs.back();
  graph.lowering = options.graphs[index];
  const uint32_t me = rank.rank.rank, world = options.world, rows = options.rows[index];
  const bool flagged = graph.lowering == Lowering::kFlagged, exchange = graph.lowering != Lowering::kCopy && world > 1, dynamic = options.is_dynamic(index);
  std::vector<mpk_event>& events = graph.events;
  auto add_event = [&](uint32_t triggers, bool remote, uint16_t type = MPK_EVENT_LAUNCH_TASKS) {
    events.push_back({triggers, 0, 0, dynamic ? type : static_cast<uint16_t>(MPK_EVENT_EMPTY), static_cast<uint16_t>(remote)});
    return static_cast<uint32_t>(events.size() - 1);
  };
  events.push_back({1, 0, 0, MPK_EVENT_TERMINATION_TYPE, 0});
  events.push_back({1, 0, 0, MPK_EVENT_LAUNCH_DEPENDENT_TASKS, 0});
  events.push_back({1, 0, 0, MPK_EVENT_END_OF_TASK_GRAPH, 0});
  auto local = [&](uint32_t event) { return mpk::make_event_id(MPK_EVENT_TAG_LOCAL, me, event); };
  auto at = [&](uint32_t pe, uint32_t event) { return mpk::make_event_id(MPK_EVENT_TAG_NVSHMEM, pe, event); };
  std::vector<Draft> drafts;
  const uint32_t reduced = add_event(kTiles, false, MPK_EVENT_LAUNCH_MASSIVE_TASKS);
  const uint32_t arrived_hash = exchange ? add_event(world - 1, true) : 0;
  const uint32_t join_final = add_event(exchange ? 2 : 1, false);
  for (int32_t t = 0; t < static_cast<int32_t>(kTiles); ++t) {
    if (flagged) {
      drafts.push_back({kProduceFlagged, MPK_EVENT_INVALID, {MPK_EVENT_BEGIN}, MPK_EVENT_BEGIN, {t, 0, 0}});
      drafts.push_back({kReduceFlagged, local(reduced), {MPK_EVENT_BEGIN}, MPK_EVENT_BEGIN, {t, 0, 0}});
      continue;
    }
    const uint32_t partial = add_event(1, false), arrived = add_event(world - 1, true), freed = add_event(world - 1, true, MPK_EVENT_EMPTY);
    const uint32_t join = add_event(2, false), done = add_event(1, false);
    drafts.push_back({kProduce, local(partial), {MPK_EVENT_BEGIN}, MPK_EVENT_BEGIN, {t, 0, 0}});
    for (uint32_t pe = 0; pe < world; ++pe) {
      if (pe == me) continue;
      const bool drop = options.drop_trigger_rank == static_cast<int>(me) && index + 1 == options.graphs.size() && t == 0;
      drafts.push_back({MPK_TASK_TYPE_NVSHMEM_COPY, drop ? MPK_EVENT_INVALID : at(pe, arrived), {partial}, partial, {t, static_cast<int32_t>(pe), 0}, static_cast<int>(freed)});
    }
    if (dynamic) {
      drafts.push_back({MPK_TASK_TYPE_EMPTY, local(join), {}, partial, {}});
      drafts.push_back({MPK_TASK_TYPE_EMPTY, local(join), {}, arrived, {}});
    }
    drafts.push_back({MPK_TASK_TYPE_REDUCE, local(done), {partial, arrived}, join, {t, 0, 0}});
    for (uint32_t pe = 0; pe < world; ++pe) {
      if (pe != me) drafts.push_back({MPK_TASK_TYPE_NVSHMEM_SIGNAL, at(pe, freed), {done}, done, {}});
    }
    drafts.push_back({MPK_TASK_TYPE_EMPTY, local(reduced), {done}, done, {}});
  }
  for (uint32_t pe = 0; exchange && pe < world; ++pe) {
    if (pe != me) drafts.push_back({MPK_TASK_TYPE_NVSHMEM_COPY, at(pe, arrived_hash), {reduced}, reduced, {0, static_cast<int32_t>(pe), 1}});
  }
  if (dynamic) {
    drafts.push_back({MPK_TASK_TYPE_EMPTY, local(join_final), {}, reduced, {}});
    if (exchange) drafts.push_back({MPK_TASK_TYPE_EMPTY, local(join_final), {}, arrived_hash, {}});
  }
  std::vector<uint32_t> final_needs = {reduced};
  if (exchange) final_needs.push_back(arrived_hash);
  drafts.push_back({kFinal, local(MPK_EVENT_END), final_needs, join_final, {}});

  if (dynamic) std::stable_sort(drafts.begin(), drafts.end(), [](const Draft& a, const Draft& b) { return a.launcher < b.launcher; });
  mpk_task core{};
  core.trigger_event = MPK_EVENT_INVALID;
  core.worker = core.op = UINT32_MAX;
  graph.tasks = {core, core};
  graph.tasks[1].task_type = MPK_TASK_TYPE_BEGIN_TASK_GRAPH;
  graph.tasks[1].trigger_event = local(MPK_EVENT_BEGIN);
  std::vector<std::vector<uint32_t>> lists(options.workers);
  uint32_t turn = 0;
  for (const Draft& draft : drafts) {
    const uint32_t number = static_cast<uint32_t>(graph.tasks.size());
    mpk_task task{};
    task.trigger_event = draft.trigger;
    task.task_type = draft.type;
    task.op = draft.type;
    task.worker = UINT32_MAX;
    std::copy(draft.args, draft.args + 3, task.args);
    task.flags = draft.type == kReduceFlagged ? MPK_TASK_FLAGGED_INPUTS : 0;
    task.flag_count = draft.type == kReduceFlagged || draft.type == kProduceFlagged;
    task.first_dependency = static_cast<uint32_t>(graph.dependencies.size());
    if (dynamic) {
      graph.dependencies.push_back({draft.launcher, 0});
      mpk_event& launcher = events[draft.launcher];
      if (launcher.first_task == launcher.last_task) launcher.first_task = number;
      launcher.last_task = number + 1;
    } else {
      for (uint32_t event : draft.needs) graph.dependencies.push_back({event, 0});
      /* The smallest graph gives work only to the first worker. */
      task.worker = index == 0 ? 0 : turn++ % options.workers;
      lists[task.worker].push_back(number);
    }
    if (draft.carried >= 0) graph.dependencies.push_back({static_cast<uint32_t>(draft.carried), 1});
    task.num_dependencies = static_cast<uint16_t>(graph.dependencies.size() - task.first_dependency);
    graph.tasks.push_back(task);
  }
  graph.worker_first.push_back(0);
  for (const auto& list : lists) {
    graph.worker_tasks.insert(graph.worker_tasks.end(), list.begin(), list.end());
    graph.worker_first.push_back(static_cast<uint32_t>(graph.worker_tasks.size()));
  }
  graph.launched.assign(events.size(), options.begun);
  graph.partial.assign(rows * kColumns, 0);
  graph.out.assign(rows * kColumns, 0);
  const uint64_t counters = *words;
  graph.receive = counters + events.size() * MPK_COUNTER_STRIDE;
  graph.hashes = graph.receive + static_cast<uint64_t>(world) * rows * kColumns;
  *words = graph.hashes + world;
  for (size_t e = 0; e < events.size(); ++e) rank.memory[counters + e * MPK_COUNTER_STRIDE] = static_cast<uint64_t>(events[e].num_triggers) * options.begun;
  /* For flagged words the epoch matters; for copied floats any value will do. */
  for (uint64_t w = graph.receive; w < graph.hashes; ++w) rank.memory[w] = static_cast<uint64_t>(options.begun) << 32;

  mpk_graph& abi = graph.graph;
  abi.num_tasks = static_cast<uint32_t>(graph.tasks.size());
  abi.num_events = static_cast<uint32_t>(events.size());
  abi.num_dependencies = static_cast<uint32_t>(graph.dependencies.size());
  abi.num_workers = options.workers;
  abi.rows = rows;
  abi.active = abi.samples = std::min(rows, options.max_batch);
  abi.placement = dynamic ? MPK_DYNAMIC : MPK_STATIC;
  abi.tasks = graph.tasks.data();
  abi.events = events.data();
  abi.dependencies = graph.dependencies.data();
  abi.worker_first = graph.worker_first.data();
  abi.worker_tasks = graph.worker_tasks.data();
  abi.counters = rank.memory.data() + counters;
  abi.launched = graph.launched.data();
  rank.abi_graphs.push_back(abi);
}

void Job::build_batch(Rank& rank) {
  mpk_batch_config& config = rank.config;
  config.max_batch = options.max_batch;
  config.max_seq_len = options.max_seq_len;
  config.page_size = options.page_size;
  config.pages_per_slot = (options.max_seq_len + options.page_size - 1) / options.page_size;
  config.num_pages = options.num_pages != 0 ? options.num_pages : config.pages_per_slot * options.max_batch / 2; /* scarce: admission must wait for pages */
  config.max_rows = *std::max_element(options.rows.begin(), options.rows.end());
  config.max_samples = options.max_batch;
  config.num_requests = std::max<uint32_t>(1, static_cast<uint32_t>(requests.size()));
  config.num_eos = options.new_tokens == 0 ? 1 : 0;
  config.generate = 1;
  config.on_demand = options.on_demand;
  config.prefill_rows = options.prefill_rows;
  config.idle_exit_ns = options.idle_exit_ns;
  rank.requests = requests;
  rank.request_tokens = prompt_tokens;
  if (options.table == 0) {
    for (uint32_t r = 0; r < requests.size(); ++r) rank.admissions.push_back({MPK_ADMIT, r});
    rank.admissions.push_back({MPK_STOP, 0});
    rank.num_admissions = static_cast<uint32_t>(rank.admissions.size());
    rank.admissions.resize(std::bit_ceil(rank.admissions.size()));
  } else {
    config.num_requests = options.table;
    rank.requests.assign(options.table, {});
    rank.request_tokens.assign(static_cast<size_t>(options.table) * 2 * options.max_seq_len, -1);
    rank.admissions.assign(options.admission_ring, {});
    if (options.prefix_cache) {
      rank.page_keys.resize(MPK_PAGE_KEYS(rank.request_tokens.size(), config.page_size));
      config.num_page_keys = static_cast<uint32_t>(rank.page_keys.size());
      config.page_keys = rank.page_keys.data();
    }
  }
  config.admission_ring = static_cast<uint32_t>(rank.admissions.size());
  config.tokens = rank.request_tokens.data();
  config.requests = rank.requests.data();
  config.eos = &eos;
  config.admissions = rank.admissions.data();
  config.num_admissions = &rank.num_admissions;
  auto array = [&](size_t count) {
    rank.batch_arrays.emplace_back(count, 0);
    return rank.batch_arrays.back().data();
  };
  mpk_batch& batch = rank.batch;
  batch.row_token = array(config.max_rows);
  batch.row_active = array(config.max_rows);
  batch.row_position = array(config.max_rows);
  batch.active_slot = array(config.max_batch);
  batch.active_first_row = array(config.max_batch);
  batch.active_num_rows = array(config.max_batch);
  batch.active_context = array(config.max_batch);
  batch.sample_row = array(config.max_batch);
  batch.sample_active = array(config.max_batch);
  batch.page_table = array(static_cast<size_t>(config.max_batch) * config.pages_per_slot);
  batch.next_token = array(config.max_batch);
  batch.active_num_samples = array(config.max_batch);
  uint32_t outputs = options.table * options.max_seq_len;
  for (const mpk_request& request : requests) outputs = std::max(outputs, request.first_output + request.max_new_tokens);
  rank.tokens.assign(outputs, -1);
  rank.request_outputs.assign(config.num_requests, {0, 0, 0});
  rank.kv.assign(static_cast<size_t>(config.num_pages) * config.page_size, 0);
  rank.output.requests = rank.request_outputs.data();
  rank.output.tokens = rank.tokens.data();
  rank.batch_private.assign(mpk_batch_private_bytes(&config) / 8 + 1, 0);
}

Job::Job(const Options& given) : options(given) {
  g_job = this;
  Random random(options.seed);
  uint32_t outputs = 0;
  for (uint32_t r = 0; r < options.num_requests; ++r) {
    const uint32_t prompt = random.between(1, 20), fresh = options.new_tokens ? options.new_tokens : random.between(1, 50);
    requests.push_back({static_cast<uint32_t>(prompt_tokens.size()), prompt, fresh, outputs, {}, 0, 0});
    outputs += fresh;
    for (uint32_t i = 0; i < prompt; ++i) prompt_tokens.push_back(static_cast<int32_t>(random.between(0, kVocabulary - 1)));
    prompt_tokens.resize(prompt_tokens.size() + fresh, -1);
  }
  const bool scheduled = options.dynamic || options.mixed;
  const uint32_t schedulers = scheduled ? options.local_schedulers + (options.world > 1) : 0;
  for (uint32_t r = 0; r < options.world; ++r) {
    ranks.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks.back();
    rank.memory.assign(1 << 16, 0);
    mpk_rank& abi = rank.rank;
    abi.abi_version = MPK_ABI_VERSION;
    abi.rank = r;
    abi.world = options.world;
    abi.num_workers = options.workers;
    abi.num_schedulers = schedulers;
    abi.placement = options.mixed ? MPK_MIXED : options.dynamic ? MPK_DYNAMIC : MPK_STATIC;
    abi.oversubscribed = 1;
    abi.deadline_ns = options.deadline_ns;
    abi.control = reinterpret_cast<mpk_control*>(rank.memory.data());
    uint64_t words = sizeof(mpk_control) / 8;
    for (uint32_t g = 0; g < options.graphs.size(); ++g) build_graph(rank, g, &words);
    abi.num_graphs = static_cast<uint32_t>(rank.abi_graphs.size());
    abi.graphs = rank.abi_graphs.data();
    build_batch(rank);
    abi.batch_config = &rank.config;
    abi.batch = &rank.batch;
    abi.batch_output = &rank.output;
    abi.batch_private = rank.batch_private.data();
    abi.remote_rings = words * 8;
    abi.remote_ring_capacity = 4 * (2 * kTiles + 1 + 2 * kTiles); /* copies, signals and the exchange; plus its own triggers */
    uint64_t most_events = 0;
    if (options.shortest) abi.remote_ring_capacity = 1;
    for (const mpk_graph& graph : rank.abi_graphs) {
      uint64_t triggers = 0;
      for (uint32_t e = 0; e < graph.num_events; ++e) triggers += graph.events[e].remote_triggers ? graph.events[e].num_triggers : 0;
      /* ring.h: twice an iteration's remote triggers of all senders. */
      if (options.shortest) abi.remote_ring_capacity = std::max(abi.remote_ring_capacity, 2 * triggers);
      most_events = std::max<uint64_t>(most_events, graph.num_events);
    }
    abi.remote_ring_bytes = sizeof(mpk_remote_ring) + abi.remote_ring_capacity * sizeof(mpk_remote_entry);
    CHECK(abi.remote_rings + options.world * abi.remote_ring_bytes <= rank.memory.size() * 8, "symmetric memory too small");
    rank.pushed.assign(options.world, 0);
    abi.remote_pushed = rank.pushed.data();
    auto add_queue = [&](std::vector<mpk_queue>& queues, uint32_t capacity) {
      rank.slots.emplace_back(capacity, 0);
      mpk_queue queue{};
      queue.slots = rank.slots.back().data();
      queue.mask = capacity - 1;
      queues.push_back(queue);
    };
    for (uint32_t q = 0; q < options.workers * schedulers; ++q) add_queue(rank.worker_queues, options.shortest ? 1 : 4); /* often full */
    for (uint32_t q = 0; scheduled && q < options.local_schedulers; ++q) add_queue(rank.scheduler_queues, options.shortest ? static_cast<uint32_t>(std::bit_ceil(most_events + 1)) : 64);
    abi.worker_queues = rank.worker_queues.data();
    abi.scheduler_queues = rank.scheduler_queues.data();
    rank.kernels.assign(kTaskTypes, {nullptr, nullptr});
    rank.kernels[kProduce].run = rank.kernels[kProduceFlagged].run = stalled<produce>;
    rank.kernels[MPK_TASK_TYPE_NVSHMEM_COPY].run = stalled<copy>;
    rank.kernels[MPK_TASK_TYPE_REDUCE].run = stalled<reduce>;
    rank.kernels[kReduceFlagged] = {stalled<reduce_flagged>, reduce_flagged_ready};
    rank.kernels[kFinal].run = stalled<final_task>;
    abi.kernels = rank.kernels.data();
    rank.status.assign(options.workers + schedulers, {});
    abi.status = rank.status.data();
    abi.stall_op = UINT32_MAX;
    if (options.trace_capacity != 0) {
      rank.trace.assign(static_cast<size_t>(options.workers + 1) * options.trace_capacity, {});
      rank.trace_count.assign(options.workers + 1, 0);
      abi.trace = rank.trace.data();
      abi.trace_count = rank.trace_count.data();
      abi.trace_capacity = options.trace_capacity;
    }
  }
  for (auto& rank : ranks) {
    for (auto& peer : ranks) rank->sym.push_back(reinterpret_cast<uint8_t*>(peer->memory.data()));
    rank->rank.sym = rank->sym.data();
    if (options.ranks_of_node == 0) continue;
    for (uint32_t pe = 0; pe < options.world; ++pe) {
      if (pe / options.ranks_of_node != rank->rank.rank / options.ranks_of_node) rank->sym[pe] = nullptr;
    }
    rank->proxy_ring.assign(options.proxy_bytes / 8, 0);
    rank->proxy_written.assign(options.proxy_bytes / MPK_FRAME_ALIGN, 0);
    rank->proxy.capacity = options.proxy_bytes;
    rank->proxy.head = &rank->proxy_head;
    rank->proxy.written = rank->proxy_written.data();
    rank->proxy.bytes = reinterpret_cast<uint8_t*>(rank->proxy_ring.data());
    rank->job = this;
    if (options.help) {
      rank->proxy.help = help;
      rank->proxy.helper = rank.get();
    }
    rank->rank.proxy = &rank->proxy;
  }
}

/* One turn of a rank's proxy: carries frames to their receiver in order. False if there are none. If several proxies send to one
 * rank, they take turns, as the receiver's own proxy would make them. */
bool Job::carry_once(Rank& rank) {
  static std::mutex receivers[64];
  const uint32_t to = options.deaf_rank == static_cast<int>(rank.rank.rank) ? UINT32_MAX : mpk_proxy_next(&rank.proxy);
  if (to == UINT32_MAX) return false;
  std::vector<uint8_t>& frames = rank.frames;
  const uint64_t bytes = mpk_proxy_take(&rank.proxy, frames.data(), frames.size());
  Rank& receiver = *ranks[to];
  const std::lock_guard<std::mutex> one(receivers[to]);
  const int code = mpk_proxy_apply(reinterpret_cast<uint8_t*>(receiver.memory.data()), receiver.memory.size() * 8, frames.data(), bytes);
  CHECK(code == MPK_OK, "rank %u sent what are no frames", rank.rank.rank);
  return true;
}

/* The proxy's thread. */
void Job::carry(Rank& rank) {
  for (;;) {
    const bool last = proxies_stop_.load(std::memory_order_acquire);
    bool any;
    {
      const std::lock_guard<std::mutex> turn(rank.turn);
      any = carry_once(rank);
    }
    if (!any && last) return;
    if (options.help) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    else if (!any) std::this_thread::yield();
  }
}

/* mpk_proxy.help */
int Job::help(void* helper) {
  Rank& rank = *static_cast<Rank*>(helper);
  const std::unique_lock<std::mutex> turn(rank.turn, std::try_to_lock);
  if (!turn.owns_lock()) return 0;
  rank.helped += rank.job->carry_once(rank);
  return 1;
}

void Job::start() {
  proxies_stop_ = false;
  for (auto& rank : ranks) {
    if (rank->rank.proxy != nullptr) proxies_.emplace_back([this, &rank] { carry(*rank); });
  }
  for (auto& rank : ranks) {
    mpk_rank* abi = &rank->rank;
    if (!mpk::batch_state(abi)->begun) mpk::batch_state(abi)->iteration = options.begun;
    for (uint32_t w = 0; w < abi->num_workers; ++w) {
      threads_.emplace_back([abi, w, late = options.late_rank == static_cast<int>(abi->rank)] {
        if (w == 0 && late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (w == 0) mpk_cpu_begin(abi); /* this may park; the other workers wait */
        mpk_cpu_worker(abi, w);
      });
    }
    for (uint32_t s = 0; s < abi->num_schedulers; ++s) {
      if (options.teams) start_team(abi, s);
      else threads_.emplace_back([abi, s] { mpk_cpu_scheduler(abi, s); });
    }
  }
}

/* Does what mpk_cpu_scheduler does, with a team. */
void Job::start_team(mpk_rank* rank, uint32_t index) {
  ThreadTeam::Meeting* const meeting = meetings_.emplace_back(std::make_unique<ThreadTeam::Meeting>()).get();
  for (uint32_t member = 0; member < ThreadTeam::kSize; ++member) {
    threads_.emplace_back([=] {
      mpk::PreparedStep prepared = {};
      mpk::Scheduler self = {rank, index, &rank->status[rank->num_workers + index], &prepared};
      std::vector<uint64_t> heads(rank->world, 0); /* only the leader uses them */
      const bool local = index < mpk::num_local_schedulers(rank);
      const auto step = [&](mpk::Found* found) {
        return local ? mpk::local_scheduler_step(&self, found) : mpk::remote_scheduler_step(&self, heads.data(), found);
      };
      const int code = mpk::scheduler_loop(ThreadTeam{meeting, member}, &self, step, [] {});
      if (member != 0) return;
      if (code == MPK_OK) mpk::report_state(self.status, MPK_WORKER_LEFT);
      else mpk::abort_broadcast(rank, static_cast<uint32_t>(code));
    });
  }
}

void Job::join() {
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  proxies_stop_.store(true, std::memory_order_release);
  for (auto& proxy : proxies_) proxy.join();
  proxies_.clear();
}

void Job::reset() {
  for (auto& rank : ranks) {
    CHECK(rank->rank.control->launch & MPK_LAUNCH_STOP, "the last launch has not ended");
    rank->rank.control->iteration = rank->rank.control->launch = 0;
    for (auto* queues : {&rank->worker_queues, &rank->scheduler_queues}) {
      for (mpk_queue& queue : *queues) {
        queue.head = queue.tail = 0;
        std::fill_n(queue.slots, queue.mask + 1, 0);
      }
    }
    for (uint32_t sender = 0; (options.dynamic || options.mixed) && sender < options.world; ++sender) mpk::ring_of(&rank->rank, sender)->tail = 0;
    std::fill(rank->pushed.begin(), rank->pushed.end(), 0);
  }
}

std::vector<int32_t> Job::alone(const int32_t* prompt, uint32_t num_prompt_tokens, uint32_t max_new_tokens, uint32_t* finish) const {
  std::vector<int32_t> tokens;
  uint32_t known = 0;
  for (uint32_t i = 0; i < num_prompt_tokens; ++i) known = history(known, prompt[i], static_cast<int32_t>(i));
  *finish = MPK_FINISH_LENGTH;
  while (tokens.size() < max_new_tokens && num_prompt_tokens + tokens.size() < options.max_seq_len) {
    const int32_t token = next_token(known);
    known = history(known, token, static_cast<int32_t>(num_prompt_tokens + tokens.size()));
    tokens.push_back(token);
    if (options.new_tokens == 0 && token == kEos) {
      *finish = MPK_FINISH_EOS;
      break;
    }
  }
  return tokens;
}

void Job::check_results() const {
  for (uint32_t r = 0; r < options.world; ++r) {
    const Rank& rank = *ranks[r];
    CHECK(abort_code(r) == MPK_OK, "rank %u aborted with %u", r, abort_code(r));
    CHECK(rank.rank.control->running == 0, "rank %u: workers still inside", r);
    for (const mpk_status& status : rank.status) CHECK(status.state == MPK_WORKER_LEFT, "rank %u: a loop has not left", r);
    for (uint32_t q = 0; q < requests.size(); ++q) {
      const mpk_request& request = requests[q];
      uint32_t finish = 0;
      const std::vector<int32_t> tokens = alone(prompt_tokens.data() + request.first_token, request.num_prompt_tokens, request.max_new_tokens, &finish);
      for (uint32_t i = 0; i < tokens.size(); ++i) {
        CHECK(rank.tokens[request.first_output + i] == tokens[i], "rank %u request %u token %u: %d, wanted %d", r, q, i, rank.tokens[request.first_output + i], tokens[i]);
      }
      CHECK(rank.request_outputs[q].num_tokens == tokens.size(), "request %u: %u tokens, wanted %zu", q, rank.request_outputs[q].num_tokens, tokens.size());
      CHECK(rank.request_outputs[q].finish == finish, "request %u: finish %u", q, rank.request_outputs[q].finish);
    }
  }
}

}  // namespace fixture
