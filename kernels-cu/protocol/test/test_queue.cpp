/* Worker queues and remote rings under many producers, wraparound and full queues, and a team that queues tasks. */
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "queue.h"
#include "ring.h"
#include "scheduler_step.h"
#include "thread_team.h"

namespace {

struct OneRank {
  std::vector<uint64_t> memory;
  mpk_rank rank{};
  std::vector<uint8_t*> sym;
  std::vector<uint64_t> pushed;

  OneRank(uint32_t index, uint32_t world, uint64_t ring_capacity) : memory(65536), sym(world, nullptr), pushed(world, 0) {
    rank.abi_version = MPK_ABI_VERSION;
    rank.rank = index;
    rank.world = world;
    rank.oversubscribed = 1;
    rank.deadline_ns = 5000000000ull;
    rank.sym = sym.data();
    rank.control = reinterpret_cast<mpk_control*>(memory.data());
    rank.remote_rings = sizeof(mpk_control);
    rank.remote_ring_capacity = ring_capacity;
    rank.remote_ring_bytes = sizeof(mpk_remote_ring) + ring_capacity * sizeof(mpk_remote_entry);
    rank.remote_pushed = pushed.data();
    sym[index] = reinterpret_cast<uint8_t*>(memory.data());
  }
};

/* Each producer hands over the payload word of its id through the queue alone. The consumer checks that
 * each producer's ids arrive once and in order, and that the payload arrives with them. */
void queue_many_producers(uint32_t capacity, uint32_t producers, uint32_t each) {
  OneRank one(0, 1, 1);
  std::vector<uint64_t> slots(capacity, 0);
  mpk_queue queue{};
  queue.slots = slots.data();
  queue.mask = capacity - 1;
  std::vector<uint32_t> payload(static_cast<size_t>(producers) * each, 0);
  std::vector<std::thread> threads;
  for (uint32_t p = 0; p < producers; ++p) {
    threads.emplace_back([&, p] {
      for (uint32_t i = 0; i < each; ++i) {
        payload[static_cast<size_t>(p) * each + i] = p ^ (i * 2654435761u);
        CHECK(mpk::queue_push(&one.rank, &queue, (static_cast<uint64_t>(p) << 32) | i, nullptr) == MPK_OK, "push failed");
      }
    });
  }
  std::vector<uint32_t> next(producers, 0);
  Random random(capacity);
  for (uint64_t taken = 0; taken < static_cast<uint64_t>(producers) * each;) {
    uint64_t id;
    if (!mpk::queue_pop(&queue, &id)) {
      std::this_thread::yield();
      continue;
    }
    const uint32_t p = static_cast<uint32_t>(id >> 32), i = static_cast<uint32_t>(id);
    CHECK(p < producers && i == next[p], "producer %u: got %u, wanted %u", p, i, next[p]);
    ++next[p];
    CHECK(payload[static_cast<size_t>(p) * each + i] == (p ^ (i * 2654435761u)), "payload not there");
    if (random.between(0, 1023) == 0) std::this_thread::sleep_for(std::chrono::microseconds(100)); /* lets the queue fill up */
    ++taken;
  }
  for (auto& thread : threads) thread.join();
  for (uint64_t slot : slots) CHECK(slot == 0, "slot left behind");
}

void queue_full_is_bounded() {
  OneRank one(0, 1, 1);
  one.rank.deadline_ns = 50000000;
  std::vector<uint64_t> slots(2, 0);
  mpk_queue queue{};
  queue.slots = slots.data();
  queue.mask = 1;
  CHECK(mpk::queue_try_push_single(&queue, 7) && mpk::queue_try_push_single(&queue, 8), "room for two");
  CHECK(!mpk::queue_try_push_single(&queue, 9), "a third fits into two slots");
  mpk_status status{};
  CHECK(mpk::queue_push(&one.rank, &queue, 9, &status) == MPK_ABORT_DEADLINE, "full queue must end the run");
  CHECK(status.timed_out == 1, "the wait is not reported");
  CHECK(slots[0] == 8 && slots[1] == 9, "an entry was overwritten");
}

/* Several workers of one rank push to one ring. The receiver acknowledges through `taken` only to keep the
 * test within the capacity; in a run the graph proves that. */
void ring_many_workers(uint64_t capacity, uint32_t workers, uint32_t each) {
  OneRank sender(0, 2, capacity), receiver(1, 2, capacity);
  sender.sym[1] = receiver.sym[1];
  receiver.sym[0] = sender.sym[0];
  std::vector<uint32_t> payload(static_cast<size_t>(workers) * each, 0);
  uint64_t taken = 0, started = 0;
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (uint32_t i = 0; i < each; ++i) {
        const uint64_t ticket = __atomic_fetch_add(&started, 1, __ATOMIC_RELAXED);
        while (static_cast<int64_t>(ticket - __atomic_load_n(&taken, __ATOMIC_ACQUIRE)) >= static_cast<int64_t>(capacity)) std::this_thread::yield();
        payload[static_cast<size_t>(w) * each + i] = w + 31 * i;
        CHECK(mpk::ring_push(&sender.rank, 1, {w, i, 0, 1}, nullptr) == MPK_OK, "push failed");
      }
    });
  }
  std::vector<uint32_t> next(workers, 0);
  for (uint64_t head = 0; head < static_cast<uint64_t>(workers) * each;) {
    const uint64_t tail = mpk::ring_tail(&receiver.rank, 0);
    if (tail == head) std::this_thread::yield();
    for (; head < tail; ++head) {
      mpk_remote_entry entry;
      CHECK(mpk::ring_peek(&receiver.rank, 0, head, tail, &entry) == MPK_OK, "overrun");
      CHECK(entry.event < workers && entry.iteration == next[entry.event], "worker %u: %u", entry.event, entry.iteration);
      ++next[entry.event];
      CHECK(payload[static_cast<size_t>(entry.event) * each + entry.iteration] == entry.event + 31 * entry.iteration, "payload not there");
      __atomic_store_n(&taken, head + 1, __ATOMIC_RELEASE);
    }
  }
  for (auto& thread : threads) thread.join();
}

