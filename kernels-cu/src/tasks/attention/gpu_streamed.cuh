/* Attention of a warp on keys and values that the loader has brought into the ring of stages: a tile of 8 queries.
 *
 * A stage holds a piece of a page: one head's keys at some positions. The next stage holds their values. After one head's piece
 * comes the same piece of the task's next head. The loader runs ahead of the task's events, as it does with weights: it brings
 * only positions of earlier iterations, which no task writes any more. New positions come from the kept rows. All warps take all
 * stages in order. Each head has the same number of warps, which take its units of 16 keys in turn.
 *
 * So as many bytes are in flight as for a product of weights, even while the task before this one ends, and they occupy no
 * registers. Reading values has 4-way bank conflicts, reading keys 2-way ones: an estimated half of shared memory's speed. */
#pragma once

#include "tasks/attention/gpu_mma.cuh"

namespace mpk {
namespace gpu {
namespace attention {

template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, uint32_t Heads, bool Window>
class StreamedTile : public MmaTile<Dtype, Dim, PageSize, 1, Window> {
  using Base = MmaTile<Dtype, Dim, PageSize, 1, Window>;
  using Shares = Share<Dtype, Dim, PageSize>;
  using Element = typename Shares::Element;
  static constexpr uint32_t kRowBytes = Dim * sizeof(Element);
  static constexpr uint32_t kKeyChunks = Base::kKeyChunks, kValueChunks = Base::kValueChunks;

 public:
  using Base::kKeys;
  using Base::kQueries;
  /* Positions per piece. A warp has at most one unit of a piece. */
  static constexpr uint32_t kWarps = kComputeWarps / Heads;
  static constexpr uint32_t kFitting = kStageBytes / kRowBytes / kKeys * kKeys, kMost = kFitting < kWarps * kKeys ? kFitting : kWarps * kKeys;
  static constexpr uint32_t kPiece = PageSize < kMost ? PageSize : kMost;
  /* Whether this form of the cache can be streamed. */
  static constexpr bool kPossible = Dtype != MPK_F32 && Dim % 64 == 0 && Dim <= 128 && kPiece > 0 && kPiece % kKeys == 0 &&
                                    PageSize % (kPiece > 0 ? kPiece : 1) == 0;
  /* Whether a task with this number of queries is streamed: loader and compute warps must agree. */
  static constexpr __device__ __forceinline__ bool streams(uint32_t queries) { return queries <= kQueries; }

  __device__ StreamedTile(const Shares& share, uint32_t lane) : Base(share, lane) {}

  /* The compute warps fetch nothing. */
  __device__ __forceinline__ void fetch(uint32_t, uint32_t) {}
  __device__ __forceinline__ void fetch_rest(uint32_t, uint32_t) {}

  /* Computes all units from `begin` on, `step` positions apart, and passes all of the task's stages. */
  __device__ __forceinline__ void run(uint32_t begin, uint32_t step) {
    this->clear();
    const uint32_t all_see = share_.keys_of(this->first_query_, last_);
    const uint32_t first = share_.first, end = share_.last < share_.context ? share_.last : share_.context;
    uint32_t queries[2 * kKeyChunks][2];
#pragma unroll
    for (uint32_t i = 0; i < 2 * kKeyChunks; ++i) {
      const uint4 fragment = *reinterpret_cast<const uint4*>(this->queries_ + (i * 32 + lane_) * 8);
      queries[i][0] = fragment.x, queries[i][1] = fragment.z; /* rows 8 to 15 have no query */
    }
    StageReader reader(lane_);
    uint32_t piece = first, others = 2 * share_.in_views; /* stages of the piece before this head's, if the piece is below `end` */
#pragma unroll 1
    for (; begin < last_; begin += step) {
      for (; piece < end && piece + kPiece <= begin; piece += kPiece) others += 2 * Heads;
      const bool staged = begin < end;
      if (staged && !(pass(reader, others) && reader.wait())) return;
      const bool whole = begin + kKeys <= end; /* whether the loader brought all of it */
      const uint32_t keys = reader.address() + (begin - piece) * kRowBytes;
      if (whole) load_keys<true>(keys, begin, end);
      else load_keys<false>(keys, begin, end);
      if (staged) reader.give_back();
      float s[2][4];
      scores(s, queries);
      if (staged && !reader.wait()) return;
      const uint32_t values = reader.address() + (begin - piece) * kRowBytes;
      if (whole) load_values<true>(values, begin, end);
      else load_values<false>(values, begin, end);
      if (staged) {
        reader.give_back();
        piece += kPiece;
        others = 2 * (Heads - 1);
      }
      this->probabilities(begin, all_see, s);
      this->add_values(s);
    }
    for (; piece < end; piece += kPiece) others += 2 * Heads;
    pass(reader, others - 2 * share_.in_views);
  }

