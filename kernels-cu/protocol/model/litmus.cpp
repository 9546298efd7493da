/* The checker's own test: classic litmus tests with known outcomes. Each runs with its threads in both orders, which must
 * not matter, and no execution may be explored twice. */
#include <stdio.h>

#include <vector>

#include "platform/platform.h"

namespace {

using namespace mpk;
using mpk::model::Check;
using platform::Order;
using platform::Scope;

Order rlx() { return platform::kRelaxed; }
Order acq() { return platform::kAcquire; }
Order rel() { return platform::kRelease; }

/* Shared words, and a result word for each thread. */
struct Words {
  uint64_t x, pad0, y, pad1, data, pad2, r[4];
};

uint64_t get(const uint64_t* word, Order order) { return platform::load<Scope::kSystem>(word, order); }
void set(uint64_t* word, uint64_t value, Order order) { platform::store<Scope::kSystem>(word, value, order); }
uint64_t add(uint64_t* word, Order order) { return platform::fetch_add<Scope::kSystem>(word, uint64_t{1}, order); }

class Litmus : public Check {
 public:
  using Body = void (*)(Words*);
  /* `error`: part of the message with which the test must fail; NULL: it must not fail. `executions`: the number
   * that complete; 0: any number. */
  Litmus(const char* test, std::vector<Body> threads, std::vector<uint64_t> outcomes, const char* error = nullptr, uint64_t executions = 0)
      : Check(test), expected(outcomes.begin(), outcomes.end()), error_part(error), complete(executions), bodies_(std::move(threads)) {
    options.distinct = true;
    model::litmus_tests().push_back(this);
  }
  void build() override {
    words_ = model::make<Words>();
    model::label(&words_->x, "x");
    model::label(&words_->y, "y");
    model::label(&words_->data, "data");
    for (Body body : bodies_) model::thread("thread", 0, [this, body] { body(words_); });
  }
  void finish() override {
    model::outcome(words_->r[0] + 10 * words_->r[1] + 100 * words_->r[2] + 1000 * words_->r[3]);
  }

  std::set<uint64_t> expected;
  const char* error_part;
  uint64_t complete;

