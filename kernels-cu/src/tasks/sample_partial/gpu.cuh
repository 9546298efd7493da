/* Finds, for one part of the columns and some samples, the highest logit and the part's tokens that may be drawn. Teams of warps
 * process samples side by side. What is left of a sample then is a few tokens, for one warp. */
#pragma once

#include "tasks/sample_partial/gpu_few.cuh"
#include "tasks/sample_partial/gpu_sample.cuh"

namespace mpk {
namespace gpu {

struct SamplePartial : TaskCode {
  static __device__ __forceinline__ int run(Context& context) {
    const uint32_t kept = context.params<mpk_sample_partial_params>().kept;
    const uint32_t first = static_cast<uint32_t>(context.slot->task.args[3]);
    const uint32_t samples = samples_of(context, first, static_cast<uint32_t>(context.slot->task.args[4]));
    const SampleColumns columns(context);
    const Team team = columns.team(context, samples);
    SampleRow row(context, first + team.index, kept);
    if (columns.count > SampleColumns::kMost) context.fail(MPK_ABORT_KERNEL);
    Work* work = reinterpret_cast<Work*>(context.work());
    /* Noise does not depend on the logits, and most workers would wait now. The last one to come would not, so it is done only if it
     * will probably be needed: for flat logits. */
    bool bounded = peek(shared_state().needs_noise) != 0 && team.index < samples && columns.count <= SampleColumns::kMost && adds_noise(row);
    if (bounded) bound_noise(team, columns, row, SampleColumns::share(work->bound, team));
    const int code = context.wait_inputs();
    if (code != MPK_OK) return code;
    /* Nothing would wait for the first sample's copy, and it could arrive while the next task uses the memory. */
    if (samples == 0) return MPK_OK;

    float* value = SampleColumns::share(work->value, team);
    if (team.index < samples) columns.bring(value, team, context.input(0), team.index);
    if (team.thread < team.warps()) work->found[0][team.first_warp() + team.thread] = work->found[1][team.first_warp() + team.thread] = 0;
    Candidates candidates = {};
#pragma unroll 1
    for (uint32_t sample = team.index; sample < samples; sample += team.count()) {
      const bool more = sample + team.count() < samples;
      SampleRow next;
      if (more) next.load(context, first + sample + team.count());
      SampleColumns::arrive();
      if (row.mode == sampling::kImpossible) context.fail(MPK_ABORT_KERNEL);
      else one_sample(context, team, columns, row, sample, bounded, value, work, candidates);
      bounded = false;
      if (more) columns.bring(value, team, context.input(0), sample + team.count());
      if (candidates.samples == team.warps() || candidates.used > (kPool >> team.shift()) / 2) list_frontiers(context, team, work, candidates);
      if (!more) break;
      next.resolve(kept);
      row = next;
    }
    if (candidates.samples != 0) list_frontiers(context, team, work, candidates);
    return MPK_OK;
  }

 private:
  static constexpr uint32_t kPool = 1024;
  /* What is written per warp has the team's warps next to each other. */
  struct Work {
    float value[SampleColumns::kRoom];    /* each team has its share, also of what follows */
    uint16_t bound[SampleColumns::kRoom]; /* upper bounds of noise, the upper halves of floats; or the room of `select_few` */
    NoisyToken pool[kPool];               /* candidates of some samples, without their noisy values */
    NoisyToken tops[2][kComputeWarps], bests[2][kComputeWarps];
    uint32_t found[2][kComputeWarps]; /* candidates of each of these samples; the others were those before */
  };
  static_assert(sizeof(FewRoom) <= SampleColumns::kRoom / Team::kMost * sizeof(uint16_t), "a team's share of `bound`");
  static_assert(sizeof(Work) <= kWorkBytes, "too many columns for the work area");

  /* A team's samples whose candidates wait in its pool, one for each of its warps. */
  struct Candidates {
    uint32_t samples, used, turn;
    uint32_t reduced; /* which of `tops` and `bests` the next sample uses */
    /* The warp's own sample. */
    uint32_t begin, count, most, position;
    uint64_t top, seed;
    uint32_t* record;
  };

  static __device__ __forceinline__ bool adds_noise(const SampleRow& row) { return row.mode == sampling::kDraw || row.mode == sampling::kFrontier; }

  /* Upper bounds of the noise of a thread's own tokens. */
  static __device__ __forceinline__ void bound_noise(const Team& team, const SampleColumns& columns, const SampleRow& row, uint16_t* bound) {
#pragma unroll 1
    for (uint32_t i = 4 * team.thread; i < columns.count; i += 4 * team.threads()) {
      uint32_t upper[4];
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        const float most = sampling::most_gumbel(sampling::random_word(row.sampling.seed, row.position, columns.first_token + i + u));
        const uint32_t bits = sampling::bits_of(most); /* cut off, a negative number becomes higher */
        upper[u] = bits + (most > 0.0f ? 0xFFFFu : 0u);
      }
      *reinterpret_cast<uint2*>(bound + i) = make_uint2(__byte_perm(upper[0], upper[1], 0x7632), __byte_perm(upper[2], upper[3], 0x7632));
    }
  }

