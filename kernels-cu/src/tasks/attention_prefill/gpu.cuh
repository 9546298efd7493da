/* Causal attention of many rows on Hopper's tensor cores, over the pages that `attention_append` has filled.
 *
 * A task has its share of the iteration's units (units.h). The two warpgroups have 64 rows of a query tile each: queries and
 * weights are fragments in registers, keys and values come through shared memory (gpu_stream.cuh). In each step a warpgroup
 * begins the scores of a tile and adds the values of the tile before, so that its softmax runs beside products of its own;
 * and the warpgroups take turns with the tensor cores, half a step apart. The steps of a task's units follow each other
 * without a gap. */
#pragma once

#include "tasks/attention_prefill/gpu_stream.cuh"

namespace mpk {
namespace gpu {

template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize>
struct AttentionPrefill : TaskCode {
  static_assert(Dim == 64 || Dim == 128, "attention_prefill");
  using Places = attention_prefill::Layout<Dim>;
  using Part = attention_prefill::Part;
  using Slots = attention_prefill::Slots;

  static __device__ __forceinline__ int run(Context& context) {
    Control& control = *reinterpret_cast<Control*>(context.work() + Places::kControl);
    if (context.warp == 0) begin(context, control);
    int code = context.wait_inputs();
    if (code != MPK_OK) return code;
#pragma unroll 1
    while (reread(control.num_parts) != 0) {
      attend(context, control.num_parts, reread(control.steps));
      code = context.sync();
      if (code != MPK_OK) return code;
      if (context.thread == 0) {
        for (uint32_t i = 0; i < 2 * attention_prefill::kBarriers; ++i)
          asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(context.work()) + Places::kFull + i * 8) : "memory");
        take_parts(context, control);
      }
      code = context.sync();
      if (code != MPK_OK) return code;
    }
    return MPK_OK;
  }

 private:
  struct Control {
    prefill::Place next, end;
    uint32_t num_parts, steps; /* in the table, and the tiles of keys of all of them */
  };
  static_assert(sizeof(Control) <= Places::kParts - Places::kControl, "attention_prefill");