void ring_overrun_is_noticed() {
  OneRank sender(0, 2, 4), receiver(1, 2, 4);
  sender.sym[1] = receiver.sym[1];
  for (uint32_t i = 0; i < 5; ++i) CHECK(mpk::ring_push(&sender.rank, 1, {i, 1, 0, 1}, nullptr) == MPK_OK, "push failed");
  mpk_remote_entry entry;
  CHECK(mpk::ring_peek(&receiver.rank, 0, 0, mpk::ring_tail(&receiver.rank, 0), &entry) == MPK_ABORT_QUEUE, "overrun not noticed");
  CHECK(mpk::ring_peek(&receiver.rank, 0, 1, mpk::ring_tail(&receiver.rank, 0), &entry) == MPK_OK && entry.event == 1, "entry 1 is there");
}

/* A team queues ranges of tasks at workers whose queues are often full: each task arrives once, round robin over the
 * workers. */
void team_queues_tasks(uint32_t workers, uint32_t capacity, bool slow_worker) {
  OneRank one(0, 1, 1);
  std::vector<std::vector<uint64_t>> slots(workers, std::vector<uint64_t>(capacity, 0));
  std::vector<mpk_queue> queues(workers);
  for (uint32_t w = 0; w < workers; ++w) queues[w].slots = slots[w].data(), queues[w].mask = capacity - 1;
  one.rank.worker_queues = queues.data();
  one.rank.num_workers = workers;
  one.rank.num_schedulers = 1;
  constexpr uint32_t kRanges = 400;
  uint32_t total = 0;
  for (uint32_t r = 0; r < kRanges; ++r) total += r % 11;
  std::vector<uint32_t> seen(total, 0), taken(workers, 0), payload(total, 0);
  uint32_t arrived = 0;
  ThreadTeam::Meeting meeting;
  std::vector<std::thread> threads;
  for (uint32_t member = 0; member < ThreadTeam::kSize; ++member) {
    threads.emplace_back([&, member] {
      const ThreadTeam team = {&meeting, member};
      mpk::Scheduler scheduler = {&one.rank, 0, nullptr};
      uint32_t first = 0;
      for (uint32_t r = 0; r < kRanges; first += r++ % 11) {
        /* What the leader knows arrives with the tasks, whichever member of the team queues them. */
        for (uint32_t i = first; member == 0 && i < first + r % 11; ++i) payload[i] = ~i;
        team.sync();
        CHECK(mpk::launch_tasks(team, &scheduler, {7, first, first + r % 11}) == MPK_OK, "launch failed");
      }
    });
  }
  for (uint32_t w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      while (__atomic_load_n(&arrived, __ATOMIC_RELAXED) < total) {
        uint64_t id;
        if (!mpk::queue_pop(&queues[w], &id)) {
          std::this_thread::yield();
          continue;
        }
        CHECK(mpk::task_id_iteration(id) == 7 && mpk::task_id_index(id) < total, "task %lx", id);
        CHECK(payload[mpk::task_id_index(id)] == ~mpk::task_id_index(id), "payload not there");
        __atomic_fetch_add(&seen[mpk::task_id_index(id)], 1, __ATOMIC_RELAXED);
        ++taken[w];
        __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED);
        if (slow_worker && w == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 0; i < total; ++i) CHECK(seen[i] == 1, "task %u came %u times", i, seen[i]);
  for (uint32_t w = 0; w < workers; ++w) {
    CHECK(taken[w] > 0, "worker %u had nothing", w);
    for (uint64_t slot : slots[w]) CHECK(slot == 0, "slot left behind");
  }
  if (capacity >= total)
    for (uint32_t w = 0; w < workers; ++w) CHECK(taken[w] - total / workers <= 1, "worker %u had %u of %u", w, taken[w], total);
}

/* No consumer: the deadline ends the wait, for the whole team. */
void team_does_not_wait_for_ever() {
  OneRank one(0, 1, 1);
  one.rank.deadline_ns = 50000000;
  std::vector<uint64_t> slots(2 * 2, 0);
  std::vector<mpk_queue> queues(2);
  for (uint32_t w = 0; w < 2; ++w) queues[w].slots = &slots[2 * w], queues[w].mask = 1;
  one.rank.worker_queues = queues.data();
  one.rank.num_workers = 2;
  one.rank.num_schedulers = 1;
  ThreadTeam::Meeting meeting;
  std::vector<std::thread> threads;
  for (uint32_t member = 0; member < ThreadTeam::kSize; ++member) {
    threads.emplace_back([&, member] {
      mpk::Scheduler scheduler = {&one.rank, 0, nullptr};
      CHECK(mpk::launch_tasks(ThreadTeam{&meeting, member}, &scheduler, {1, 0, 5}) == MPK_ABORT_DEADLINE, "full queues must end the run");
    });
  }
  for (auto& thread : threads) thread.join();
  for (uint64_t slot : slots) CHECK(slot != 0, "room was left");
}

/* A rank that can reach rank 1 only through its proxy. */
struct ProxiedRank : OneRank {
  mpk_proxy proxy{};
  uint64_t head = 0;
  std::vector<uint32_t> written;
  std::vector<uint64_t> bytes;

  explicit ProxiedRank(uint64_t capacity) : OneRank(0, 2, 1), written(capacity / MPK_FRAME_ALIGN), bytes(capacity / 8) {
    proxy.capacity = capacity;
    proxy.head = &head;
    proxy.written = written.data();
    proxy.bytes = reinterpret_cast<uint8_t*>(bytes.data());
    rank.proxy = &proxy;
  }
};

/* Workers of one rank each write their own rows of floats at rank 1, and signal. A reader that sees a counter grow finds the
 * rows that it counts. `capacity` is that of the ring, far less than the data that goes through it. */
void proxy_brings_data_before_signals(uint64_t capacity, uint32_t workers, uint32_t each) {
  constexpr uint32_t kRows = 3, kWords = 5, kStride = 7; /* in words */
  ProxiedRank sender(capacity);
  std::vector<uint64_t> heap(65536, 0);
  const uint64_t counters = 1024, data = 2048; /* in words; the same in both heaps */
  CHECK(data + static_cast<uint64_t>(workers) * each * kRows * kStride <= heap.size(), "heap too small");
  const auto place = [&](uint32_t w, uint32_t i) { return data + (static_cast<uint64_t>(w) * each + i) * kRows * kStride; };
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      uint64_t source[kRows * kWords];
      for (uint32_t i = 0; i < each; ++i) {
        for (uint32_t k = 0; k < kRows * kWords; ++k) source[k] = w * 1000003ull + i * 31 + k;
        uint64_t* to = &sender.memory[place(w, i)];
        CHECK(mpk::platform::put_rows(&sender.rank, 1, to, kStride * 8, source, kWords * 8, kRows, kWords * 8), "no way");
        CHECK(mpk::platform::signal_add(&sender.rank, 1, &sender.memory[counters + w * MPK_COUNTER_STRIDE], 1), "no way");
      }
    });
    threads.emplace_back([&, w] {
      for (uint32_t i = 0; i < each; ++i) {
        while (mpk::platform::load<mpk::platform::Scope::kSystem>(&heap[counters + w * MPK_COUNTER_STRIDE], mpk::platform::kAcquire) <= i) std::this_thread::yield();
        for (uint32_t k = 0; k < kRows * kWords; ++k)
          CHECK(heap[place(w, i) + k / kWords * kStride + k % kWords] == w * 1000003ull + i * 31 + k, "worker %u, put %u, word %u", w, i, k);
      }
    });
  }
  std::vector<uint8_t> frames(MPK_FRAME_BYTES);
  for (uint64_t done = 0; done < static_cast<uint64_t>(workers) * each;) {
    if (mpk_proxy_next(&sender.proxy) == UINT32_MAX) {
      std::this_thread::yield();
      continue;
    }
    const uint64_t taken = mpk_proxy_take(&sender.proxy, frames.data(), frames.size());
    CHECK(mpk_proxy_apply(reinterpret_cast<uint8_t*>(heap.data()), heap.size() * 8, frames.data(), taken) == MPK_OK, "no frames");
    done = 0;
    for (uint32_t w = 0; w < workers; ++w) done += heap[counters + w * MPK_COUNTER_STRIDE];
  }
  for (auto& thread : threads) thread.join();
  for (uint32_t w = 0; w < workers; ++w)
    for (uint32_t i = 0; i < each; ++i) CHECK(heap[place(w, i) + kWords] == 0, "written between the rows");
}

