/* Joins the partial results of units that several tasks of `attention_prefill` computed.
 *
 * Task t looks at cut t. If that lies inside a unit, the tasks of all cuts inside the unit share its rows, 16 at a time. */
#pragma once

#include "tasks/attention_prefill/gpu_setup.cuh"

namespace mpk {
namespace gpu {

template <uint32_t Dtype, uint32_t Dim, bool Window = false, uint32_t Columns = 0>
struct AttentionPrefillMerge : TaskCode {
  static_assert(Dim == 64 || Dim == 128, "attention_prefill_merge");

  static __device__ __forceinline__ int run(Context& context) {
    Control& control = *reinterpret_cast<Control*>(context.work());
    if (context.warp == 0) begin(context, control);
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    const uint32_t first = control.first_sixteen, count = control.last_sixteen - first;
#pragma unroll 1
    for (uint32_t i = context.warp; i < count * (Dim / 32); i += kComputeWarps) join(context, control, first + i / (Dim / 32), i % (Dim / 32) * 4);
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kSixteens = prefill::kTileRows / 16;

  struct Control {
    attention_prefill::Tile tile;
    uint32_t first_sixteen, last_sixteen; /* groups of 16 rows of the unit */
    uint32_t num_parts;
    uint32_t parts[1]; /* numbers of the partial results; there is room for as many as there are tasks */
  };

  static __device__ __forceinline__ void begin(Context& context, Control& control) {
    const mpk_attention_prefill_params& params = context.params<mpk_attention_prefill_params>();
    const uint32_t lane = context.lane, task = static_cast<uint32_t>(context.slot->task.args[0]), tasks = params.tasks;
    const uint32_t control_bytes = (sizeof(Control) + 4 * tasks + 15) / 16 * 16;
    uint64_t* before = reinterpret_cast<uint64_t*>(context.work() + control_bytes);
    const attention_prefill::Slots slots(context, before);
    const prefill::Shape shape = prefill::shape_of(params.group, params.kv_heads, Window ? params.window : 0);
    if (lane == 0) control.first_sixteen = control.last_sixteen = 0;
    if (control_bytes + (slots.count() + 1) * sizeof(uint64_t) > kWorkBytes) {
      context.fail(MPK_ABORT_KERNEL);
      return;
    }
    __syncwarp();
    slots.fill(shape, before, lane);
    const prefill::Place own = prefill::cut(slots, shape, task, tasks);
    if (task == 0 || own.key == 0 || own.active >= slots.count()) return;
    /* Finds the cuts inside the unit: [first, last]. */
    uint32_t first = task, last = task;
    for (bool go_on = true; go_on;) {
      const bool here = first > 1 + lane && inside(prefill::cut(slots, shape, first - 1 - lane, tasks), own);
      const uint32_t row = __ffs(static_cast<int>(~__ballot_sync(0xFFFFFFFFu, here)));
      go_on = row == 0; /* all lanes */
      first -= go_on ? 32 : row - 1;
    }
    for (bool go_on = true; go_on;) {
      const bool here = last + 1 + lane < tasks && inside(prefill::cut(slots, shape, last + 1 + lane, tasks), own);
      const uint32_t row = __ffs(static_cast<int>(~__ballot_sync(0xFFFFFFFFu, here)));
      go_on = row == 0;
      last += go_on ? 32 : row - 1;
    }
    uint32_t count = 1;
    if (lane == 0) control.parts[0] = (first - 1) * prefill::kPartsOfTask + 1;
#pragma unroll 1
    for (uint32_t begin = first; begin <= last; begin += 32) {
      const uint32_t at = begin + lane;
      bool has = false;
      if (at <= last) {
        const prefill::Place from = prefill::cut(slots, shape, at, tasks), to = prefill::cut(slots, shape, at + 1, tasks);
        has = !prefill::same_place(from, to); /* a task may have no part */
      }
      const uint32_t all = __ballot_sync(0xFFFFFFFFu, has);
      if (has) control.parts[count + __popc(all & ((1u << lane) - 1))] = at * prefill::kPartsOfTask;
      count += __popc(all);
    }
    if (lane == 0) {
      const uint32_t cuts = last - first + 1;
      control.tile = attention_prefill::tile_at(context, shape, own);
      control.first_sixteen = kSixteens * (task - first) / cuts;
      control.last_sixteen = kSixteens * (task - first + 1) / cuts;
      control.num_parts = count;
    }
  }

  static __device__ __forceinline__ bool inside(const prefill::Place& place, const prefill::Place& unit) {
    return prefill::same_unit(place, unit) && place.key != 0;
  }

  /* By one warp: 16 rows, and four blocks of 8 columns starting with `block`. */
  static __device__ __forceinline__ void join(const Context& context, const Control& control, uint32_t sixteen, uint32_t block) {
    const mpk_operand &partial = context.input(0), &state = context.input(1), &out = context.output(0);
    const uint32_t lane = context.lane, row = sixteen * 16 + lane / 4, count = control.num_parts;
    float highest[2] = {-INFINITY, -INFINITY}, all[2] = {0.0f, 0.0f};
    float sums[4][4] = {};
    /* Two parts at a time, so that all their loads are in flight together; most units have two. The sums so far are scaled to the new
     * maximum. */
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += 2) {
      float2 own[2][2];
      float4 v[2][4];
#pragma unroll
      for (uint32_t p = 0; p < 2; ++p) {
        const uint32_t part = control.parts[i + p < count ? i + p : i];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) own[p][r] = *attention_prefill::partial_state(state, part, row + 8 * r);
#pragma unroll
        for (uint32_t b = 0; b < 4; ++b) v[p][b] = *attention_prefill::partial_sums(partial, part, Dim, sixteen, block + b, lane);
      }
      const bool pair = i + 1 < count;
      float before[2], weight[2][2];
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        const float most = fmaxf(highest[r], fmaxf(own[0][r].x, own[1][r].x));
        const float base = most == -INFINITY ? 0.0f : most;
        before[r] = attention_prefill::power_of_2(highest[r] - base);
        weight[0][r] = attention_prefill::power_of_2(own[0][r].x - base);
        weight[1][r] = pair ? attention_prefill::power_of_2(own[1][r].x - base) : 0.0f;
        all[r] = fmaf(weight[1][r], own[1][r].y, fmaf(weight[0][r], own[0][r].y, before[r] * all[r]));
        highest[r] = most;
      }
#pragma unroll
      for (uint32_t b = 0; b < 4; ++b) {
        const float4 &x = v[0][b], &y = v[1][b];
        sums[b][0] = fmaf(weight[1][0], y.x, fmaf(weight[0][0], x.x, before[0] * sums[b][0]));
        sums[b][1] = fmaf(weight[1][0], y.y, fmaf(weight[0][0], x.y, before[0] * sums[b][1]));
        sums[b][2] = fmaf(weight[1][1], y.z, fmaf(weight[0][1], x.z, before[1] * sums[b][2]));
        sums[b][3] = fmaf(weight[1][1], y.w, fmaf(weight[0][1], x.w, before[1] * sums[b][3]));
      }
    }
    const attention_prefill::RowMap map(context.params<mpk_attention_prefill_params>());
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const float low[4] = {sums[0][2 * r], sums[1][2 * r], sums[2][2 * r], sums[3][2 * r]};
      const float high[4] = {sums[0][2 * r + 1], sums[1][2 * r + 1], sums[2][2 * r + 1], sums[3][2 * r + 1]};
      const attention_prefill::Result<Dim, Columns> to(map.find(control.tile, row + 8 * r), out);
      to.template store<Dtype>(8 * block, low, high, reciprocal(all[r]), lane);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