 private:
  std::vector<Body> bodies_;
  Words* words_ = nullptr;
};

/* A loop that waits as the protocol does. */
template <typename Test>
void wait_for(const Test& test) {
  uint32_t turns = 0;
  while (!test()) model::wait_turn(turns++);
}

Litmus mp_relaxed("message passing, relaxed", {[](Words* w) { set(&w->data, 1, rlx()); set(&w->x, 1, rlx()); },
                                               [](Words* w) { w->r[0] = get(&w->x, rlx()); w->r[1] = get(&w->data, rlx()); }}, {0, 1, 10, 11}, nullptr, 4);
Litmus mp("message passing", {[](Words* w) { set(&w->data, 1, rlx()); set(&w->x, 1, rel()); },
                              [](Words* w) { w->r[0] = get(&w->x, acq()); w->r[1] = get(&w->data, rlx()); }}, {0, 10, 11}, nullptr, 3);
Litmus mp_no_acquire("message passing without acquire", {[](Words* w) { set(&w->data, 1, rlx()); set(&w->x, 1, rel()); },
                                                         [](Words* w) { w->r[0] = get(&w->x, rlx()); w->r[1] = get(&w->data, rlx()); }}, {0, 1, 10, 11});
Litmus mp_plain("message passing, plain data", {[](Words* w) { w->data = 1; set(&w->x, 1, rel()); },
                                                [](Words* w) { if (get(&w->x, acq()) == 1) w->r[0] = w->data + 1; }}, {0, 2}, nullptr, 2);
Litmus mp_race("message passing, plain data, relaxed", {[](Words* w) { w->data = 1; set(&w->x, 1, rlx()); },
                                                        [](Words* w) { if (get(&w->x, acq()) == 1) w->r[0] = w->data; }}, {}, "data race");
Litmus race_write("two plain writes", {[](Words* w) { w->data = 1; }, [](Words* w) { w->data = 2; }}, {}, "data race");
Litmus race_mixed("plain read, atomic write", {[](Words* w) { set(&w->data, 1, rel()); }, [](Words* w) { w->r[0] = w->data; }}, {}, "data race");
Litmus sb("store buffering", {[](Words* w) { set(&w->x, 1, rel()); w->r[0] = get(&w->y, acq()); },
                              [](Words* w) { set(&w->y, 1, rel()); w->r[1] = get(&w->x, acq()); }}, {0, 1, 10, 11}, nullptr, 4);
/* Known limit: hardware and C++ allow 11 with relaxed accesses. */
Litmus lb("load buffering (excluded)", {[](Words* w) { w->r[0] = get(&w->x, rlx()); set(&w->y, 1, rlx()); },
                                        [](Words* w) { w->r[1] = get(&w->y, rlx()); set(&w->x, 1, rlx()); }}, {0, 1, 10}, nullptr, 3);
Litmus iriw("independent reads of independent writes", {[](Words* w) { set(&w->x, 1, rel()); }, [](Words* w) { set(&w->y, 1, rel()); },
                                                        [](Words* w) { w->r[0] = get(&w->x, acq()); w->r[1] = get(&w->y, acq()); },
                                                        [](Words* w) { w->r[2] = get(&w->y, acq()); w->r[3] = get(&w->x, acq()); }},
            {0, 1, 10, 11, 100, 101, 110, 111, 1000, 1001, 1010, 1011, 1100, 1101, 1110, 1111}, nullptr, 16);
Litmus corr("coherence, two reads", {[](Words* w) { set(&w->x, 1, rlx()); }, [](Words* w) { w->r[0] = get(&w->x, rlx()); w->r[1] = get(&w->x, rlx()); }},
            {0, 10, 11}, nullptr, 3);
Litmus corr_two("coherence, two readers", {[](Words* w) { set(&w->x, 1, rlx()); }, [](Words* w) { set(&w->x, 2, rlx()); },
                                           [](Words* w) { w->r[0] = get(&w->x, rlx()); w->r[1] = get(&w->x, rlx()); },
                                           [](Words* w) { w->r[2] = get(&w->x, rlx()); w->r[3] = get(&w->x, rlx()); }},
                {0, 10, 11, 20, 21, 22, 12, 100 * 0 + 1000, 1010, 1011, 1020, 1021, 1022, 1012, 2000, 2010, 2011, 2020, 2021, 2022, 2012,
                 1100, 1110, 1111, 1120, 1121, 1122, 1112, 2200, 2210, 2211, 2220, 2221, 2222, 2212,
                 /* 1 then 2, or 2 then 1, not both. */
                 2100, 2110, 2111, 2120, 2121, 2122, 1200, 1210, 1211, 1220, 1222, 1212});
Litmus cowr("coherence, a thread reads its own write", {[](Words* w) { set(&w->x, 1, rlx()); w->r[0] = get(&w->x, rlx()); }, [](Words* w) { set(&w->x, 2, rlx()); }},
            {1, 2}, nullptr, 3);
Litmus two_two_w("two threads write two words in turn", {[](Words* w) { set(&w->x, 1, rlx()); set(&w->y, 2, rlx()); },
                                                         [](Words* w) { set(&w->y, 1, rlx()); set(&w->x, 2, rlx()); }}, {0}, nullptr, 4);
Litmus wrc("write to read causality", {[](Words* w) { set(&w->x, 1, rlx()); }, [](Words* w) { if (get(&w->x, acq()) == 1) set(&w->y, 1, rel()); },
                                       [](Words* w) { w->r[0] = get(&w->y, acq()); w->r[1] = get(&w->x, rlx()); }}, {0, 10, 11}, nullptr, 5);
Litmus wrc_relaxed("write to read causality, relaxed", {[](Words* w) { set(&w->x, 1, rlx()); }, [](Words* w) { if (get(&w->x, rlx()) == 1) set(&w->y, 1, rlx()); },
                                                        [](Words* w) { w->r[0] = get(&w->y, acq()); w->r[1] = get(&w->x, rlx()); }}, {0, 1, 10, 11});
Litmus sequence("release sequence through an addition", {[](Words* w) { w->data = 1; set(&w->x, 1, rel()); }, [](Words* w) { add(&w->x, rlx()); },
                                                         [](Words* w) { if (get(&w->x, acq()) == 2) w->r[0] = w->data + 1; }}, {0, 2});
Litmus no_sequence("no release sequence through a store", {[](Words* w) { w->data = 1; set(&w->x, 1, rel()); },
                                                           [](Words* w) { if (get(&w->x, rlx()) == 1) set(&w->x, 2, rlx()); },
                                                           [](Words* w) { if (get(&w->x, acq()) == 2) w->r[0] = w->data; }}, {}, "data race");
Litmus own_store("no release sequence through the thread's own store (C++20)", {[](Words* w) { w->data = 1; set(&w->x, 1, rel()); set(&w->x, 2, rlx()); },
                                                                      [](Words* w) { if (get(&w->x, acq()) == 2) w->r[0] = w->data; }}, {}, "data race");
Litmus adds("three additions", {[](Words* w) { w->r[0] = add(&w->x, rlx()); }, [](Words* w) { w->r[1] = add(&w->x, rlx()); }, [](Words* w) { w->r[2] = add(&w->x, rlx()); }},
            {210, 120, 201, 21, 102, 12}, nullptr, 6);
Litmus adds_twice("additions, two each", {[](Words* w) { add(&w->x, rlx()); add(&w->x, rlx()); }, [](Words* w) { add(&w->x, rlx()); add(&w->x, rlx()); }}, {0}, nullptr, 6);
Litmus exchange("one exchange of three", {[](Words* w) { uint64_t e = 0; w->r[0] = platform::compare_exchange<Scope::kSystem>(&w->x, &e, uint64_t{1}, rlx()); },
                                          [](Words* w) { uint64_t e = 0; w->r[1] = platform::compare_exchange<Scope::kSystem>(&w->x, &e, uint64_t{2}, rlx()); },
                                          [](Words* w) { uint64_t e = 0; w->r[2] = platform::compare_exchange<Scope::kSystem>(&w->x, &e, uint64_t{3}, rlx()); }},
                {1, 10, 100}, nullptr, 3);
Litmus add_and_store("an addition and a store", {[](Words* w) { w->r[0] = add(&w->x, rlx()); }, [](Words* w) { set(&w->x, 5, rlx()); },
                                                 [](Words* w) { w->r[1] = get(&w->x, rlx()); }}, {0, 10, 50, 5, 55, 65}, nullptr, 6);
Litmus waits("a wait", {[](Words* w) { wait_for([w] { return get(&w->x, acq()) == 1; }); w->r[0] = w->data; }, [](Words* w) { w->data = 3; set(&w->x, 1, rel()); }},
             {3}, nullptr, 1);
Litmus waits_in_turn("two threads wait for each other", {[](Words* w) { set(&w->x, 1, rel()); wait_for([w] { return get(&w->y, acq()) == 1; }); },
                                                         [](Words* w) { wait_for([w] { return get(&w->x, acq()) == 1; }); set(&w->y, 1, rel()); }}, {0}, nullptr, 1);
Litmus deadlock("a wait for what does not come", {[](Words* w) { wait_for([w] { return get(&w->x, acq()) == 2; }); }, [](Words* w) { set(&w->x, 1, rel()); }},
                {}, "deadlock");
Litmus deadlock_two("each waits first", {[](Words* w) { wait_for([w] { return get(&w->y, acq()) == 1; }); set(&w->x, 1, rel()); },
                                         [](Words* w) { wait_for([w] { return get(&w->x, acq()) == 1; }); set(&w->y, 1, rel()); }}, {}, "deadlock");
Litmus message("messages with order", {[](Words* w) {
                                         model::send(0, false, [w] { const uint64_t one = 1; model::copy(&w->data, &one, 8); });
                                         model::send(0, true, [w] { add(&w->x, rel()); });
                                       },
                                       [](Words* w) { if (get(&w->x, acq()) == 1) w->r[0] = w->data + 1; }}, {0, 2}, nullptr, 2);
Litmus message_late("messages without order", {[](Words* w) {
                                                 model::send(0, false, [w] { const uint64_t one = 1; model::copy(&w->data, &one, 8); });
                                                 model::send(0, false, [w] { add(&w->x, rel()); });
                                               },
                                               [](Words* w) { if (get(&w->x, acq()) == 1) w->r[0] = w->data + 1; }}, {}, "data race");

}  // namespace