/* Data larger than a frame goes in pieces. A full ring ends the wait by the deadline, and an abort ends it too. */
void proxy_is_bounded() {
  ProxiedRank sender(4 * MPK_FRAME_BYTES);
  std::vector<uint8_t> source(3 * MPK_FRAME_BYTES / 2), heap(sender.memory.size() * 8, 0), frames(2 * MPK_FRAME_BYTES);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 7 + i / 256);
  CHECK(mpk::platform::put(&sender.rank, 1, &sender.memory[64], source.data(), source.size()), "no way");
  while (mpk_proxy_next(&sender.proxy) == 1) {
    const uint64_t taken = mpk_proxy_take(&sender.proxy, frames.data(), frames.size());
    CHECK(mpk_proxy_apply(heap.data(), heap.size(), frames.data(), taken) == MPK_OK, "no frames");
  }
  CHECK(memcmp(&heap[512], source.data(), source.size()) == 0, "the pieces do not make the whole");
  sender.rank.deadline_ns = 50000000;
  uint32_t puts = 0;
  while (mpk::platform::put(&sender.rank, 1, &sender.memory[64], source.data(), 30000)) ++puts;
  CHECK(puts == 8, "%u puts of 30000 bytes in 256 KiB", puts);
  sender.rank.deadline_ns = 60000000000ull;
  sender.rank.control->abort = MPK_ABORT_PEER;
  CHECK(!mpk::platform::put(&sender.rank, 1, &sender.memory[64], source.data(), 60000), "an aborted rank waits");
}

