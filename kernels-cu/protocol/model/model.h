/* The model checker, as its platform header and its checks see it.
 *
 * A check builds a small world (memory and threads). The checker runs it again and again, until every execution that the
 * memory model allows has been seen: every value that a load may read, every order of the writes of a location. It stops at the
 * first data race, failed condition or deadlock, and shows that execution. */
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

/* A memory order, with the place where it is written: a run may weaken the one at one place. */
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

/* Plain memory, for code that copies it without the compiler's instrumentation. */
void copy(void* to, const void* from, size_t bytes);

/* A waiting loop has found nothing `turns` times. Returns where it may go on; true where time has passed. */
bool wait_turn(uint32_t turns);
uint64_t clock_ns();

/* Something that happens by itself, later: a message. It begins after all that this thread has done so far, and after the
 * messages that are its predecessors: those of `channel` whose sending happens before this one. */
void send(uint64_t channel, bool after_predecessors, std::function<void()> message);

/* ---- what a check needs ---- */

struct Options {
  bool aborts = false;   /* the abort word is looked at; off where nobody sets it */
  bool timeouts = false; /* a wait may come to its deadline at any time */
  uint32_t turns = 0;    /* turns of a waiting loop that are explored before it counts as blocked */
  /* A write comes after all writes of its location that caused it, even through relaxed accesses alone. So it is where a read
   * and a write that follows from it stay in order, and what has been read has arrived: not in C++, but in hardware. */
  bool causal_writes = false;
  bool distinct = false; /* no execution is explored twice, which costs memory to find out */
  const char* must_fail = nullptr; /* part of the message with which it must: the check sees what it is there for */
  uint64_t limit = 0;    /* executions at most, 0: no limit */
};

class Check {
 public:
  explicit Check(const char* check_name) : name(check_name) {}
  virtual ~Check() = default;
  /* Makes memory and threads; called before each execution. */
  virtual void build() = 0;
  /* All threads have ended. */
  virtual void finish() {}
  /* Whether threads may be left waiting: called where none can go on. */
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
/* `rank`: atomics between threads of two ranks need system scope. The host has a rank of its own. */
constexpr uint32_t kHost = 1000;
void thread(const char* name, uint32_t rank, std::function<void()> body);
/* Halves of this 8-byte word are loaded alone. */
void whole_word(const void* address);
/* For the report; `number`: of an element. */
void label(const void* address, const char* text, int number = -1);

/* In threads and finish(): */
[[gnu::format(printf, 1, 2)]] void fail(const char* format, ...);
/* One of 0 .. options - 1, all of which are explored. */
uint32_t choose(uint32_t options);
/* In finish(): what has come out, for litmus tests. */
void outcome(uint64_t value);

#define MODEL_CHECK(condition, ...)                    \
  do {                                                 \
    if (!(condition)) ::mpk::model::fail(__VA_ARGS__); \
  } while (0)

/* ---- what the runner needs ---- */

struct Site {
  std::string file; /* its last part */
  int line;
  bool operator<(const Site& other) const { return file != other.file ? file < other.file : line < other.line; }
};

struct Result {
  uint64_t complete = 0; /* executions in which all threads ended */
  uint64_t waiting = 0;  /* that end in waits which a later value would have ended: seen again elsewhere */
  uint64_t begun = 0;    /* all, with those that were given up early */
  bool limited = false;
  std::string error;     /* of the last one: what, and how it came about */
  std::set<uint64_t> outcomes;
  std::set<Site> sites;  /* memory orders that were used, but relaxed ones */
  std::set<Site> system_sites; /* where system scope was used */
};

/* How an exploration differs from the plain one. */
struct Variation {
  const Site* weakened = nullptr; /* its memory order counts as relaxed */
  const Site* narrowed = nullptr; /* its scope counts as the device */
  bool reversed = false; /* the threads take their turns in the opposite order, which must lead to as many executions */
};

Result explore(Check& check, const Variation& variation);

std::vector<Check*>& checks();
std::vector<Check*>& litmus_tests();

}  // namespace model
}  // namespace mpk

#endif