namespace mpk {
namespace model {

/* The number of tests that pass, or 0 if one fails. */
uint32_t run_litmus() {
  uint32_t passed = 0;
  for (Check* check : litmus_tests()) {
    Litmus& test = static_cast<Litmus&>(*check);
    uint64_t complete = 0;
    for (int turn = 0; turn < 2; ++turn) {
      const Result result = explore(test, {.reversed = turn == 1});
      std::string wrong;
      if (test.error_part != nullptr) {
        if (result.error.find(test.error_part) == std::string::npos) wrong = "must fail: " + std::string(test.error_part) + "; " + result.error;
      } else if (!result.error.empty()) {
        wrong = result.error;
      } else if (result.outcomes != test.expected) {
        wrong = "outcomes:";
        for (uint64_t outcome : result.outcomes) wrong += " " + std::to_string(outcome);
      } else if (test.complete != 0 && result.complete != test.complete) {
        wrong = std::to_string(result.complete) + " executions, not " + std::to_string(test.complete);
      } else if (turn == 1 && result.complete != complete) {
        wrong = std::to_string(complete) + " or " + std::to_string(result.complete) + " executions, by the order of threads";
      }
      complete = result.complete;
      if (!wrong.empty()) {
        fprintf(stderr, "litmus test '%s'%s: %s\n", test.name, turn == 1 ? ", reversed" : "", wrong.c_str());
        return 0;
      }
    }
    ++passed;
  }
  return passed;
}

}  // namespace model
}  // namespace mpk
