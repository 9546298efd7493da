/* Attention of a warp on keys and values that the loader has brought into the ring of stages: a tile of 8 queries.
 *
 * A stage holds a piece of a page: one head's keys at some positions. The next stage holds their values. After one head's piece
 * comes the same piece of the task's next head. The loader runs ahead of the task's events, as it does with weights: it brings
 * only positions of earlier iterations, which no task writes any more. New positions come from the kept rows. All warps take all
 * stages in order. Each head has the same number of warps, which take its units of 16 keys in turn.
 *
 * So as many bytes are in flight as for a product of weights, even while the task before this one ends, and they occupy no
 * registers. The cache's layout (cache_layout.cuh) is such that ldmatrix reads fragments of keys and values without bank conflicts.
 *
 * The products are those of MmaTile, with dimensions in their own order. */
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
  using Layout = typename Shares::Layout;
  static constexpr uint32_t kRowBytes = Dim * sizeof(Element);
  static constexpr uint32_t kSteps = Dim / 16; /* of 16 dimensions: two chunks of a row */

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
  static_assert(!kPossible || Layout::kBlocks, "bank conflicts");
  /* Whether a task with this number of queries is streamed: loader and compute warps must agree. */
  static constexpr __device__ __forceinline__ bool streams(uint32_t queries) { return queries <= kQueries; }

  __device__ StreamedTile(const Shares& share, uint32_t lane) : Base(share, lane) {}

  /* As MmaTile's. */
  static __device__ __forceinline__ uint32_t query_index(uint32_t q, uint32_t d) {
    return (d / 16 * 32 + q % 8 * 4 + d % 8 / 2) * 8 + (d % 16 / 8 * 2 + q / 8) * 2 + d % 2;
  }

  /* The compute warps fetch nothing. */
  __device__ __forceinline__ void fetch(uint32_t, uint32_t) {}
  __device__ __forceinline__ void fetch_rest(uint32_t, uint32_t) {}

  /* Computes all units from `begin` on, `step` positions apart, and passes all of the task's stages. */
  __device__ __forceinline__ void run(uint32_t begin, uint32_t step) {
    find_lane();
    this->clear();
    const uint32_t all_see = share_.keys_of(this->first_query_, last_);
    const uint32_t end = share_.last < share_.context ? share_.last : share_.context;
    uint4 queries[kSteps]; /* y and w: rows 8 to 15, which have no query. They may hold anything, because rows do not mix. */
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) queries[i] = *reinterpret_cast<const uint4*>(this->queries_ + (i * 32 + lane_) * 8);
    StageReader reader(lane_);
    uint32_t piece = share_.first, others = 2 * share_.in_views; /* stages of the piece before this head's, if the piece is below `end` */
    /* Waits for the keys of the unit at `begin`, unless they are kept rows. */
    const auto wait_for_keys = [&] {
      if (begin >= end) return true;
      const uint32_t skipped = (begin - piece) / kPiece;
      piece += skipped * kPiece;
      return pass(reader, others + skipped * 2 * Heads) && reader.wait();
    };
    const auto place = [&] { return reader.address() + (begin - piece) * kRowBytes; }; /* of the unit, in the stage */
    if (begin < last_) {
      uint32_t keys[kSteps][4], values[kSteps][4];
      float s[2][4];
      if (!wait_for_keys()) return;
      load<false>(keys, row_at(begin, end, place(), share_.new_keys()));
      if (begin < end) reader.give_back();
#pragma unroll 1
      for (;;) {
        scores(s, queries, keys);
        if (begin < end && !reader.wait()) return;
        load<true>(values, row_at(begin, end, place(), share_.new_values()));
        if (begin < end) {
          reader.give_back();
          piece += kPiece;
          others = 2 * (Heads - 1);
        }
        /* The next unit's keys are on their way from shared memory while this unit's probabilities are computed. After the last unit,
         * they are any rows: a load that depends on a condition would keep its registers alive through all kernel variants. */
        const uint32_t computed = begin;
        begin += step;
        const bool more = begin < last_;
        if (more && !wait_for_keys()) return;
        load<false>(keys, more ? row_at(begin, end, place(), share_.new_keys()) : shared_address(share_.new_keys()));
        if (more && begin < end) reader.give_back();
        this->probabilities(computed, all_see, s);
        add_values(s, values);
        if (!more) break;
      }
    }
    if (piece < end) others += 2 * Heads * ((end - piece + kPiece - 1) / kPiece);
    pass(reader, others - 2 * share_.in_views);
  }

  /* As MmaTile's. */
  __device__ __forceinline__ void store(float* out, float* state) const {
    this->store_state(state);
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) out[(2 * t_ + e % 2) * Shares::kOutPitch + 16 * i + e / 2 * 8 + g_] = this->out_[i][0][e];
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
  /* See Context::find_thread. */
  __device__ __forceinline__ void find_lane() {
    lane_ = Context::thread_index() % 32;
    g_ = lane_ / 4;
    t_ = lane_ % 4;
    of_lane_ = lane_ / 16 * (8 * kRowBytes) + lane_ % 8 * 128 + chunk();
    asm volatile("" : "+r"(of_lane_)); /* otherwise it would be computed again for every unit, between a wait and the loads */
  }
  /* Of a row of 128 bytes: where the lane's 16 bytes are. Units begin at a block. */
  __device__ __forceinline__ uint32_t chunk() const { return (lane_ / 8 % 2 ^ lane_ % 8) * 16; }

  /* Passes stages that this warp does not use. */
  static __device__ __forceinline__ bool pass(StageReader& reader, uint32_t stages) {
#pragma unroll 1
    for (; stages != 0; --stages) {
      if (!reader.wait()) return false;
      reader.give_back();
    }
    return true;
  }

  /* The 16 bytes that this lane names to ldmatrix, of the unit at `begin`, which is at `staged` in a stage. Positions from `end` on are
   * kept rows. Those that do not exist, after the last one, get the last one: their scores are masked, and 0 times its values is 0. */
  __device__ __forceinline__ uint32_t row_at(uint32_t begin, uint32_t end, uint32_t staged, const Element* kept) const {
    const uint32_t position = begin + lane_ / 16 * 8 + lane_ % 8;
    if (position < end) return staged + of_lane_;
    return shared_address(kept) + ((position < share_.last ? position : share_.last - 1) - share_.first_new) * 128 + chunk();
  }

  /* Loads fragments of the unit's 16 rows: of 16 dimensions each, [0] the first 8 rows and dimensions, [1] the next 8 dimensions, [2] and
   * [3] the same of the other 8 rows. For keys, these are right operands of the two groups of 8 keys. With `Transposed`, they are
   * left operands: the values' dimensions are rows of the product. */
  template <bool Transposed>
  __device__ __forceinline__ void load(uint32_t (&to)[kSteps][4], uint32_t first) const {
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t from = (first ^ i % 4 * 32) + i / 4 * (Layout::kNext64 * 2);
      if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(to[i][0]), "=r"(to[i][1]), "=r"(to[i][2]), "=r"(to[i][3]) : "r"(from));
      else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(to[i][0]), "=r"(to[i][1]), "=r"(to[i][2]), "=r"(to[i][3]) : "r"(from));
    }
  }

  static __device__ __forceinline__ void scores(float (&s)[2][4], const uint4 (&queries)[kSteps], const uint32_t (&keys)[kSteps][4]) {
    float odd[2][4]; /* steps: two shorter chains of dependent products */
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) s[j][e] = odd[j][e] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i)
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
        mma<Dtype>(i % 2 == 0 ? s[j] : odd[j], queries[i].x, queries[i].y, queries[i].z, queries[i].w, keys[i][2 * j], keys[i][2 * j + 1]);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) s[j][e] += odd[j][e];
  }

  __device__ __forceinline__ void add_values(const float (&p)[2][4], const uint32_t (&values)[kSteps][4]) {
    uint32_t b[1][2], rest[1][2];
    this->pack(p, b, rest);
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      mma<Dtype>(this->out_[i][0], values[i][0], values[i][1], values[i][2], values[i][3], b[0][0], b[0][1]);
      mma<Dtype>(this->out_[i][0], values[i][0], values[i][1], values[i][2], values[i][3], rest[0][0], rest[0][1]);
    }
  }

  uint32_t of_lane_ = 0; /* from the start of a unit in a stage to the lane's 16 bytes */

  using Base::g_;
  using Base::lane_;
  using Base::last_;
  using Base::share_;
  using Base::t_;
};

}  // namespace attention
}  // namespace gpu
}  // namespace mpk
