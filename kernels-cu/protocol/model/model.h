/* The model checker, as seen by its platform header and its checks.
 *
 * A check builds a small world (memory and threads). The checker runs it repeatedly, until it has seen every execution that
 * the memory model allows: every value that a load may read, every order of the writes of a location. It stops at the first
 * data race, failed condition or deadlock, and shows that execution. */
#ifndef MPK_MODEL_MODEL_H
#define MPK_MODEL_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace mpk {
namespace model {

/* ---- what the platform header needs ---- */

/* A memory order, and where it is in the source: a run may weaken one of them. */
enum class Kind : uint8_t { kRelaxed, kAcquire, kRelease, kAcquireRelease };
struct Order {
  Kind kind;
  const char* file;
  int line;
};

uint64_t load(const void* address, size_t bytes, bool system, Order order, const char* function);
void store(void* address, size_t bytes, bool system, uint64_t value, Order order, const char* function);
uint64_t fetch_add(void* address, size_t bytes, bool system, uint64_t value, Order order);
bool compare_exchange(void* address, size_t bytes, bool system, uint64_t* expected, uint64_t desired, Order order);

/* Copies plain memory, for code without the compiler's instrumentation. */
void copy(void* to, const void* from, size_t bytes);

/* A waiting loop has looked `turns` times without success. Returns when it may continue; true if time has passed. */
bool wait_turn(uint32_t turns);
uint64_t clock_ns();

/* Something that happens by itself later: a message. It begins after everything that this thread has done so far, and
 * after the messages that are its predecessors: those of `channel` whose sending happens before this one. */
void send(uint64_t channel, bool after_predecessors, std::function<void()> message);

/* ---- what a check needs ---- */

struct Options {
  bool aborts = false;   /* the abort word is read; off if no thread sets it */
  bool timeouts = false; /* a wait may reach its deadline at any time */
  uint32_t turns = 0;    /* turns of a waiting loop to explore before it counts as blocked */
  /* A write comes after all writes of its location that caused it, even through relaxed accesses alone. This holds on
   * hardware, but not in C++: a read and a write that follows from it stay in order, and a value that was read has
   * arrived. */
  bool causal_writes = false;
  bool distinct = false; /* check that no execution is explored twice, which costs memory */
  const char* must_fail = nullptr; /* part of the message with which it must fail: proves that the check detects its fault */
  uint64_t limit = 0;    /* maximum number of executions; 0: no limit */
};

class Check {
 public:
  explicit Check(const char* check_name) : name(check_name) {}
  virtual ~Check() = default;
  /* Creates memory and threads; called before each execution. */
  virtual void build() = 0;
  /* Called when all threads have ended. */
  virtual void finish() {}
  /* Whether threads may be left waiting: called when none can continue. */
  virtual bool may_wait() { return false; }
  const char* name;
  Options options;
};

/* In build(): */
void* allocate(size_t bytes, size_t alignment);
template <typename T>
T* make(size_t count = 1) {
  return static_cast<T*>(allocate(sizeof(T) * count, alignof(T) < 8 ? 8 : alignof(T)));
}
/* `rank`: atomics between threads of two ranks need system scope. The host counts as a separate rank. */
constexpr uint32_t kHost = 1000;
void thread(const char* name, uint32_t rank, std::function<void()> body);
/* The two halves of this 8-byte word may be loaded separately. */
void whole_word(const void* address);
/* A name for the report; `number` is the index of an element. */
void label(const void* address, const char* text, int number = -1);

/* In threads and finish(): */
[[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);
/* Returns one of 0 .. options - 1; all are explored. */
uint32_t choose(uint32_t options);
/* In finish(): the result of the execution, for litmus tests. */
void outcome(uint64_t value);

#define MODEL_CHECK(condition, ...)                    \
  do {                                                 \
    if (!(condition)) ::mpk::model::fail(__VA_ARGS__); \
  } while (0)

/* ---- what the runner needs ---- */

struct Site {
  std::string file; /* last part of its path */
  int line;
  bool operator<(const Site& other) const { return file != other.file ? file < other.file : line < other.line; }
};

struct Result {
  uint64_t complete = 0; /* executions in which all threads ended */
  uint64_t waiting = 0;  /* that end in waits which a later value would have ended; other executions explore these values */
  uint64_t begun = 0;    /* all executions, including those given up early */
  bool limited = false;
  std::string error;     /* of the last execution: what went wrong, and how */
  std::set<uint64_t> outcomes;
  std::set<Site> sites;  /* memory orders used, except relaxed ones */
  std::set<Site> system_sites; /* where system scope was used */
};

/* How an exploration differs from the default one. */
struct Variation {
  const Site* weakened = nullptr; /* this memory order counts as relaxed */
  const Site* narrowed = nullptr; /* this scope counts as device scope */
  bool reversed = false; /* the threads take turns in the opposite order, which must give the same number of executions */
};

Result explore(Check& check, const Variation& variation);

std::vector<Check*>& checks();
std::vector<Check*>& litmus_tests();

}  // namespace model
}  // namespace mpk

#endif