  /* By one thread, after the barrier that follows `run`: moves on to the next task's stages. */
  __device__ __forceinline__ void leave() const {
    const uint32_t end = share_.last < share_.context ? share_.last : share_.context;
    RingPlace place = peek(shared_state().next_stage);
    if (end > share_.first) place.index += 2 * Heads * ((end - share_.first + kPiece - 1) / kPiece);
    place.parity ^= place.index / kStages & 1;
    place.index %= kStages;
    poke(shared_state().next_stage, place);
  }

 private:
  /* Passes stages that this warp does not use. */
  static __device__ __forceinline__ bool pass(StageReader& reader, uint32_t stages) {
#pragma unroll 1
    for (; stages != 0; --stages) {
      if (!reader.wait()) return false;
      reader.give_back();
    }
    return true;
  }

  /* `Whole`: known to be valid. */
  template <bool Whole>
  static __device__ __forceinline__ void load(uint4& to, uint32_t address, bool valid) {
    if constexpr (Whole) {
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "r"(address));
    } else {
      asm volatile(
          "{.reg .pred p; setp.ne.u32 p,%5,0; mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;"
          "@p ld.shared.v4.u32 {%0,%1,%2,%3},[%4];}"
          : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w) : "r"(address), "r"(static_cast<uint32_t>(valid)));
    }
  }

  /* For the unit at `begin`, which starts at `from` in a stage; positions from `end` on are kept rows. `Whole`:
   * there are none. */
  template <bool Whole>
  __device__ __forceinline__ void load_keys(uint32_t from, uint32_t begin, uint32_t end) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t c = 0; c < kKeyChunks; ++c) load<Whole>(keys_[j][c], from + (g_ + 8 * j) * kRowBytes + 64 * c + 16 * t_, begin + g_ + 8 * j < end);
    if (Whole) return;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t c = 0; c < kKeyChunks; ++c) this->load_kept(keys_[j][c], share_.new_keys(), begin + g_ + 8 * j, end, 32 * c + 8 * t_);
  }
  template <bool Whole>
  __device__ __forceinline__ void load_values(uint32_t from, uint32_t begin, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
      for (uint32_t c = 0; c < kValueChunks; ++c) {
        const uint32_t key = 2 * t_ + i % 2 + i / 2 * 8;
        load<Whole>(values_[c][i], from + key * kRowBytes + 128 * c + 16 * g_, begin + key < end);
      }
    if (Whole) return;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
      for (uint32_t c = 0; c < kValueChunks; ++c)
        this->load_kept(values_[c][i], share_.new_values(), begin + 2 * t_ + i % 2 + i / 2 * 8, end, 64 * c + 8 * g_);
  }

  /* As MmaTile's, from fragments of the queries in registers. */
  __device__ __forceinline__ void scores(float (&s)[2][4], const uint32_t (&queries)[2 * kKeyChunks][2]) {
    float odd[2][4];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) s[j][e] = odd[j][e] = 0.0f;
#pragma unroll
    for (uint32_t c = 0; c < kKeyChunks; ++c)
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        const uint4& key = keys_[j][c];
        mma<Dtype>(s[j], queries[2 * c][0], 0, queries[2 * c][1], 0, key.x, key.y);
        mma<Dtype>(odd[j], queries[2 * c + 1][0], 0, queries[2 * c + 1][1], 0, key.z, key.w);
      }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) s[j][e] += odd[j][e];
  }

  using Base::g_;
  using Base::keys_;
  using Base::lane_;
  using Base::last_;
  using Base::share_;
  using Base::t_;
  using Base::values_;
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