/* Frames that would write outside the heap, or are truncated, are refused. Words for the abort word keep the first
 * cause. */
void proxy_refuses_what_is_no_frame() {
  ProxiedRank sender(4 * MPK_FRAME_BYTES);
  std::vector<uint64_t> heap(1024, 0);
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(heap.data());
  const auto apply = [&](mpk_frame frame, uint64_t given) {
    std::vector<uint8_t> all(256, 0);
    memcpy(all.data(), &frame, sizeof(frame));
    return mpk_proxy_apply(bytes, heap.size() * 8, all.data(), given);
  };
  const mpk_frame add = {48, MPK_FRAME_ADD, 1, 0, 8184, 0, 1, 0, 0};
  CHECK(apply(add, 48) == MPK_OK && heap[1023] == 1, "an addition");
  CHECK(apply(add, 47) == MPK_ABORT_QUEUE && apply(add, 96) == MPK_ABORT_QUEUE, "cut short, or followed by nothing");
  for (uint64_t offset : {8185ull, 8192ull, ~0ull - 7}) CHECK(apply({48, MPK_FRAME_ADD, 1, 0, offset, 0, 1, 0, 0}, 48) == MPK_ABORT_QUEUE, "%lx", offset);
  CHECK(apply({80, MPK_FRAME_ROWS, 1, 2, 8168, 8, 0, 16, 0}, 80) == MPK_OK, "two rows to the end");
  CHECK(apply({80, MPK_FRAME_ROWS, 1, 2, 8176, 8, 0, 16, 0}, 80) == MPK_ABORT_QUEUE, "beyond the end");
  CHECK(apply({80, MPK_FRAME_ROWS, 1, 3, 0, 8, 0, 16, 0}, 80) == MPK_ABORT_QUEUE, "more rows than bytes");
  CHECK(apply({80, MPK_FRAME_ROWS, 1, 2, 0, ~0ull, 0, 16, 0}, 80) == MPK_ABORT_QUEUE, "a stride that wraps");
  CHECK(apply({80, MPK_FRAME_WORDS, 1, 5, 0, 0, 0, 0, 0}, 80) == MPK_ABORT_QUEUE, "more words than bytes");
  CHECK(apply({80, 99, 1, 0, 0, 0, 0, 0, 0}, 80) == MPK_ABORT_QUEUE, "of no kind");
  const uint64_t first = (7ull << 32) | MPK_ABORT_KERNEL, second = (5ull << 32) | MPK_ABORT_PEER;
  for (const uint64_t word : {first, second}) {
    CHECK(mpk::platform::put_word(&sender.rank, 1, &sender.memory[0], word), "no way");
    std::vector<uint8_t> frames(MPK_FRAME_BYTES);
    const uint64_t taken = mpk_proxy_take(&sender.proxy, frames.data(), frames.size());
    CHECK(mpk_proxy_apply(bytes, heap.size() * 8, frames.data(), taken) == MPK_OK && heap[0] == first, "abort word %lx", heap[0]);
  }
}

