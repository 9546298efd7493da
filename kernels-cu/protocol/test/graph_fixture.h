/* A hand-built job of several ranks in one process: each rank has its own symmetric memory and its own threads.
 *
 * The "model" is one allreduce with fake kernels that really move data. Row values are small integers that depend on rank, column,
 * token, position and iteration, so any stale, early or missing word changes the sum. The final task compares every row with a plain
 * serial sum. The model keeps a KV cache in pages: each position has a hash of all tokens up to it, computed from the position before,
 * and the next token follows from the hash. So the expected tokens of a request are known without the batching. */
#ifndef MPK_TEST_GRAPH_FIXTURE_H
#define MPK_TEST_GRAPH_FIXTURE_H

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "mpk/abi.h"
#include "thread_team.h"

namespace fixture {

constexpr uint32_t kColumns = 16, kTiles = 4, kTileColumns = kColumns / kTiles;
constexpr uint32_t kVocabulary = 97;
constexpr int32_t kEos = 13;

enum FakeTask : uint16_t { kProduce = 16, kProduceFlagged = 17, kReduceFlagged = 18, kFinal = 19, kTaskTypes = 20 };
/* Arguments of nvshmem_copy: [tile, peer, 0] copies a tile, [0, peer, 1] exchanges the batch hash. */

/* The lowering of a graph's allreduce. */
enum class Lowering {
  kCopy,         /* copies; an nvshmem_signal of the epoch before frees the buffer; ranks may drift apart */
  kCopyExchange, /* the same, and an exchange at the end that keeps ranks together */
  kFlagged,      /* one-shot; the exchange orders its buffers */
};

struct Options {
  uint32_t world = 2, workers = 2, local_schedulers = 1;
  bool dynamic = false;
  bool mixed = false; /* graphs 0 and 2 as `dynamic` says, graph 1 the other way */
  bool is_dynamic(uint32_t graph) const { return dynamic != (mixed && graph % 2 == 1); }
  const char* placement() const { return mixed ? (dynamic ? "mixed, dynamic first" : "mixed, static first") : dynamic ? "dynamic" : "static"; }
  uint64_t deadline_ns = 10000000000ull;
  std::vector<Lowering> graphs = {Lowering::kFlagged, Lowering::kCopy, Lowering::kCopyExchange};
  std::vector<uint32_t> rows = {1, 4, 8};
  uint32_t max_batch = 4, page_size = 4, max_seq_len = 64, num_requests = 200;
  uint32_t table = 0;        /* entries of the request table, for a host that fills it while the job runs; 0: all requests are known from the start */
  uint32_t admission_ring = 0; /* length of the admission ring, if there is a table */
  uint64_t idle_exit_ns = 0;
  bool on_demand = false, prefix_cache = false;
  uint32_t num_pages = 0; /* 0: half of what the slots can hold */
  uint32_t prefill_rows = 0;
  uint32_t new_tokens = 0; /* 0: random lengths */
  int drop_trigger_rank = -1; /* this rank's first copy of the largest graph does not signal */
  int failing_rank = -1;      /* this rank's final kernel fails in iteration 5 */
  uint32_t begun = 0;         /* iterations, and epochs of each graph, before the run */
  int late_rank = -1;         /* this rank's first batch step comes 20 ms after the others' */
  uint32_t trace_capacity = 0; /* a power of two; 0: no timeline */
  bool teams = false; /* schedulers of several threads */
  bool shortest = false; /* queues and rings as short as allowed; worker queues of one entry */
  bool stalls = false;   /* some tasks take up to 0.1 ms, a few of them 2 ms */
  uint32_t ranks_of_node = 0; /* number of ranks that share memory; proxies carry the rest; 0: all ranks */
  uint64_t proxy_bytes = 1 << 18; /* length of a proxy's ring */
  int deaf_rank = -1;         /* this rank's proxy carries nothing */
  bool help = false;          /* waiting workers take turns of the proxy, and its thread takes few */
  uint64_t seed = 1;
};

class Job;

struct Rank {
  std::vector<uint64_t> memory; /* symmetric */
  std::vector<uint8_t*> sym;
  std::vector<uint64_t> pushed;
  mpk_proxy proxy{};
  uint64_t proxy_head = 0;
  std::vector<uint32_t> proxy_written;
  std::vector<uint64_t> proxy_ring;
  Job* job = nullptr;
  std::mutex turn;         /* held by the thread that takes a turn of the proxy */
  std::vector<uint8_t> frames = std::vector<uint8_t>(MPK_FRAME_BYTES); /* what a turn carries; under `turn` */
  uint64_t helped = 0;     /* number of turns in which a worker has carried something; under `turn` */
  struct Graph {
    mpk_graph graph{};
    Lowering lowering;
    std::vector<mpk_task> tasks;
    std::vector<mpk_event> events;
    std::vector<mpk_dependency> dependencies;
    std::vector<uint32_t> worker_first, worker_tasks, launched;
    uint64_t receive, hashes;             /* word offsets in `memory`: [world][rows][columns], [world] */
    std::vector<float> partial, out;      /* [rows][columns] */
  };
  std::vector<std::unique_ptr<Graph>> graphs;
  std::vector<mpk_graph> abi_graphs;
  mpk_batch_config config{};
  mpk_batch batch{};
  mpk_batch_output output{};
  std::vector<std::vector<int32_t>> batch_arrays;
  /* The host's data. */
  std::vector<mpk_request> requests;
  std::vector<int32_t> request_tokens;
  std::vector<mpk_admission> admissions;
  uint32_t num_admissions = 0;
  std::vector<mpk_page_key> page_keys;
  std::vector<mpk_request_output> request_outputs;
  std::vector<int32_t> tokens;
  std::vector<uint64_t> batch_private;
  std::vector<uint32_t> kv; /* [pages][page size] */
  std::vector<mpk_queue> worker_queues, scheduler_queues;
  std::vector<std::vector<uint64_t>> slots;
  std::vector<mpk_kernel> kernels;
  std::vector<mpk_status> status;
  std::vector<mpk_trace_record> trace;
  std::vector<uint64_t> trace_count;
  mpk_rank rank{};
};

class Job {
 public:
  explicit Job(const Options& options);
  /* Starts all threads of all ranks. */
  void start();
  void join();
  /* After a join: prepares the ranks for another launch, which continues where the last one ended. */
  void reset();
  /* The tokens that a request yields alone; sets `finish` to its finish reason. */
  std::vector<int32_t> alone(const int32_t* prompt, uint32_t num_prompt_tokens, uint32_t max_new_tokens, uint32_t* finish) const;
  void run() {
    start();
    join();
  }
  /* After a run without abort: checks tokens, lengths and finish reasons of all requests on all ranks. */
  void check_results() const;
  uint64_t iterations(uint32_t rank) const { return ranks[rank]->output.decode_steps + ranks[rank]->output.prefill_iterations; }
  uint32_t abort_code(uint32_t rank) const { return __atomic_load_n(&ranks[rank]->rank.control->abort, __ATOMIC_RELAXED); }

  Options options;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<int32_t> prompt_tokens; /* each prompt is followed by room for its new tokens */
  std::vector<mpk_request> requests;
  int32_t eos = kEos;

 private:
  void build_graph(Rank& rank, uint32_t index, uint64_t* words);
  void build_batch(Rank& rank);
  bool carry_once(Rank& rank);
  void carry(Rank& rank);
  static int help(void* rank);
  void start_team(mpk_rank* rank, uint32_t scheduler);
  std::vector<std::thread> threads_, proxies_;
  std::atomic<bool> proxies_stop_{false};
  std::vector<std::unique_ptr<ThreadTeam::Meeting>> meetings_;
};

}  // namespace fixture

#endif
