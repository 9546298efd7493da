/* Causal attention of many rows on Hopper's tensor cores, over the pages that `attention_append` has filled.
 *
 * A task computes its share of the iteration's units (units.h). Each of the two warpgroups has 64 rows of a query tile. Queries lie
 * in the work area. Keys and values come through the ring of stages, which the fetch warp fills (gpu_stream.cuh). The weights are
 * fragments in registers.
 *
 * In each step, a warpgroup starts the scores of a tile and the sums of the tile before, so its softmax runs while its own products
 * are computed. The warpgroups take turns with the tensor cores, half a step apart. The steps of a task's units follow each other
 * without a gap, because the next unit's queries are copied while a unit is computed. */
#pragma once

#include "tasks/attention_prefill/gpu_stream.cuh"
#include "tasks/attention_prefill/wgmma.cuh"

namespace mpk {
namespace gpu {

/* `Window`: a token sees only some positions before its own. `Columns`: of a column tile of the result if it is in MPK_LAYOUT_WIDE; 0: it is
 * rows. */
template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, bool Window = false, uint32_t Columns = 0>
struct AttentionPrefill : TaskCode {
  static constexpr bool kInlined = true;
  static_assert(Dim == 64 || Dim == 128, "attention_prefill");
  using Places = attention_prefill::Layout<Dim>;
  using Control = attention_prefill::Control;
  using Part = attention_prefill::Part;
  using Slots = attention_prefill::Slots;

  static __device__ __forceinline__ int run(Context& context) {
    Control& control = Places::control();
    if (context.warp == 0) begin(context, control);
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    for (;;) {
      const bool more = reread(control.more) != 0;
      attend(context, reread(control.steps));
      code = context.sync();
      if (code != MPK_OK || !more) return code;
      if (context.thread == 0) take_parts(context, control);
      code = context.sync();
      if (code != MPK_OK) return code;
    }
  }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static __device__ __forceinline__ bool load(Loader& loader) { return loader.lend(); }
  static __device__ __forceinline__ bool bring(const TaskSlot& slot) { return attention_prefill::bring_all<Dim, PageSize>(slot); }
#endif

 private:
  /* By one warp: finds the task's share. The slots' weights use memory that the queries overwrite later. */
  static __device__ __forceinline__ void begin(Context& context, Control& control) {
    const mpk_attention_prefill_params& params = context.params<mpk_attention_prefill_params>();
    uint64_t* before = reinterpret_cast<uint64_t*>(context.work());
    const Slots slots(context, before);
    const prefill::Shape shape = prefill::shape_of(params.group, params.kv_heads, Window ? params.window : 0);
    if ((slots.count() + 1) * sizeof(uint64_t) > Places::kControl) {
      context.fail(MPK_ABORT_KERNEL); /* all threads leave after wait_inputs */
      return;
    }
    slots.fill(shape, before, context.lane);
    if (context.lane < 2) {
      const uint32_t task = static_cast<uint32_t>(context.slot->task.args[0]);
      const prefill::Place place = prefill::cut(slots, shape, task + context.lane, params.tasks);
      if (context.lane == 0) control.next = place;
      else control.end = place;
    }
    __syncwarp();
    if (context.lane == 0) take_parts(context, control);
  }

  /* By one thread: fills the table with the next parts. */
  static __device__ __forceinline__ void take_parts(Context& context, Control& control) {
    const mpk_attention_prefill_params& params = context.params<mpk_attention_prefill_params>();
    const prefill::Shape shape = prefill::shape_of(params.group, params.kv_heads, Window ? params.window : 0);
    const Slots slots(context, nullptr);
    const uint32_t task = static_cast<uint32_t>(context.slot->task.args[0]);
    Part* parts = Places::parts();
    prefill::Place at = control.next;
    const prefill::Place end = control.end;
    uint32_t count = 0, steps = 0;
#pragma unroll 1
    while (count < Places::kMostParts && !prefill::same_place(at, end)) {
      const prefill::Part part = prefill::take_part(slots, shape, at, end);
      Part& to = parts[count++];
      to.tile = attention_prefill::tile_at(context, shape, part.place);
      const uint32_t hidden = Window ? prefill::hidden_tiles(shape, slots.at(part.place.active), part.place.tile) : 0;
      to.begin = hidden + part.place.key;
      to.end = hidden + part.end;
      to.partial = prefill::is_whole(part) ? attention_prefill::kWhole : prefill::partial_index(part.place, task);
      steps += part.end - part.place.key;
    }
    control.next = at;
    control.num_parts = count;
    control.steps = steps;
    control.more = prefill::same_place(at, end) ? 0 : 1;
  }