  /* One warp: the task's share. The weights lie where the tiles will. */
  static __device__ __forceinline__ void begin(Context& context, Control& control) {
    const mpk_attention_prefill_params& params = context.params<mpk_attention_prefill_params>();
    uint64_t* before = reinterpret_cast<uint64_t*>(context.work());
    const Slots slots(context, before);
    const prefill::Shape shape = prefill::shape_of(params.group, params.kv_heads);
    if ((slots.count() + 1) * sizeof(uint64_t) > Places::kFull) {
      if (context.lane == 0) {
        context.fail(MPK_ABORT_KERNEL);
        control.num_parts = 0;
      }
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

  /* One thread: as many parts as the table holds, and barriers for their steps. */
  static __device__ __forceinline__ void take_parts(Context& context, Control& control) {
    const mpk_attention_prefill_params& params = context.params<mpk_attention_prefill_params>();
    const prefill::Shape shape = prefill::shape_of(params.group, params.kv_heads);
    const Slots slots(context, nullptr);
    const uint32_t task = static_cast<uint32_t>(context.slot->task.args[0]);
    Part* parts = reinterpret_cast<Part*>(context.work() + Places::kParts);
    prefill::Place at = control.next;
    const prefill::Place end = control.end;
    uint32_t count = 0, steps = 0;
#pragma unroll 1
    while (count < Places::kMostParts && !prefill::same_place(at, end)) {
      const prefill::Part part = prefill::take_part(slots, shape, at, end);
      Part& to = parts[count++];
      to.tile = attention_prefill::tile_at(context, shape, part.place);
      to.begin = part.place.key;
      to.end = part.end;
      to.partial = prefill::is_whole(part) ? attention_prefill::kWhole : prefill::partial_index(part.place, task);
      steps += part.end - part.place.key;
    }
    control.next = at;
    control.num_parts = count;
    control.steps = steps;
    if (count == 0) return;
    for (uint32_t i = 0; i < 2 * attention_prefill::kBarriers; ++i)
      mbarrier_init(reinterpret_cast<uint64_t*>(context.work() + Places::kFull) + i, kEmptyArrivals);
  }

  /* Named barriers 2 and 3: that a warpgroup may begin its products. By number, since a branch would look divergent. */
  static __device__ __forceinline__ void wait_turn(uint32_t warpgroup) { asm volatile("bar.sync %0,256;" ::"r"(2 + warpgroup) : "memory"); }
  static __device__ __forceinline__ void give_turn(uint32_t warpgroup) { asm volatile("bar.arrive %0,256;" ::"r"(2 + warpgroup) : "memory"); }

  static __device__ __forceinline__ void attend(Context& context, const uint32_t& num_parts, uint32_t steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace attention_prefill;
    const uint32_t warpgroup = __shfl_sync(0xFFFFFFFFu, context.thread / 128, 0), lane = context.lane; /* the same for all lanes, as the compiler sees */
    const uint32_t work = shared_address(context.work());
    const uint32_t row = warpgroup * 64 + context.warp % 4 * 16 + lane / 4; /* of a query tile; and row + 8 */
    const float scale = context.params<mpk_attention_prefill_params>().scale * 1.4426950408889634f; /* of powers of 2 */
    Stream<Dtype, Dim, PageSize> stream(context, warpgroup, steps, num_parts);
    const Part* part = stream.parts();
    uint32_t key = part->begin; /* tile of the scores */
    uint32_t queries[Dim / 4];
    float scores[32] = {}, sums[Dim / 2] = {};
    uint32_t weights[16] = {};
    float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    uint32_t add = 0; /* 0: the sums are of an earlier unit */
    load_queries(context, row, part->tile, queries);
    if (warpgroup == 1) give_turn(0);

    /* The scores of a tile, which are there, to the weights of its values; the sums are made ready for them. */
    const auto weigh = [&] {
      float factor[2];
      if (__any_sync(0xFFFFFFFFu, (key + 1) * prefill::kTileKeys > part->tile.position + 1)) mask(context, row, part->tile, key, scores);
      soften(scores, scale, highest, total, factor);
      hold(scores); /* not after the wait: the products that it waits for are to run beside this */
      products_wait<0>();
      hold(sums);
      hold(scores); /* the weights' registers are free from here on */
      if (__any_sync(0xFFFFFFFFu, add != 0 && (factor[0] != 1.0f || factor[1] != 1.0f))) {
#pragma unroll
        for (uint32_t i = 0; i < Dim / 2; ++i) sums[i] *= factor[i / 2 % 2];
      }
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) weights[i] = packed<Dtype>(scores[2 * i], scores[2 * i + 1]);
    };

    stream.before(0);
    stream.wait(0);
    wait_turn(warpgroup);
    products_fence();
    begin_scores(scores, queries, keys_side(stream.keys_at(work, 0)));
    give_turn(1 - warpgroup);
    products_wait<0>();
    hold(scores);
    stream.after(0);
#pragma unroll 1
    for (uint32_t step = 1; step < steps; ++step) {
      const bool last = __any_sync(0xFFFFFFFFu, key + 1 == part->end); /* of its unit */
      if (last) load_queries(context, row, part[1].tile, queries);
      weigh();
      stream.before(step);
      stream.bring_next(step);
      const uint32_t keys = keys_side(stream.keys_at(work, step)), values = values_side(stream.values_at(work, step));
      stream.wait(step);
      wait_turn(warpgroup);
      products_fence();
      begin_scores(scores, queries, keys);
      begin_sums(sums, weights, values, add);
      give_turn(1 - warpgroup);
      products_wait<1>();
      hold(scores);
      stream.after(step);
      ++key;
      add = 1;
      if (last) {
        products_wait<0>();
        hold(sums);
        finish(context, row, *part, sums, highest, total);
        ++part;
        key = part->begin;
        add = 0;
        highest[0] = highest[1] = -INFINITY;
        total[0] = total[1] = 0.0f;
      }
    }
    weigh();
    stream.before(steps);
    stream.wait(steps);
    wait_turn(warpgroup);
    products_fence();
    begin_sums(sums, weights, values_side(stream.values_at(work, steps)), add);
    if (warpgroup == 0) give_turn(1);
    products_wait<0>();
    hold(sums);
    finish(context, row, *part, sums, highest, total);
#else
    (void)num_parts, (void)steps;
    context.fail(MPK_ABORT_KERNEL); /* the graph builder chooses this task type for Hopper only */
#endif
  }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static __device__ __forceinline__ attention_prefill::RowMap rows(const Context& context) {
    return attention_prefill::RowMap(context.params<mpk_attention_prefill_params>());
  }

  /* `attention_append` wrote them as the fragments want them (query_word): 32 elements are 16 bytes of each of four lanes. */
  static __device__ __forceinline__ void load_queries(const Context& context, uint32_t row, const attention_prefill::Tile& tile,
                                                      uint32_t (&queries)[Dim / 4]) {
    const mpk_operand& from = context.input(0);
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      uint64_t at;
      const bool valid = rows(context).find(tile, row + 8 * r, from.strides[0], Dim, &at);
      const uint64_t address = from.addr + at * 2 + context.lane % 4 * 16;
#pragma unroll
      for (uint32_t i = 0; i < Dim / 32; ++i) {
        uint32_t* q = queries + 8 * i + r;
        if (i == 0) load_global16_if<0>(q[0], q[2], q[4], q[6], address, valid);
        if (i == 1) load_global16_if<64>(q[0], q[2], q[4], q[6], address, valid);
        if (i == 2) load_global16_if<128>(q[0], q[2], q[4], q[6], address, valid);
        if (i == 3) load_global16_if<192>(q[0], q[2], q[4], q[6], address, valid);
      }
    }
  }

