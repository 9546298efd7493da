/* Barriers of a block: mbarriers in shared memory, and the named barrier of the compute warps. */
#pragma once

#include <stdint.h>

namespace mpk {
namespace gpu {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the copy engine; a block barrier makes them visible to the other threads. */
__device__ __forceinline__ void mbarrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* Release at block scope: pairs with a successful mbarrier_test. The forms with an address take the barrier's
 * shared_address. */
__device__ __forceinline__ void mbarrier_arrive(uint32_t address) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state,[%0];}" ::"r"(address) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive(shared_address(barrier)); }

/* Acquire at block scope. True if the phase of this parity has completed; may wait for a short, bounded time. */
__device__ __forceinline__ bool mbarrier_test(uint32_t address, uint32_t parity) {
  uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done) : "r"(address), "r"(parity) : "memory");
#else
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done) : "r"(address), "r"(parity) : "memory");
#endif
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, uint32_t parity) { return mbarrier_test(shared_address(barrier), parity); }

/* The same without any wait. */
__device__ __forceinline__ bool mbarrier_look(uint32_t address, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done) : "r"(address), "r"(parity) : "memory");
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_look(uint64_t* barrier, uint32_t parity) { return mbarrier_look(shared_address(barrier), parity); }

/* Words in shared memory with which a warp publishes data to another warp of the block. */
__device__ __forceinline__ uint32_t load_acquire(const uint32_t& word) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0,[%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t& word, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0],%1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

#if __CUDA_ARCH__ >= 900
/* One arrival, and `bytes` further bytes that bulk copies will bring. */
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state,[%0],%1;}" ::"r"(address), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) { mbarrier_arrive_expect(shared_address(barrier), bytes); }

/* Data that is read once should leave the L2 cache first. */
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
/* Copies `bytes` bytes, a multiple of 16, from global to shared memory, both aligned to 16; completes on the
 * barrier. */
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
/* The same for data that other multiprocessors will read from the L2 cache. */
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/* Both forms with shared addresses. */
__device__ __forceinline__ void bulk_copy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
/* True in one lane of the warp, all of whose lanes must be active. Code that only this lane runs needs no loop over lanes.
 * The compiler otherwise puts such a loop around every bulk copy: 100 cycles per copy instead of 30. */
__device__ __forceinline__ bool elect_one() {
  uint32_t one;
  asm volatile("{.reg .pred p; elect.sync _|p,0xFFFFFFFF; selp.u32 %0,1,0,p;}" : "=r"(one));
  return one != 0;
}
/* Brings the same bytes into the L2 cache only. */
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
#else
/* Copies 16 bytes. Each of the threads that share a copy calls this, and arrives once its own copies are done. */
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
#endif

/* Called by all compute threads. Orders their memory accesses at block scope. True for all of them if `here` is true
 * for one. */
__device__ __forceinline__ bool compute_barrier_any(bool here) {
  uint32_t any;
  asm volatile("{.reg .pred p,q; setp.ne.u32 p,%1,0; bar.red.or.pred q,1,256,p; selp.u32 %0,1,0,q;}"
               : "=r"(any) : "r"(static_cast<uint32_t>(here)) : "memory");
  return any != 0;
}

}  // namespace gpu
}  // namespace mpk