  /* Named barriers 2 and 3: a warpgroup may start its products. The barrier's number is computed, because the compiler would treat a
   * branch as divergent. */
  static __device__ __forceinline__ void wait_turn(uint32_t warpgroup) { asm volatile("bar.sync %0,256;" ::"r"(2 + warpgroup) : "memory"); }
  static __device__ __forceinline__ void give_turn(uint32_t warpgroup) { asm volatile("bar.arrive %0,256;" ::"r"(2 + warpgroup) : "memory"); }

  static __device__ __forceinline__ void attend(Context& context, uint32_t steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace attention_prefill;
    const uint32_t warpgroup = __shfl_sync(0xFFFFFFFFu, context.thread / 128, 0), lane = context.lane; /* tells the compiler that all lanes have the same value */
    const uint32_t row = warpgroup * 64 + context.warp % 4 * 16 + lane / 4; /* of a query tile; the thread also has row + 8 */
    const float scale = context.params<mpk_attention_prefill_params>().scale * 1.4426950408889634f; /* for powers of 2 */
    Taken taken;
    /* A tile begins at an even stage if it has two: the fetch warp passes a stage, too. */
    const bool odd = steps != 0 && taken.at % kTileStages != 0;
    if (context.thread == 0) WarpLoader::begin(); /* the fetch warp may read inputs and the table of parts */
    if (steps == 0 || odd) {
      taken.wait(0, 1);
      taken.give_back(0, lane);
      ++taken.at;
    }
    if (steps != 0) {
      const Part* part = Places::parts();
      const Part* const end = part + reread(Places::control().num_parts);
      uint32_t key = part->begin; /* the tile whose scores are computed */
      uint32_t buffer = 0;        /* of the queries */
      float scores[64] = {}, sums[Dim / 2] = {};
      uint32_t weights[32];
      float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
      uint32_t add = 0; /* 0: the sums belong to an earlier unit */
      bool holds = false; /* the warp has not given back the values before `taken` */
      bring_queries(context, warpgroup, part->tile, buffer);
      if (warpgroup == 1) give_turn(0);

      /* Turns the scores of a tile into the weights of its values, rescales the sums, and waits for the next tile, or two. */
      const auto weigh = [&](bool two) {
        float factor[2];
        if (__any_sync(0xFFFFFFFFu, (key + 1) * prefill::kTileKeys > part->tile.position + 1)) mask(context, row, part->tile, key, scores);
        if constexpr (Window) hide(context, row, part->tile, key, scores);
        soften(scores, scale, highest, total, factor);
        hold(scores);
        /* The products in flight must run during all of the above. ptxas moves the wait for them to the start of its basic block. The loop
         * in this wait for stages starts a new block. */
        taken.wait();
        if (two) taken.wait(kTileStages);
        products_wait<0>();
        hold(sums);
        hold(scores); /* from here on, the weights' registers are free */
        if (holds) give_back_values(taken, lane);
        if (__any_sync(0xFFFFFFFFu, add != 0 && (factor[0] != 1.0f || factor[1] != 1.0f))) {
#pragma unroll
          for (uint32_t i = 0; i < Dim / 2; ++i) sums[i] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (uint32_t i = 0; i < 32; ++i) weights[i] = packed<Dtype>(scores[2 * i], scores[2 * i + 1]);
      };

      queries_are_there();
      taken.wait();
      wait_turn(warpgroup);
      products_fence();
      begin_scores(scores, taken, 0, queries_at(context, warpgroup, buffer));
      give_turn(1 - warpgroup);
      if (part + 1 != end) bring_queries(context, warpgroup, part[1].tile, 1);
      products_wait<0>();
      hold(scores);
      give_back_keys(taken, lane);
      taken.at += kTileStages;
      weigh(steps != 1);
      /* No products are in flight from one round to the next. Otherwise ptxas would also reserve the registers of their weights in the
       * first round, where they are undefined. It would reserve them from the kernel's start, and all tasks would spill. */
#pragma unroll 1
      for (uint32_t step = 1; step < steps; ++step) {
        const bool last = __any_sync(0xFFFFFFFFu, key + 1 == part->end); /* the unit's last tile */
        if (last) {
          queries_are_there();
          buffer ^= 1;
        }
        const uint32_t queries = queries_at(context, warpgroup, buffer);
        wait_turn(warpgroup);
        products_fence();
        begin_scores(scores, taken, 0, queries);
        begin_sums(sums, weights, taken, kTileStages, add);
        give_turn(1 - warpgroup);
        products_wait<1>();
        hold(scores);
        give_back_keys(taken, lane);
        taken.at += 2 * kTileStages;
        holds = true;
        ++key;
        add = 1;
        if (last) {
          products_wait<0>();
          hold(sums);
          give_back_values(taken, lane);
          holds = false;
          finish(context, row, *part, sums, highest, total);
          ++part;
          /* Overwrites the queries of the unit before. All warps of the group have computed its last scores, since they take turns as a
           * group. */
          if (part + 1 != end) bring_queries(context, warpgroup, part[1].tile, buffer ^ 1);
          key = part->begin;
          add = 0;
          highest[0] = highest[1] = -INFINITY;
          total[0] = total[1] = 0.0f;
        }
        weigh(step + 1 != steps);
      }
      wait_turn(warpgroup);
      products_fence();
      begin_sums(sums, weights, taken, 0, add);
      if (warpgroup == 0) give_turn(1);
      products_wait<0>();
      hold(sums);
      taken.at += kTileStages;
      give_back_values(taken, lane);
      finish(context, row, *part, sums, highest, total);
    }
    context.sync();
    if (context.thread == 0) taken.leave();
#else
    (void)steps;
    context.fail(MPK_ABORT_KERNEL); /* the graph builder uses this task type only on Hopper */
#endif
  }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr uint32_t kTileStages = Places::kTileStages;
  static constexpr float kSlack = 8.0f; /* as a power of 2: no weight exceeds 256, which f16 can represent */

  /* The ring of stages, starting with the next one that the compute warps take. */
  struct Taken {
    static_assert((kStages & (kStages - 1)) == 0 && kStages >= 4 * kTileStages, "attention_prefill");
    uint32_t at; /* index of that stage, counted from a multiple of 2 kStages */

    __device__ __forceinline__ Taken() {
      const RingPlace place = peek(shared_state().next_stage);
      at = place.index + place.parity * kStages;
    }
    __device__ __forceinline__ void leave() const { poke(shared_state().next_stage, {at % kStages, at / kStages % 2}); }
    /* Waits for a tile. The barrier of its last stage stands for all. Cannot hang, because every copy that was started completes. */
    __device__ __forceinline__ void wait(uint32_t ahead = 0, uint32_t stages = kTileStages) const {
      const uint32_t number = at + ahead + stages - 1;
      while (!mbarrier_test(shared_address(shared_state().stage_full) + number % kStages * 8, number / kStages % 2)) {}
    }
    __device__ __forceinline__ uint32_t address(uint32_t ahead) const { return shared_address(stage_at(0)) + (at + ahead) % kStages * kStageBytes; }
    /* The warp has read the stage. */
    __device__ __forceinline__ void give_back(int32_t ahead, uint32_t lane) const {
      if (kEveryLaneArrives || lane == 0) mbarrier_arrive(shared_address(shared_state().stage_empty) + (at + ahead) % kStages * 8);
    }
  };
  static __device__ __forceinline__ void give_back_keys(const Taken& taken, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kTileStages; ++i) taken.give_back(i, lane);
  }
  /* The stages directly before `taken`. */
  static __device__ __forceinline__ void give_back_values(const Taken& taken, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kTileStages; ++i) taken.give_back(static_cast<int32_t>(i) - static_cast<int32_t>(kTileStages), lane);
  }

