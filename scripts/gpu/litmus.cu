// Litmus tests of the memory orders that the protocol uses on GPUs (kernels-cu/protocol/platform/gpu.h), as it uses them.
//
// Pairs of blocks pass data in rounds. As in a task, the producer's threads store, and after a barrier of the block one
// of them triggers. One lane of the consumer waits. After a barrier, the consumer's threads read with plain loads, at
// addresses that they also read in the round before. Before the producer overwrites the data, it waits for the
// consumer's `done` in the same way (an anti-dependency). In the test of flagged words, threads read two words at a
// time and wait only for the flags in the words. In the test `handed on`, a warp of a third block is between the two,
// as a scheduler is: one of its lanes acquires, and after a barrier of the warp another lane releases.
//
// Prints a JSON line per test. `control` is the same test without acquire and release; it should see old data.
#include <cstdio>
#include <cuda_runtime.h>

#include "cuda_check.h"
#include "platform/gpu.h"

using namespace mpk;
using platform::Scope;

constexpr unsigned kThreads = 256, kPairs = 60, kRounds = 20000;
constexpr unsigned long long kDeadline = 4000000000ull;  // clock cycles: two seconds

// One pair's memory. `words` and `ready` belong to the consumer's GPU, `done` to the producer's.
struct Pair {
  unsigned long long words[kThreads];
  alignas(128) uint64_t ready;
  alignas(128) uint64_t handed;
};
struct Result {
  unsigned long long wrong;
  unsigned late;
};

enum Mode : int { kEvents, kFlagged, kHanded, kControl };

__device__ unsigned mixed(unsigned round, unsigned thread) {
  unsigned x = round * 0x9E3779B9u ^ thread * 0x85EBCA6Bu;
  x ^= x >> 15;
  return x * 0x2C1B3C6Du;
}

// Threads arrive at different times, and in another order in each round.
__device__ void dawdle(unsigned round, unsigned salt) {
  if (mixed(round, threadIdx.x / 32 + salt) % 8 == 0) __nanosleep(mixed(round, salt) % 500);
}

// A bounded wait of one thread, like Context::wait_inputs: the polls are relaxed, and the last one acquires.
template <Scope S>
__device__ bool wait_for(const uint64_t* counter, uint64_t wanted, Mode mode, Result* result) {
  const long long start = clock64();
  while (platform::load<S>(counter, platform::kRelaxed) < wanted) {
    if (clock64() - start > static_cast<long long>(kDeadline)) {
      result->late = 1;
      return false;
    }
  }
  if (mode != kControl) platform::load<S>(counter, platform::kAcquire);
  return true;
}

template <Scope S>
__device__ void trigger(uint64_t* counter, Mode mode) {
  platform::fetch_add<S>(counter, uint64_t{1}, mode == kControl ? platform::kRelaxed : platform::kRelease);
}

template <Scope S>
__device__ void produce(Pair* pair, uint64_t* done, Mode mode, Result* result) {
  __shared__ bool go;
  const unsigned thread = threadIdx.x;
  for (unsigned round = 1; round <= kRounds; ++round) {
    if (thread == kThreads - 32) go = wait_for<S>(done, round - 1, mode, result);
    __syncthreads();
    if (!go) return;
    dawdle(round, 0);
    const unsigned long long word = static_cast<unsigned long long>(round) << 32 | mixed(round, thread);
    if (mode == kFlagged) platform::store<Scope::kSystem>(&pair->words[thread], word, platform::kRelaxed);
    else pair->words[thread] = word;
    __syncthreads();
    if (thread == 0 && mode != kFlagged) trigger<S>(&pair->ready, mode);
  }
}

template <Scope S>
__device__ void consume(Pair* pair, uint64_t* done, Mode mode, Result* result) {
  __shared__ bool go;
  const unsigned thread = threadIdx.x;
  unsigned long long wrong = 0;
  for (unsigned round = 1; round <= kRounds; ++round) {
    if (thread == 0) go = true;
    __syncthreads();
    if (mode == kFlagged) {
      const long long start = clock64();
      unsigned long long seen[2];
      const unsigned first = thread / 2 * 2;
      for (;;) {
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1},[%2];" : "=l"(seen[0]), "=l"(seen[1]) : "l"(&pair->words[first]) : "memory");
        if (seen[0] >> 32 == round && seen[1] >> 32 == round) break;
        // A word that has not arrived is the complete word of the round before.
        for (unsigned i = 0; i < 2; ++i) {
          const unsigned flag = static_cast<unsigned>(seen[i] >> 32);
          if (flag != 0 && static_cast<unsigned>(seen[i]) != mixed(flag, first + i)) ++wrong;
        }
        if (clock64() - start > static_cast<long long>(kDeadline)) {
          result->late = 1;
          go = false;
          break;
        }
      }
      for (unsigned i = 0; i < 2; ++i) wrong += go && static_cast<unsigned>(seen[i]) != mixed(round, first + i);
    } else {
      if (thread == kThreads - 32) go = wait_for<S>(mode == kHanded ? &pair->handed : &pair->ready, round, mode, result);
      __syncthreads();
      dawdle(round, 1);
      const unsigned long long seen = pair->words[thread];
      wrong += go && seen != (static_cast<unsigned long long>(round) << 32 | mixed(round, thread));
    }
    __syncthreads();
    if (!go) break;
    if (thread == 0) trigger<S>(done, mode);
  }
  if (wrong != 0) atomicAdd(&result->wrong, wrong);
}