  static __device__ __forceinline__ void begin_scores(float (&scores)[32], const uint32_t (&queries)[Dim / 4], uint32_t keys) {
#pragma unroll
    for (uint32_t k = 0; k < Dim / 16; ++k)
      attention_prefill::times_keys<Dtype>(scores, queries + 4 * k, attention_prefill::descriptor(keys, k / 4 * attention_prefill::kHalfTile + k % 4 * 32),
                                           k != 0);
    attention_prefill::products_commit();
  }

  static __device__ __forceinline__ void begin_sums(float (&sums)[Dim / 2], const uint32_t (&weights)[16], uint32_t values, uint32_t add) {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k)
      attention_prefill::times_values<Dtype>(sums, weights + 4 * k, attention_prefill::descriptor(values, k * 2048), k == 0 ? add : 1);
    attention_prefill::products_commit();
  }

  /* A lane has, of each 8 keys, 2t and 2t + 1 for both rows. */
  static __device__ __forceinline__ void mask(const Context& context, uint32_t row, const attention_prefill::Tile& tile, uint32_t key, float (&scores)[32]) {
    const attention_prefill::RowMap map = rows(context);
    const int32_t first = static_cast<int32_t>(key * prefill::kTileKeys + 2 * (context.lane % 4));
    const int32_t limit0 = static_cast<int32_t>(tile.position + map.token(row)) + 1 - first;
    const int32_t limit1 = static_cast<int32_t>(tile.position + map.token(row + 8)) + 1 - first;
#pragma unroll
    for (int32_t i = 0; i < 32; ++i) {
      const int32_t at = i / 4 * 8 + i % 2;
      if (at >= (i / 2 % 2 == 0 ? limit0 : limit1)) scores[i] = -INFINITY;
    }
  }

  /* Scores to weights; `factor` is what the sums so far shrink by. */
  static __device__ __forceinline__ void soften(float (&scores)[32], float scale, float (&highest)[2], float (&total)[2], float (&factor)[2]) {
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      float mosts[4]; /* several chains */
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        const float two = fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]);
        mosts[j % 4] = j < 4 ? two : fmaxf(mosts[j % 4], two);
      }
      float most = fmaxf(fmaxf(mosts[0], mosts[1]), fmaxf(mosts[2], mosts[3]));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      most = fmaxf(most * scale, highest[r]);
      const float base = most == -INFINITY ? 0.0f : most;
      factor[r] = attention_prefill::power_of_2(highest[r] - base);
      highest[r] = most;
      float parts[4] = {};
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
          float& score = scores[4 * j + 2 * r + e];
          score = attention_prefill::power_of_2(fmaf(score, scale, -base));
          parts[j % 4] += score;
        }
      total[r] = fmaf(total[r], factor[r], (parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
  }

  /* Writes the result of a unit, or the partial one of a part. */
  static __device__ __forceinline__ void finish(const Context& context, uint32_t row, const Part& part, const float (&sums)[Dim / 2],
                                                const float (&highest)[2], const float (&total)[2]) {
    float all[2];
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      all[r] = total[r] + __shfl_xor_sync(0xFFFFFFFFu, total[r], 1);
      all[r] += __shfl_xor_sync(0xFFFFFFFFu, all[r], 2);
    }
    if (part.partial == attention_prefill::kWhole) {
      const mpk_operand& out = context.output(0);
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        uint64_t at;
        const bool valid = rows(context).find(part.tile, row + 8 * r, out.strides[0], Dim, &at);
        void* to = reinterpret_cast<void*>(out.addr + at * 2);
        const float inverse = reciprocal(all[r]);
#pragma unroll
        for (uint32_t j = 0; j < Dim / 8; j += 4) {
          const float low[4] = {sums[4 * j + 2 * r], sums[4 * j + 4 + 2 * r], sums[4 * j + 8 + 2 * r], sums[4 * j + 12 + 2 * r]};
          const float high[4] = {sums[4 * j + 2 * r + 1], sums[4 * j + 5 + 2 * r], sums[4 * j + 9 + 2 * r], sums[4 * j + 13 + 2 * r]};
          attention_prefill::store_blocks<Dtype>(to, 8 * j, valid, low, high, inverse, context.lane);
        }
      }
      return;
    }
    const mpk_operand &partial = context.output(1), &state = context.output(2);
#pragma unroll
    for (uint32_t j = 0; j < Dim / 8; ++j)
      *attention_prefill::partial_sums(partial, part.partial, Dim, row / 16, j, context.lane) =
          make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r)
      if (context.lane % 4 == r) *attention_prefill::partial_state(state, part.partial, row + 8 * r) = make_float2(highest[r], all[r]);
  }
#endif
};

}  // namespace gpu
}  // namespace mpk
