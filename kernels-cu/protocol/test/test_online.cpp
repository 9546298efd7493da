/* Requests come and go while a hand-built job of several ranks runs: random arrivals and cancels, a small request table and a
 * short admission ring that are reused again and again, idle times, kernels that end and start again. The hosts are separate
 * threads of any speed. Every token is checked on every rank; batches are compared between ranks in each iteration.
 * MPK_SOAK_REQUESTS: requests of each job. */
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include "pages_check.h"
#include "graph_fixture.h"

using fixture::Job;
using fixture::Lowering;
using fixture::Options;
using fixture::Rank;

namespace {

constexpr uint32_t kNobody = UINT32_MAX;

template <typename T>
T acquire(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* An entry on its way to a rank's host. */
struct Message {
  uint32_t kind, number;
  std::vector<int32_t> prompt;
  uint32_t max_new_tokens;
  uint64_t after_finished; /* requests that must have ended on the rank before; one of them is the previous holder of the number and its memory */
};

/* Keys of a prompt's full pages. A simple hash is good enough here, because nobody chooses the texts. */
std::vector<mpk_page_key> keys_of(const std::vector<int32_t>& prompt, uint32_t page_size) {
  std::vector<mpk_page_key> keys;
  mpk_page_key key = {{1, 2}};
  for (size_t i = 0; i < prompt.size(); ++i) {
    for (uint64_t& word : key.words) word = mpk::folded(word, static_cast<uint64_t>(prompt[i]));
    if ((i + 1) % page_size == 0) keys.push_back(key);
  }
  return keys;
}

/* A rank's host: takes messages in order as its rank makes progress, and confirms them. */
class RankHost {
 public:
  RankHost(Rank* rank, const Options& options, uint64_t seed) : rank_(rank), options_(options), random_(seed) {}

  /* Tries to write one entry; false if the rank has not made enough progress. */
  bool write(const Message& message) {
    const mpk_batch_output& output = rank_->output;
    const uint32_t taken = acquire(&output.entries_taken);
    if (((written_ - taken) & MPK_ENTRY_COUNT_MASK) >= options_.admission_ring) return false;
    if (message.kind == MPK_ADMIT) {
      if (acquire(&output.finished) < message.after_finished) return false;
      mpk_request request{};
      request.first_token = message.number * 2 * options_.max_seq_len;
      request.num_prompt_tokens = static_cast<uint32_t>(message.prompt.size());
      request.max_new_tokens = message.max_new_tokens;
      request.first_output = message.number * options_.max_seq_len;
      std::copy(message.prompt.begin(), message.prompt.end(), rank_->request_tokens.begin() + request.first_token);
      if (options_.prefix_cache) {
        const std::vector<mpk_page_key> keys = keys_of(message.prompt, options_.page_size);
        std::copy(keys.begin(), keys.end(), rank_->page_keys.begin() + MPK_FIRST_PAGE_KEY(request.first_token, options_.page_size));
      }
      rank_->requests[message.number] = request;
      __atomic_store_n(&rank_->request_outputs[message.number].num_tokens, 0u, __ATOMIC_RELAXED);
      __atomic_store_n(&rank_->request_outputs[message.number].finish, static_cast<uint32_t>(MPK_RUNNING), __ATOMIC_RELAXED);
    }
    rank_->admissions[written_ % options_.admission_ring] = {message.kind, message.number};
    written_ = (written_ + 1) & MPK_ENTRY_COUNT_MASK;
    return true;
  }
  /* Makes the written entries visible to the rank. Release: pairs with entries_here. */
  void count() {
    __atomic_store_n(&rank_->num_admissions, written_, __ATOMIC_RELEASE);
    if (random_.between(0, 9) != 0) mpk_cpu_wake(&rank_->num_admissions); /* sometimes not, because the kernel also looks by itself */
  }
  bool all_taken() const { return acquire(&rank_->output.entries_taken) == written_; }

 private:
  Rank* rank_;
  const Options& options_;
  Random random_;
  uint32_t written_ = 0;
};

struct Request {
  std::vector<int32_t> prompt, tokens;
  uint32_t max_new_tokens, finish;
  uint32_t cancel_at; /* number of its tokens at which it is cancelled; more than it can get: never */
  bool cancelled = false;
  uint32_t ended_on = 0; /* number of ranks */
};

/* Rank 0's host: assigns numbers, orders entries, and checks results. */
class Hosts {
 public:
  Hosts(Job* job, uint32_t requests, uint64_t seed) : job_(job), random_(seed), count_(requests), holders_(job->options.world) {
    for (uint32_t r = 0; r < job->options.world; ++r) {
      hosts_.emplace_back(job->ranks[r].get(), job->options, seed + r);
      holders_[r].assign(job->options.table, kNobody);
    }
    current_.assign(job->options.table, kNobody);
  }

  /* Looks at everything once; false if all is done and the stop has been sent. */
  bool turn(bool may_add) {
    drain();
    if (may_add && requests_.size() < count_ && random_.between(0, 2) == 0) add();
    cancel_some();
    if (!stopped_ && requests_.size() == count_ && ended_ == count_) {
      send({MPK_STOP, 0, {}, 0, 0});
      stopped_ = true;
    }
    deliver();
    return !stopped_ || !queue_.empty();
  }
  /* Entries that no kernel has taken: if the kernel has ended, it must start again. */
  bool pending() const {
    return !queue_.empty() || !hosts_[0].all_taken();
  }
  /* Reads rank 0's tokens from another thread while the kernel runs, as a server does, and checks the tokens of each
   * request so far. Not called during a turn. */
  void read() {
    for (uint32_t number = 0; number < job_->options.table; ++number) {
      if (holders_[0][number] == kNobody) continue;
      Rank& rank = *job_->ranks[0];
      const Request& request = requests_[holders_[0][number]];
      const uint32_t tokens = acquire(&rank.request_outputs[number].num_tokens);
      CHECK(tokens <= request.tokens.size(), "request %u: %u tokens", holders_[0][number], tokens);
      for (uint32_t i = 0; i < tokens; ++i) {
        CHECK(rank.tokens[rank.requests[number].first_output + i] == request.tokens[i], "read: request %u token %u", holders_[0][number], i);
      }
    }
  }
  bool quiet() const { return queue_.empty() && requests_.size() == ended_; }
  uint32_t ended() const { return ended_; }
  uint32_t cancels = 0, full = 0;

 private:
  void send(Message message) { queue_.push_back({std::move(message), 0}); }

  void add() {
    const auto free = std::find(current_.begin(), current_.end(), kNobody);
    if (free == current_.end() || queue_.size() >= 2 * job_->options.admission_ring) {
      ++full; /* the caller is told, and tries again */
      return;
    }
    Request request;
    const uint32_t number = static_cast<uint32_t>(free - current_.begin());
    request.prompt.resize(random_.between(1, 20));
    for (int32_t& token : request.prompt) token = static_cast<int32_t>(random_.between(0, fixture::kVocabulary - 1));
    /* Most of them start with one of three texts. */
    const uint32_t text = random_.between(0, 3), common = std::min(random_.between(0, 20), static_cast<uint32_t>(request.prompt.size()));
    for (uint32_t i = 0; i < common && text != 0; ++i) request.prompt[i] = static_cast<int32_t>((i * 7 + text * 31) % fixture::kVocabulary);
    request.max_new_tokens = random_.between(1, 40);
    request.cancel_at = random_.between(0, 120);
    request.tokens = job_->alone(request.prompt.data(), static_cast<uint32_t>(request.prompt.size()), request.max_new_tokens, &request.finish);
    *free = static_cast<uint32_t>(requests_.size());
    send({MPK_ADMIT, number, request.prompt, request.max_new_tokens, acquire(&job_->ranks[0]->output.finished)});
    requests_.push_back(std::move(request));
  }

  /* Based on progress of the kernel, not on time: so the same number of requests end by themselves on slow and fast
   * machines. */
  void cancel_some() {
    for (uint32_t number = 0; number < job_->options.table; ++number) {
      if (current_[number] == kNobody) continue;
      Request& request = requests_[current_[number]];
      const bool has_begun = holders_[0][number] == current_[number];
      const uint32_t tokens = has_begun ? acquire(&job_->ranks[0]->request_outputs[number].num_tokens) : 0;
      if (request.cancelled || tokens < request.cancel_at) continue;
      request.cancelled = true;
      ++cancels;
      send({MPK_CANCEL, number, {}, 0, 0});
    }
  }

  /* Sends to the other ranks first, each at its own pace; then to rank 0, after all of them have confirmed. Ranks may be
   * at different entries, but on each rank the entries are in order. */
  void deliver() {
    const uint32_t world = job_->options.world;
    for (uint32_t r = 1; r < world; ++r) {
      if (random_.between(0, 3) == 0) continue; /* a slow host */
      for (auto& [message, confirmed] : queue_) {
        if (confirmed & (1u << r)) continue;
        if (!write(r, message)) break;
        confirmed |= 1u << r;
      }
      hosts_[r].count();
    }
    const uint32_t all = ((1u << world) - 1) & ~1u;
    bool any = false;
    while (!queue_.empty() && (queue_.front().second & all) == all && write(0, queue_.front().first)) {
      queue_.erase(queue_.begin());
      any = true;
    }
    if (any) hosts_[0].count();
  }

  bool write(uint32_t r, const Message& message) {
    if (message.kind != MPK_ADMIT) return hosts_[r].write(message);
    /* Its results are taken before they are overwritten. */
    if (holders_[r][message.number] != kNobody) {
      CHECK(r != 0, "the number is in use");
      if (acquire(&job_->ranks[r]->request_outputs[message.number].finish) == MPK_RUNNING) return false;
      check(r, message.number);
    }
    if (!hosts_[r].write(message)) return false;
    holders_[r][message.number] = current_[message.number];
    return true;
  }

  /* Checks an ended request on one rank. */
  void check(uint32_t r, uint32_t number) {
    Rank& rank = *job_->ranks[r];
    Request& request = requests_[holders_[r][number]];
    const uint32_t finish = acquire(&rank.request_outputs[number].finish), tokens = acquire(&rank.request_outputs[number].num_tokens);
    CHECK(finish != MPK_RUNNING, "rank %u: request %u has not ended", r, holders_[r][number]);
    CHECK(finish == request.finish || (finish == MPK_FINISH_CANCELLED && request.cancelled), "rank %u: request %u ended with %u", r, holders_[r][number], finish);
    CHECK(finish == MPK_FINISH_CANCELLED ? tokens <= request.tokens.size() : tokens == request.tokens.size(), "rank %u: request %u: %u tokens", r, holders_[r][number], tokens);
    for (uint32_t i = 0; i < tokens; ++i) {
      CHECK(rank.tokens[rank.requests[number].first_output + i] == request.tokens[i], "rank %u: request %u token %u", r, holders_[r][number], i);
    }
    holders_[r][number] = kNobody;
    ++request.ended_on;
  }

  void drain() {
    for (uint32_t r = 0; r < job_->options.world; ++r) {
      for (uint32_t number = 0; number < job_->options.table; ++number) {
        if (holders_[r][number] == kNobody || acquire(&job_->ranks[r]->request_outputs[number].finish) == MPK_RUNNING) continue;
        check(r, number);
        if (r != 0) continue;
        ++ended_;
        /* A cancel that is still in flight would hit the next holder, so the number is not reused until the cancel
         * has been delivered. */
        free_later_.push_back(number);
      }
    }
    for (size_t i = free_later_.size(); i-- > 0;) {
      const uint32_t number = free_later_[i];
      const bool mentioned = std::any_of(queue_.begin(), queue_.end(), [&](const auto& entry) { return entry.first.kind != MPK_STOP && entry.first.number == number; });
      /* Its end may be visible a moment before it is counted. */
      if (mentioned || acquire(&job_->ranks[0]->output.finished) < ended_) continue;
      current_[number] = kNobody;
      free_later_.erase(free_later_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  Job* job_;
  Random random_;
  uint32_t count_, ended_ = 0;
  std::vector<RankHost> hosts_;
  std::vector<std::vector<uint32_t>> holders_; /* by rank and number: the request, from its entry to its end on that rank */
  std::vector<uint32_t> current_;              /* by number: the request that holds it */
  std::vector<uint32_t> free_later_;
  std::vector<Request> requests_;
  std::vector<std::pair<Message, uint32_t>> queue_; /* with the ranks that have confirmed it */
  bool stopped_ = false;
};

struct Case {
  const char* name;
  uint32_t world;
  bool dynamic, on_demand, prefix_cache;
  uint64_t idle_exit_ns;
  bool mixed = false, reader = false;
};

/* A thread that sleeps on the eventfd on which rank 0's kernel announces tokens, and reads them. */
class Reader {
 public:
  Reader(Job* job, Hosts* hosts, std::mutex* turns) : event_(eventfd(0, EFD_NONBLOCK)) {
    CHECK(event_ > 0, "an event");
    __atomic_store_n(&job->ranks[0]->output.reader, event_, __ATOMIC_RELAXED);
    thread_ = std::thread([this, hosts, turns] {
      while (!over_.load(std::memory_order_relaxed)) {
        pollfd wanted{event_, POLLIN, 0};
        uint64_t times = 0;
        if (poll(&wanted, 1, 5) != 1 || ::read(event_, &times, sizeof(times)) != sizeof(times)) continue;
        told += times;
        std::lock_guard<std::mutex> lock(*turns);
        hosts->read();
      }
    });
  }
  ~Reader() { close(event_); }
  void join() {
    over_.store(true, std::memory_order_relaxed);
    thread_.join();
  }
  uint64_t told = 0;

 private:
  const int event_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

struct Seen {
  uint64_t cancels = 0, full = 0, parks = 0, preemptions = 0, launches = 0, prefix_hits = 0, evictions = 0;
};

void serve(const Case& one, uint32_t requests, uint64_t seed, Seen* seen) {
  Options options;
  options.world = one.world;
  options.dynamic = one.dynamic;
  options.mixed = one.mixed;
  options.graphs = {Lowering::kFlagged, Lowering::kCopyExchange, Lowering::kCopyExchange};
  if (one.world == 1) options.graphs = {Lowering::kFlagged, Lowering::kFlagged, Lowering::kFlagged};
  options.table = 7;
  options.admission_ring = 4;
  options.num_requests = 0;
  options.idle_exit_ns = one.idle_exit_ns;
  options.on_demand = one.on_demand;
  options.prefix_cache = one.prefix_cache;
  if (one.on_demand) options.num_pages = options.max_seq_len / options.page_size + 4; /* scarce */
  options.prefill_rows = one.on_demand ? 3 : 0;
  options.stalls = true;
  options.deadline_ns = 20000000000ull;
  options.seed = seed * 100 + one.world * 10 + one.dynamic;
  Job job(options);
  Hosts hosts(&job, requests, options.seed);
  std::mutex turns;
  std::optional<Reader> reader;
  if (one.reader) reader.emplace(&job, &hosts, &turns);
  Random random(options.seed + 99);
  const auto start = std::chrono::steady_clock::now();
  uint32_t launches = 0, parks = 0;
  bool running = false;
  uint32_t burst = 5;
  for (bool more = true; more || running;) {
    /* In bursts, with pauses in which everything ends. */
    if (burst == 0 && hosts.quiet()) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(random.between(0, 2) ? 2 * one.idle_exit_ns + 200000 : 200000));
      burst = random.between(1, 40);
    }
    const uint32_t heard = acquire(&job.ranks[0]->rank.control->bell);
    const uint32_t before = hosts.ended();
    {
      std::lock_guard<std::mutex> lock(turns);
      more = hosts.turn(burst > 0);
    }
    burst -= std::min(burst, hosts.ended() - before);
    bool all_left = running;
    for (auto& rank : job.ranks) all_left = all_left && (acquire(&rank->rank.control->launch) & MPK_LAUNCH_STOP) && acquire(&rank->rank.control->running) == 0;
    for (uint32_t r = 0; r < one.world; ++r) CHECK(job.abort_code(r) == MPK_OK, "%s: rank %u aborted with %u", one.name, r, job.abort_code(r));
    if (all_left) {
      job.join();
      running = false;
      for (uint32_t r = 0; r < one.world; ++r) CHECK(mpk::pages_consistent(&job.ranks[r]->rank), "%s: pages", one.name);
    }
    if (!running && hosts.pending()) {
      if (launches++ > 0) job.reset();
      job.start();
      running = true;
    }
    /* Rank 0's kernel rings the bell. The other hosts get no ring here, so they are polled now and then. */
    mpk_cpu_sleep(&job.ranks[0]->rank.control->bell, heard, random.between(0, 9) ? 20000 : 1000000);
  }
  if (reader) {
    reader->join();
    /* The bell rings for entries that are in effect and for ends. */
    const uint32_t rings = acquire(&job.ranks[0]->rank.control->bell), most = 2 * requests + hosts.cancels + launches + 1;
    CHECK(reader->told > requests && rings <= most, "%s: %lu times told, %u rings, at most %u expected", one.name, reader->told, rings, most);
  }
  for (uint32_t r = 0; r < one.world; ++r) {
    const mpk_batch_output& output = job.ranks[r]->output;
    parks += job.ranks[r]->rank.control->parks / 2;
    CHECK(output.finished == requests && output.running == 0 && output.waiting == 0 && output.free_pages == job.ranks[r]->config.num_pages, "%s: rank %u: something is left", one.name, r);
    CHECK(job.iterations(r) == job.iterations(0), "%s: ranks differ in iterations", one.name);
    CHECK((acquire(&job.ranks[r]->rank.control->bell) != 0) == (r == 0), "%s: rank %u: the bell of rank 0's host alone is rung", one.name, r);
  }
  seen->cancels += hosts.cancels;
  seen->full += hosts.full;
  seen->parks += parks;
  seen->preemptions += job.ranks[0]->output.preemptions;
  seen->launches += launches - 1;
  seen->prefix_hits += job.ranks[0]->output.prefix_hits;
  seen->evictions += job.ranks[0]->output.evictions;
  std::printf("online, %s: ok, %u requests, %u cancels, %lu iterations, %lu preemptions, %lu prompt tokens found, %u parks, %u launches, %.2f s\n", one.name, requests, hosts.cancels,
              job.iterations(0), job.ranks[0]->output.preemptions, job.ranks[0]->output.prefix_hits, parks, launches, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::fflush(stdout);
}

/* The threads of a parked job sleep. */
void parked_threads_sleep() {
  Options options;
  options.table = 4;
  options.admission_ring = 4;
  options.num_requests = 0;
  options.graphs = {Lowering::kFlagged, Lowering::kCopyExchange, Lowering::kCopyExchange};
  Job job(options);
  Hosts hosts(&job, 1, 3);
  while (!hosts.pending()) hosts.turn(true);
  while (hosts.pending() && job.ranks[1]->num_admissions == 0) hosts.turn(false);
  job.start();
  while (hosts.ended() == 0) hosts.turn(false), std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  auto cpu_ns = [] {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
  };
  const uint64_t before = cpu_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const double share = static_cast<double>(cpu_ns() - before) / 300e6;
  for (bool more = true; more;) more = hosts.turn(false);
  job.join();
  std::printf("parked: %.2f %% of a core for %u threads\n", 100 * share, options.world * options.workers);
#if !defined(__SANITIZE_THREAD__)
  CHECK(share < 0.02, "parked threads take %.1f %% of a core", 100 * share);
#endif
}

}  // namespace

int main() {
  const char* wanted = std::getenv("MPK_SOAK_REQUESTS");
  const uint32_t requests = wanted != nullptr ? static_cast<uint32_t>(std::strtoul(wanted, nullptr, 10)) : 150;
  parked_threads_sleep();
  Seen seen;
  const auto enough = [&seen] {
    return seen.cancels > 20 && seen.full > 20 && seen.parks > 20 && seen.preemptions > 5 && seen.launches > 3 && seen.prefix_hits > 100 && seen.evictions > 10;
  };
  /* How often each thing happens depends on the machine's speed. If something was rare, repeat with other requests. */
  for (uint64_t seed = 0; seed < 20 && !enough(); ++seed) {
    for (const Case& one : {Case{"1 rank, static, prefix cache", 1, false, false, true, 0},
                            Case{"2 ranks, static, prefix cache, a reader", 2, false, false, true, 0, false, true}, Case{"2 ranks, static, idle exit", 2, false, false, false, 2000000},
                            Case{"2 ranks, dynamic, idle exit, pages on demand, prefix cache", 2, true, true, true, 2000000},
                            Case{"2 ranks, mixed, idle exit, prefix cache", 2, false, false, true, 2000000, true},
                            Case{"4 ranks, static, pages on demand, prefix cache", 4, false, true, true, 0}})
      serve(one, requests, seed, &seen);
  }
  CHECK(enough(), "too tame: %lu cancels, %lu times full, %lu parks, %lu preemptions, %lu launches after the first, %lu tokens found, %lu pages given up", seen.cancels,
        seen.full, seen.parks, seen.preemptions, seen.launches, seen.prefix_hits, seen.evictions);
}