// One warp; which lane releases changes from round to round.
template <Scope S>
__device__ void hand_on(Pair* pair, Mode mode, Result* result) {
  if (threadIdx.x >= 32) return;
  for (unsigned round = 1; round <= kRounds; ++round) {
    bool go = true;
    if (threadIdx.x == 0) go = wait_for<S>(&pair->ready, round, mode, result);
    __syncwarp();
    if (!__shfl_sync(0xFFFFFFFFu, go, 0)) return;
    if (threadIdx.x == 1 + round % 31) trigger<S>(&pair->handed, mode);
  }
}

// Three blocks to a pair.
template <Scope S>
__global__ void run_handed(Pair* pairs, uint64_t* done, Mode mode, Result* result) {
  const unsigned pair = blockIdx.x / 3;
  uint64_t* const mine = done + pair * 16;
  if (blockIdx.x % 3 == 0) produce<S>(pairs + pair, mine, mode, result);
  else if (blockIdx.x % 3 == 1) hand_on<S>(pairs + pair, mode, result);
  else consume<S>(pairs + pair, mine, mode, result);
}

// Blocks of either side: `produces` 1, 0, or 2 where even blocks do and odd ones do not.
template <Scope S>
__global__ void run(Pair* pairs, uint64_t* done, int produces, Mode mode, Result* result) {
  const unsigned pair = produces == 2 ? blockIdx.x / 2 : blockIdx.x;
  const bool here = produces == 2 ? blockIdx.x % 2 == 0 : produces == 1;
  uint64_t* const mine = done + pair * 16;
  if (here) produce<S>(pairs + pair, mine, mode, result);
  else consume<S>(pairs + pair, mine, mode, result);
}

static int told(const char* name, Result** results, int count) {
  Result all = {};
  for (int i = 0; i < count; ++i) {
    Result one;
    CHECK(cudaMemcpy(&one, results[i], sizeof(one), cudaMemcpyDefault));
    all.wrong += one.wrong;
    all.late |= one.late;
  }
  std::printf("{\"test\": \"%s\", \"rounds\": %u, \"pairs\": %u, \"wrong\": %llu, \"late\": %u}\n", name, kRounds, kPairs, all.wrong, all.late);
  std::fflush(stdout);
  return 0;
}

template <typename T>
static cudaError_t zeroed(T** memory, size_t count) {
  const cudaError_t error = cudaMalloc(memory, count * sizeof(T));
  return error != cudaSuccess ? error : cudaMemset(*memory, 0, count * sizeof(T));
}

int main() {
  int gpus = 0;
  CHECK(cudaGetDeviceCount(&gpus));
  const char* names[] = {"events", "flagged", "handed on", "control"};
  for (Mode mode : {kEvents, kFlagged, kHanded, kControl}) {
    Pair* pairs;
    uint64_t* done;
    Result* result;
    CHECK(cudaSetDevice(0));
    CHECK(zeroed(&pairs, kPairs));
    CHECK(zeroed(&done, kPairs * 16));
    CHECK(zeroed(&result, 1));
    if (mode == kHanded) run_handed<Scope::kDevice><<<3 * kPairs, kThreads>>>(pairs, done, mode, result);
    else run<Scope::kDevice><<<2 * kPairs, kThreads>>>(pairs, done, 2, mode, result);
    CHECK(cudaDeviceSynchronize());
    char name[64];
    std::snprintf(name, sizeof(name), "%s on one GPU", names[mode]);
    if (told(name, &result, 1) != 0) return 1;
  }
  int reachable = 0;
  if (gpus >= 2) CHECK(cudaDeviceCanAccessPeer(&reachable, 0, 1));
  if (!reachable) return 0;
  for (int gpu = 0; gpu < 2; ++gpu) {
    CHECK(cudaSetDevice(gpu));
    CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
  }
  for (Mode mode : {kEvents, kFlagged, kControl}) {
    Pair* pairs;
    uint64_t* done;
    Result* results[2];
    CHECK(cudaSetDevice(0));
    CHECK(zeroed(&done, kPairs * 16));
    CHECK(zeroed(&results[0], 1));
    CHECK(cudaSetDevice(1));
    CHECK(zeroed(&pairs, kPairs));
    CHECK(zeroed(&results[1], 1));
    CHECK(cudaDeviceSynchronize());
    run<Scope::kSystem><<<kPairs, kThreads>>>(pairs, done, 0, mode, results[1]);
    CHECK(cudaSetDevice(0));
    run<Scope::kSystem><<<kPairs, kThreads>>>(pairs, done, 1, mode, results[0]);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceSynchronize());
    char name[64];
    std::snprintf(name, sizeof(name), "%s to a peer", names[mode]);
    if (told(name, results, 2) != 0) return 1;
  }
  return 0;
}