/* What a rank's proxy hands to its GPU leaves the inbox in order, lap after lap. A full inbox takes nothing, and an
 * abort overtakes its contents. */
void inbox_keeps_order(uint64_t capacity, uint32_t puts) {
  mpk_inbox inbox{};
  std::vector<uint64_t> bytes(capacity / 8), heap(4096, 0);
  uint64_t abort = 0;
  inbox.capacity = capacity;
  inbox.bytes = reinterpret_cast<uint8_t*>(bytes.data());
  inbox.abort = &abort;
  std::thread reader([&] {
    std::vector<uint8_t> frame(MPK_FRAME_BYTES);
    for (uint32_t i = 0; i < puts; ++i) {
      uint64_t taken;
      while ((taken = mpk_inbox_take(&inbox, frame.data())) == 0) std::this_thread::yield();
      mpk_frame head;
      memcpy(&head, frame.data(), sizeof(head));
      CHECK(head.kind == MPK_FRAME_ROWS && head.value == i, "frame %lu in place of %u", head.value, i);
      for (uint64_t k = sizeof(head); k < sizeof(head) + head.row_bytes; ++k) CHECK(frame[k] == static_cast<uint8_t>(i + k), "frame %u, byte %lu", i, k);
    }
  });
  for (uint32_t i = 0; i < puts; ++i) {
    const uint32_t payload = 8 + i * 37 % 3000, whole = (48 + payload + 15) / 16 * 16;
    const mpk_frame head = {whole, MPK_FRAME_ROWS, 1, 1, 64, 0, i, payload, 0};
    std::vector<uint8_t> frame(whole);
    memcpy(frame.data(), &head, sizeof(head));
    for (uint32_t k = 48; k < 48 + payload; ++k) frame[k] = static_cast<uint8_t>(i + k);
    int code;
    while ((code = mpk_inbox_put(&inbox, heap.size() * 8, frame.data(), whole)) == MPK_INBOX_FULL) std::this_thread::yield();
    CHECK(code == MPK_OK, "code %d", code);
  }
  reader.join();
  std::vector<uint64_t> words = {0, 0, 0, 0, 0, 0, (3ull << 32) | MPK_ABORT_PEER, 0};
  const mpk_frame head = {64, MPK_FRAME_WORDS, 1, 1, 0, 0, 0, 0, 0};
  memcpy(words.data(), &head, sizeof(head));
  std::vector<uint8_t> out(MPK_FRAME_BYTES);
  CHECK(mpk_inbox_put(&inbox, heap.size() * 8, reinterpret_cast<uint8_t*>(words.data()), 64) == MPK_OK, "an abort");
  CHECK(abort == words[6] && mpk_inbox_take(&inbox, out.data()) == 0, "the abort waits for its turn, or has lost its origin");
}

}  // namespace

int main() {
  queue_many_producers(1, 2, 2000);
  queue_many_producers(2, 3, 5000);
  queue_many_producers(64, 4, 10000);
  queue_full_is_bounded();
  ring_many_workers(3, 3, 3000);
  ring_many_workers(16, 2, 10000);
  ring_overrun_is_noticed();
  team_queues_tasks(3, 2, false);
  team_queues_tasks(3, 2, true);
  team_queues_tasks(7, 4096, false);
  team_does_not_wait_for_ever();
  proxy_brings_data_before_signals(1024, 3, 150);
  proxy_brings_data_before_signals(16384, 2, 500);
  proxy_is_bounded();
  proxy_refuses_what_is_no_frame();
  inbox_keeps_order(4 * MPK_FRAME_BYTES, 2000);
  std::puts("queue, ring and proxy: ok");
}