  /* `bounded`: `work->bound` has bounds of this sample's noise. */
  static __device__ __forceinline__ void one_sample(Context& context, const Team& team, const SampleColumns& columns, const SampleRow& row, uint32_t sample,
                                                    bool bounded, float* value, Work* work, Candidates& candidates) {
    const mpk_sampling& s = row.sampling;
    const uint32_t threads = team.threads();
    uint32_t* record = reinterpret_cast<uint32_t*>(context.output(0).addr) + static_cast<uint64_t>(sample) * context.output(0).strides[2];
    float highest = -INFINITY;
    uint32_t at = 4 * team.thread;
    columns.process(value, team, columns.counts_of(context.input(1), row), s, [&](uint32_t i, float own) {
      if (own > highest) { /* columns ascend, so an equal value loses */
        highest = own;
        at = i;
      }
    });
    NoisyToken mine = {4 * team.thread < columns.count ? sampling::key_of(highest, columns.first_token + at) : 0, highest};
    if (row.mode == sampling::kList) {
      if (team.thread == 0) store_head(context, record, 0, 0);
      const mpk_operand& lists = context.output(1); /* [1, 1, samples, words] */
      uint32_t* list = reinterpret_cast<uint32_t*>(lists.addr) + static_cast<uint64_t>(sample) * lists.strides[2];
      const uint32_t log_threads = team.log_threads(), fours = (columns.count + 4 * threads - 1) / (4 * threads);
      const auto key_at = [&](uint32_t j) {
        const uint32_t turn = j >> log_threads, i = 4 * (((turn / 4) << log_threads) + (j & (threads - 1))) + turn % 4;
        return i < columns.count ? sampling::key_of(value[i], columns.first_token + i) : 0;
      };
      /* What fills up the last four is no token. Otherwise, an equal logit passes. */
      const auto each_own = [&](uint32_t bound, auto take) {
        const float least = sampling::value_of_key(static_cast<uint64_t>(bound) << 32);
#pragma unroll 1
        for (uint32_t i = 4 * team.thread; i < columns.count; i += 4 * threads) {
          const float4 four = *reinterpret_cast<const float4*>(value + i);
          const float own[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (uint32_t u = 0; u < 4; ++u)
            if ((bound == 0 || own[u] >= least) && i + u < columns.count) take(sampling::key_of(own[u], columns.first_token + i + u));
        }
      };
      FewRoom* few = reinterpret_cast<FewRoom*>(SampleColumns::share(work->bound, team));
      const FewKeys listed = select_few(context, team, 4 * threads * fours, s.top_k, mine.key, few, key_at, each_own, [&](uint32_t i, uint64_t key) { store_pair(list, i, key); });
      fill_list(team, list, listed.count, s.top_k);
      return;
    }
    if (adds_noise(row) && mine.key != 0) mine.noisy = highest + sampling::noise(s.seed, row.position, sampling::token_of_key(mine.key));
    NoisyToken top = with_highest_key(mine), best = best_of_warp(mine);
    NoisyToken *tops = work->tops[candidates.reduced], *bests = work->bests[candidates.reduced];
    candidates.reduced ^= 1;
    if (context.lane == 0) {
      tops[context.warp] = top;
      bests[context.warp] = best;
    }
    team.sync();
    const NoisyToken none = {0, 0.0f};
    top = with_highest_key(team.of_warps(tops, context.lane, none));
    if (!adds_noise(row) || top.key == 0) {
      if (team.thread == 0) store_head(context, record, top.key, 0);
      return;
    }
    best = best_of_warp(team.of_warps(bests, context.lane, none));
    /* Nobody reads the counts of the samples before the last list_frontiers any more, since there was a barrier. */
    if (candidates.samples == 0 && team.thread < team.warps()) work->found[1 - candidates.turn][team.first_warp() + team.thread] = 0;

    /* The token with the highest logit comes first in order, so it beats all tokens below its noisy value. `best`, the highest noisy
     * value of the threads' highest logits, beats those that come after it. Most logits of a trained model are so low that no noise
     * lifts them above that. For most of the others the random word tells it, without the logarithms. */
    const uint32_t most = row.mode == sampling::kDraw ? 1 : MPK_SAMPLE_FRONTIER;
    const float before_best = most == 1 ? best.noisy : top.noisy, best_value = sampling::value_of_key(best.key);
    uint32_t* found = &work->found[candidates.turn][team.first_warp() + candidates.samples];
    const uint32_t room = kPool >> team.shift();
    NoisyToken* pool = work->pool + team.index * room;
    const uint16_t* bound = SampleColumns::share(work->bound, team);
    uint32_t looked_at = 0, needed_by = 0;
#pragma unroll 1
    for (uint32_t i = 4 * team.thread; i < columns.count; i += 4 * threads) {
      const float4 four = *reinterpret_cast<const float4*>(value + i);
      const float own[4] = {four.x, four.y, four.z, four.w};
      float least[4], noise[4];
      bool needed = false;
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        least[u] = own[u] >= best_value ? before_best : best.noisy;
        needed |= !(own[u] + sampling::kMostNoise < least[u]);
      }
      ++looked_at;
      if (!needed) continue;
      ++needed_by;
      if (bounded) {
        const uint2 halves = *reinterpret_cast<const uint2*>(bound + i);
        noise[0] = __uint_as_float(halves.x << 16);
        noise[1] = __uint_as_float(halves.x & 0xFFFF0000u);
        noise[2] = __uint_as_float(halves.y << 16);
        noise[3] = __uint_as_float(halves.y & 0xFFFF0000u);
      } else {
#pragma unroll
        for (uint32_t u = 0; u < 4; ++u) noise[u] = sampling::most_gumbel(sampling::random_word(s.seed, row.position, columns.first_token + i + u));
      }
      needed = false;
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) needed |= !(own[u] + noise[u] < least[u]);
      if (!needed) continue;
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        if (own[u] + noise[u] < least[u] || i + u >= columns.count) continue;
        const uint32_t place = candidates.used + atomicAdd(found, 1u);
        if (place < room) pool[place].key = sampling::key_of(own[u], columns.first_token + i + u);
      }
    }
    if (context.thread == 0) poke(shared_state().needs_noise, 2 * needed_by > looked_at ? 1u : 0u);
    team.sync();
    const uint32_t count = *found;
    const bool fit = candidates.used + count <= room;
    if (team.warp == candidates.samples) {
      candidates.begin = candidates.used;
      candidates.count = fit ? count : 0;
      candidates.most = most;
      candidates.top = top.key;
      candidates.record = record;
      candidates.seed = s.seed;
      candidates.position = row.position;
    }
    candidates.samples += 1;
    if (fit) candidates.used += count;
    else list_slowly(context, team, columns, row, value, top.key, most, work, record);
  }

  /* The one of a warp that has the highest key. */
  static __device__ __forceinline__ NoisyToken with_highest_key(const NoisyToken& mine) {
    const uint64_t key = highest_of_warp(mine.key);
    const uint32_t owners = __ballot_sync(0xFFFFFFFFu, mine.key == key);
    return {key, __shfl_sync(0xFFFFFFFFu, mine.noisy, __ffs(static_cast<int>(owners)) - 1)};
  }

  /* Each warp writes the frontier of its sample's candidates. Afterwards there are none. The next barrier comes before others. */
  static __device__ __forceinline__ void list_frontiers(const Context& context, const Team& team, Work* work, Candidates& candidates) {
    if (team.warp < candidates.samples && candidates.count != 0) {
      NoisyToken* own = work->pool + team.index * (kPool >> team.shift()) + candidates.begin;
#pragma unroll 1
      for (uint32_t i = context.lane; i < candidates.count; i += 32)
        own[i].noisy = sampling::value_of_key(own[i].key) + sampling::noise(candidates.seed, candidates.position, sampling::token_of_key(own[i].key));
      __syncwarp();
      const uint32_t count = frontier_of(own, candidates.count, candidates.most, candidates.top, context.lane,
                                         [&](uint32_t i, const NoisyToken& entry) {
                                           if (context.lane == 0) store_entry(candidates.record, i, entry);
                                         });
      if (context.lane == 0) store_head(context, candidates.record, candidates.top, count);
    }
    candidates.samples = candidates.used = 0;
    candidates.turn ^= 1;
  }

  /* The same for a sample whose candidates are too many for the pool: all threads of the team compute the noise again for each entry. */
  static __device__ __forceinline__ void list_slowly(const Context& context, const Team& team, const SampleColumns& columns, const SampleRow& row, const float* value, uint64_t top,
                                                  uint32_t most, Work* work, uint32_t* record) {
    uint64_t floor = 0;
    uint32_t count = 0;
#pragma unroll 1
    while (count < most && floor != top) {
      NoisyToken next = {0, 0.0f};
#pragma unroll 1
      for (uint32_t i = 4 * team.thread; i < columns.count; i += 4 * team.threads()) {
#pragma unroll 1
        for (uint32_t j = i; j < min(i + 4, columns.count); ++j) {
          const uint32_t token = columns.first_token + j;
          const uint64_t key = sampling::key_of(value[j], token);
          if (key <= floor) continue;
          const NoisyToken own = {key, value[j] + sampling::noise(row.sampling.seed, row.position, token)};
          if (own.beats(next)) next = own;
        }
      }
      const NoisyToken best = best_of_team(context, team, next, work->bests[count % 2]);
      if (team.thread == 0) store_entry(record, count, best);
      floor = best.key;
      ++count;
    }
    if (team.thread == 0) store_head(context, record, top, count);
    team.sync(); /* the next sample writes to `bests` */
  }
};

}  // namespace gpu
}  // namespace mpk