  static __device__ __forceinline__ attention_prefill::RowMap rows(const Context& context) {
    return attention_prefill::RowMap(context.params<mpk_attention_prefill_params>());
  }

  static __device__ __forceinline__ uint32_t queries_at(const Context& context, uint32_t warpgroup, uint32_t buffer) {
    return shared_address(context.work()) + buffer * Places::kQueryBytes + warpgroup * (Places::kQueryBytes / 2);
  }
  /* Copies the warpgroup's 64 rows of a query tile; rows that do not exist become zeros. The first 64 elements of all rows come before
   * the other elements. */
  static __device__ __forceinline__ void bring_queries(const Context& context, uint32_t warpgroup, const attention_prefill::Tile& tile, uint32_t buffer) {
    constexpr uint32_t kChunks = Dim / 8, kAtOnce = 128 / kChunks;
    const mpk_operand& from = context.input(0);
    const uint32_t thread = context.thread % 128, chunk = thread % kChunks;
    const uint32_t to = queries_at(context, warpgroup, buffer) + chunk / 8 * attention_prefill::kHalfTile;
    const attention_prefill::RowMap map = rows(context);
    const uint32_t stride = from.strides[0];
    const uint64_t first = from.addr + chunk * 16;
    const attention_prefill::Tile own = tile; /* in registers, because the copies may write any memory */
#pragma unroll
    for (uint32_t i = 0; i < 64 / kAtOnce; ++i) {
      const uint32_t row = i * kAtOnce + thread / kChunks;
      uint64_t at;
      const bool valid = map.find(own, warpgroup * 64 + row, stride, Dim, &at);
      asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to + row * 128 + (chunk % 8 ^ row % 8) * 16),
                   "l"(first + (valid ? at * 2 : 0)), "r"(valid ? 16u : 0u)
                   : "memory");
    }
  }
  /* Waits for the thread's part of the queries. Products that start after the next turn may read it. */
  static __device__ __forceinline__ void queries_are_there() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  static __device__ __forceinline__ void begin_scores(float (&scores)[64], const Taken& taken, uint32_t ahead, uint32_t queries) {
    uint32_t from[2 * kTileStages]; /* 64 elements of the queries, and of the keys */
#pragma unroll
    for (uint32_t i = 0; i < kTileStages; ++i) {
      from[2 * i] = attention_prefill::rows_side(queries + i * attention_prefill::kHalfTile);
      from[2 * i + 1] = attention_prefill::rows_side(taken.address(ahead) + i * 1024);
    }
#pragma unroll
    for (uint32_t k = 0; k < Dim / 16; ++k)
      attention_prefill::times_keys<Dtype>(scores, attention_prefill::descriptor<1024>(from[k / 4 * 2], k % 4 * 32),
                                           attention_prefill::descriptor<Dim * 16>(from[k / 4 * 2 + 1], k % 4 * 32), k != 0);
    attention_prefill::products_commit();
  }

  static __device__ __forceinline__ void begin_sums(float (&sums)[Dim / 2], const uint32_t (&weights)[32], const Taken& taken, uint32_t ahead,
                                                    uint32_t add) {
    const uint32_t from = attention_prefill::values_side(taken.address(ahead));
#pragma unroll
    for (uint32_t k = 0; k < 8; ++k)
      attention_prefill::times_values<Dtype>(sums, weights + 4 * k, attention_prefill::descriptor<Dim * 16>(from, k * Dim * 32), k == 0 ? add : 1);
    attention_prefill::products_commit();
  }

  /* Of each 8 keys, a lane has keys 2t and 2t + 1 of both rows. */
  static __device__ __forceinline__ void mask(const Context& context, uint32_t row, const attention_prefill::Tile& tile, uint32_t key, float (&scores)[64]) {
    const attention_prefill::RowMap map = rows(context);
    const int32_t first = static_cast<int32_t>(key * prefill::kTileKeys + 2 * (context.lane % 4));
    const int32_t limit0 = static_cast<int32_t>(tile.position + map.token(row)) + 1 - first;
    const int32_t limit1 = static_cast<int32_t>(tile.position + map.token(row + 8)) + 1 - first;
#pragma unroll
    for (int32_t i = 0; i < 64; ++i) {
      const int32_t at = i / 4 * 8 + i % 2;
      if (at >= (i / 2 % 2 == 0 ? limit0 : limit1)) scores[i] = -INFINITY;
    }
  }

  /* Removes the keys before the windows of the rows, if the tile has any. */
  static __device__ __forceinline__ void hide(const Context& context, uint32_t row, const attention_prefill::Tile& tile, uint32_t key, float (&scores)[64]) {
    const uint32_t window = context.params<mpk_attention_prefill_params>().window;
    if (!__any_sync(0xFFFFFFFFu, first_key(tile.position + prefill::kTileRows - 1, window) > key * prefill::kTileKeys)) return;
    const attention_prefill::RowMap map = rows(context);
    const int32_t first = static_cast<int32_t>(key * prefill::kTileKeys + 2 * (context.lane % 4));
    /* The window may be larger than any position. */
    const int32_t from0 = static_cast<int32_t>(first_key(tile.position + map.token(row), window)) - first;
    const int32_t from1 = static_cast<int32_t>(first_key(tile.position + map.token(row + 8), window)) - first;
#pragma unroll
    for (int32_t i = 0; i < 64; ++i) {
      const int32_t at = i / 4 * 8 + i % 2;
      if (at < (i / 2 % 2 == 0 ? from0 : from1)) scores[i] = -INFINITY;
    }
  }
  static __device__ __forceinline__ uint32_t first_key(uint32_t position, uint32_t window) {
    return position < window ? 0 : position - window + 1;
  }

  /* Turns scores into weights. The sums so far must be multiplied by `factor`. Weights are relative to `highest`. It follows the
   * maximum of the scores only when that has grown by kSlack, because most tiles raise the maximum slightly. */
  static __device__ __forceinline__ void soften(float (&scores)[64], float scale, float (&highest)[2], float (&total)[2], float (&factor)[2]) {
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      float mosts[4]; /* shorter chains of dependent operations */
#pragma unroll
      for (uint32_t j = 0; j < 16; ++j) {
        const float two = fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
        mosts[j % 4] = j < 4 ? two : fmaxf(mosts[j % 4], two);
      }
      float most = fmaxf(fmaxf(mosts[0], mosts[1]), fmaxf(mosts[2], mosts[3]));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      most *= scale;
      if (!(most > highest[r] + kSlack)) most = highest[r];
      const float base = most == -INFINITY ? 0.0f : most;
      factor[r] = attention_prefill::power_of_2(highest[r] - base);
      highest[r] = most;
      float parts[4] = {};
#pragma unroll
      for (uint32_t j = 0; j < 16; ++j)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * r + e];
          score = attention_prefill::power_of_2(fmaf(score, scale, -base));
          parts[j % 4] += score;
        }
      total[r] = fmaf(total[r], factor[r], (parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
  }

  /* Writes the result of a unit, or the partial result of a part. */
  static __device__ __forceinline__ void finish(const Context& context, uint32_t row, const Part& part, const float (&sums)[Dim / 2],
                                                const float (&highest)[2], const float (&total)[2]) {
    float all[2];
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      all[r] = total[r] + __shfl_xor_sync(0xFFFFFFFFu, total[r], 1);
      all[r] += __shfl_xor_sync(0xFFFFFFFFu, all[r], 2);
    }
    const uint32_t index = part.partial;
    if (index == attention_prefill::kWhole) {
      const mpk_operand& out = context.output(0);
      const attention_prefill::RowMap map = rows(context);
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        const attention_prefill::Result<Dim, Columns> to(map.find(part.tile, row + 8 * r), out);
        const float inverse = reciprocal(all[r]);
#pragma unroll
        for (uint32_t j = 0; j < Dim / 8; j += 4) {
          const float low[4] = {sums[4 * j + 2 * r], sums[4 * j + 4 + 2 * r], sums[4 * j + 8 + 2 * r], sums[4 * j + 12 + 2 * r]};
          const float high[4] = {sums[4 * j + 2 * r + 1], sums[4 * j + 5 + 2 * r], sums[4 * j + 9 + 2 * r], sums[4 * j + 13 + 2 * r]};
          to.template store<Dtype>(8 * j, low, high, inverse, context.lane);
        }
      }
      return;
    }
    const mpk_operand& state = context.output(2);
    float4* const to = attention_prefill::partial_sums(context.output(1), index, Dim, row / 16, 0, context.lane);
#pragma unroll
    for (uint32_t j = 0; j < Dim / 8; ++j) to[32 * j] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
    const bool first = context.lane % 4 == 0; /* a choice, because an index would put the numbers into local memory */
    if (context.lane % 4 < 2)
      *attention_prefill::partial_state(state, index, first ? row : row + 8) =
          first ? make_float2(highest[0], all[0]) : make_float2(highest[1], all[1]);
  }
#endif
};

}  // namespace gpu
}  // namespace mpk
