/* Shared by the sampling tasks: a sample's request, its columns, and searches by the threads of a team. */
#pragma once

#include "gpu/task.cuh"
#include "tasks/sample_partial/gpu_team.cuh"
#include "tasks/sample_partial/noise.h"

namespace mpk {
namespace gpu {

/* The request of a sample. It is constant during an iteration, so it may be read before the task's events. */
struct SampleRow {
  mpk_sampling sampling;
  uint32_t mode, position, slot;

  __device__ __forceinline__ SampleRow() : sampling{}, mode(sampling::kUnused), position(0), slot(0) {}
  __device__ __forceinline__ SampleRow(const Context& context, uint32_t sample, uint32_t kept) : SampleRow() {
    if (sample < context.slot->num_samples) {
      load(context, sample);
      resolve(kept);
    }
  }

  /* In two steps: between them, loads are under way. */
  __device__ __forceinline__ void load(const Context& context, uint32_t sample) {
    const mpk_batch* batch = context.batch();
    const Context::Active active = Context::active(static_cast<uint32_t>(batch->sample_active[sample]));
    slot = active.slot;
    position = active.context + active.num_rows;
    sampling = batch->sampling == nullptr ? mpk_sampling{} : batch->sampling[slot];
  }
  __device__ __forceinline__ void resolve(uint32_t kept) {
    sampling = sampling::taken(sampling, kept);
    mode = sampling::mode_of(sampling, kept);
  }
};

/* The columns that a task has, of logits [samples, columns] and counts [slots, columns]. Of a team's sample, a thread's own are
 * four at a time: from 4 thread, 4 (thread + threads), ... on. */
struct SampleColumns {
  uint32_t first_token, count;

  static constexpr uint32_t kMost = 5376; /* MOST_COLUMNS in sample_family.rs */
  /* Room for the logits of all teams' samples, and a team's share of it. */
  static constexpr uint32_t kRoom = 2 * kMost;
  template <typename T>
  static __device__ __forceinline__ T* share(T* room, const Team& team) {
    return room + team.index * (kRoom >> team.shift());
  }
  /* Of a task with so many samples in use. */
  __device__ __forceinline__ Team team(const Context& context, uint32_t samples) const { return Team(context, teams_shift(samples, (count + 3) / 4 * 4, kRoom)); }

  __device__ __forceinline__ explicit SampleColumns(const Context& context)
      : first_token(static_cast<uint32_t>(context.slot->task.args[1])), count(static_cast<uint32_t>(context.slot->task.args[2])) {}

  /* Copies a thread's own logits of row `sample` of `logits` to shared memory, and fills the last four up with -infinity. All
   * copies are under way together. A part without columns does not have this input. */
  __device__ __forceinline__ void bring(float* to, const Team& team, const mpk_operand& logits, uint32_t sample) const {
    if (count == 0) return;
    const uint8_t* from = row_address(logits, sample);
    const uint32_t step = 4 * team.threads(), whole = reinterpret_cast<uint64_t>(from) % 16 == 0 ? count / 4 * 4 : 0;
    uint32_t i = 4 * team.thread;
#pragma unroll 4
    for (; i < whole; i += step) asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(to + i)), "l"(from + i * 4) : "memory");
#pragma unroll 1
    for (; i < count; i += step) {
#pragma unroll
      for (uint32_t u = 0; u < 4; ++u) {
        if (i + u < count) asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(shared_address(to + i + u)), "l"(from + (i + u) * 4) : "memory");
        else to[i + u] = -INFINITY;
      }
    }
  }
  /* Waits for them. Only the thread itself may read what it brought. */
  static __device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  /* The words of `counts` that the sample's request needs; NULL if it counts no tokens. */
  __device__ __forceinline__ const uint32_t* counts_of(const mpk_operand& counts, const SampleRow& row) const {
    if (count == 0 || (row.sampling.flags & MPK_SAMPLING_PENALTIES) == 0) return nullptr;
    return reinterpret_cast<const uint32_t*>(row_address(counts, row.slot));
  }

  /* Processes a thread's own logits, and hands them to each(i, logit), in order; then what fills up the last four, -infinity. */
  template <typename Each>
  __device__ __forceinline__ void process(float* value, const Team& team, const uint32_t* counts, const mpk_sampling& s, Each each) const {
    const uint32_t step = 4 * team.threads();
    const auto four = [&](uint32_t i, const uint4& counted) {
      float4 own = *reinterpret_cast<const float4*>(value + i);
      own = {sampling::processed(own.x, counted.x, s), sampling::processed(own.y, counted.y, s), sampling::processed(own.z, counted.z, s),
             sampling::processed(own.w, counted.w, s)};
      *reinterpret_cast<float4*>(value + i) = own;
      each(i, own.x);
      each(i + 1, own.y);
      each(i + 2, own.z);
      each(i + 3, own.w);
    };
    if (counts == nullptr) {
#pragma unroll 2
      for (uint32_t i = 4 * team.thread; i < count; i += step) four(i, uint4{});
    } else {
#pragma unroll 1
      for (uint32_t i = 4 * team.thread; i < count; i += step) {
        const auto counted = [&](uint32_t u) { return i + u < count ? counts[i + u] : 0; };
        four(i, {counted(0), counted(1), counted(2), counted(3)});
      }
    }
  }
};

/* The samples of a task that are in use. */
__device__ __forceinline__ uint32_t samples_of(const Context& context, uint32_t first, uint32_t count) {
  const uint32_t used = context.slot->num_samples;
  return used > first ? min(used - first, count) : 0;
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint32_t warp_maximum(uint32_t v) { return __reduce_max_sync(0xFFFFFFFFu, v); }
__device__ __forceinline__ uint32_t warp_sum(uint32_t v) { return __reduce_add_sync(0xFFFFFFFFu, v); }
#endif

/* A token and its noisy value. */
struct NoisyToken {
  uint64_t key; /* 0: none */
  float noisy;
  __device__ __forceinline__ bool beats(const NoisyToken& other) const {
    return key != 0 && (other.key == 0 || noisy > other.noisy || (noisy == other.noisy && key > other.key));
  }
};

/* Maps a float to an integer with the same order. The result is above 0, except for NaN. */
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ ((bits & 0x80000000u) != 0 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float float_of_ordered(uint32_t v) { return __uint_as_float(v ^ ((v & 0x80000000u) != 0 ? 0x80000000u : 0xFFFFFFFFu)); }

/* The highest key of a warp. */
__device__ __forceinline__ uint64_t highest_of_warp(uint64_t key) {
  const uint32_t high = warp_maximum(static_cast<uint32_t>(key >> 32));
  const uint32_t low = warp_maximum(static_cast<uint32_t>(key >> 32) == high ? static_cast<uint32_t>(key) : 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

/* Compares in the order of `beats`: noisy value, then key. No noisy value is a negative zero. */
__device__ __forceinline__ NoisyToken best_of_warp(const NoisyToken& mine) {
  const uint32_t noisy = mine.key != 0 ? ordered(mine.noisy) : 0;
  const uint32_t best = warp_maximum(noisy);
  if (best == 0) return {0, 0.0f};
  const uint32_t high = warp_maximum(noisy == best ? static_cast<uint32_t>(mine.key >> 32) : 0);
  const bool here = noisy == best && static_cast<uint32_t>(mine.key >> 32) == high;
  const uint32_t low = warp_maximum(here ? static_cast<uint32_t>(mine.key) : 0);
  return {static_cast<uint64_t>(high) << 32 | low, float_of_ordered(best)};
}

/* Returns the best of a team's threads in all of them. `room` has kComputeWarps entries. It must not be the one of the previous
 * call, because threads may still read that. */
__device__ __forceinline__ NoisyToken best_of_team(const Context& context, const Team& team, const NoisyToken& mine, NoisyToken* room) {
  const NoisyToken of_warp = best_of_warp(mine);
  if (context.lane == 0) room[context.warp] = of_warp;
  team.sync();
  return best_of_warp(team.of_warps(room, context.lane, NoisyToken{0, 0.0f}));
}

/* For numbers below 2^58. */
__device__ __forceinline__ uint64_t sum_of_warp(uint64_t v) {
  constexpr uint32_t kLow = 26;
  const uint32_t low = warp_sum(static_cast<uint32_t>(v) & ((1u << kLow) - 1)), high = warp_sum(static_cast<uint32_t>(v >> kLow));
  return (static_cast<uint64_t>(high) << kLow) + low;
}

/* The shared memory that `select_keys` needs. */
struct SelectRoom {
  uint32_t bins[256];
  uint32_t digit, above, in_bin, taken;
};

/* All threads of a team: calls each(i, key) for the `wanted` highest keys of key_at(0 .. count - 1); i counts them in no particular order.
 * Keys are distinct, except for keys of 0, which are left out. Returns the number of keys found. Goes digit by digit from the top until a
 * whole bin is taken. */
template <typename KeyAt, typename Each>
__device__ __forceinline__ uint32_t select_keys(const Context& context, const Team& team, uint32_t count, uint32_t wanted, SelectRoom* room, KeyAt key_at, Each each) {
  uint64_t prefix = 0, mask = 0;
  uint32_t missing = wanted;
  if (team.thread == 0) room->taken = 0;
#pragma unroll 1
  for (uint32_t shift = 64; count > wanted && shift > 0;) {
    shift -= 8;
    for (uint32_t b = team.thread; b < 256; b += team.threads()) room->bins[b] = 0;
    team.sync();
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += team.threads()) {
      const uint32_t i = first + team.thread;
      const uint64_t key = i < count ? key_at(i) : 0;
      const bool here = key != 0 && (key & mask) == prefix;
      const uint32_t digit = here ? static_cast<uint32_t>(key >> shift) & 255u : 256u;
      /* Many logits have the same first digits, so lanes with the same digit share one addition. */
      const uint32_t same = __match_any_sync(0xFFFFFFFFu, digit);
      if (here && context.lane == __ffs(same) - 1) atomicAdd(&room->bins[digit], __popc(same));
    }
    team.sync();
    if (team.warp == 0) {
      /* Each lane has eight bins; lane 0 has the highest. */
      uint32_t bin[8], own = 0;
#pragma unroll
      for (uint32_t b = 0; b < 8; ++b) own += bin[b] = room->bins[255 - (context.lane * 8 + b)];
      uint32_t through = own;
#pragma unroll
      for (uint32_t s = 1; s < 32; s *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, through, s);
        if (context.lane >= s) through += other;
      }
      uint32_t above = through - own;
      const bool mine = above < missing && through >= missing;
      const bool none = context.lane == 31 && through < missing; /* there are fewer keys than wanted: take all */
      if (mine) {
#pragma unroll
        for (uint32_t b = 0; b < 8; ++b) {
          if (above < missing && above + bin[b] >= missing) {
            room->digit = 255 - (context.lane * 8 + b);
            room->above = above;
            room->in_bin = bin[b];
          }
          above += bin[b];
        }
      }
      if (none) {
        room->digit = 0;
        room->above = 0;
        room->in_bin = missing;
      }
    }
    team.sync();
    missing -= room->above;
    prefix |= static_cast<uint64_t>(room->digit) << shift;
    mask |= static_cast<uint64_t>(255u) << shift;
    if (room->in_bin == missing) break;
  }
  team.sync();
#pragma unroll 1
  for (uint32_t i = team.thread; i < count; i += team.threads()) {
    const uint64_t key = key_at(i);
    if (key != 0 && key >= prefix) each(atomicAdd(&room->taken, 1u), key);
  }
  team.sync();
  const uint32_t taken = room->taken;
  team.sync(); /* the next call sets it to 0, maybe while a slower warp is still here */
  return taken;
}

/* Fills a list of pairs (logit, token) from `listed` to its wanted length. */
__device__ __forceinline__ void store_pair(uint32_t* list, uint32_t i, uint64_t key) {
  list[2 * i] = sampling::bits_of(sampling::value_of_key(key));
  list[2 * i + 1] = sampling::token_of_key(key);
}
__device__ __forceinline__ void fill_list(const Team& team, uint32_t* list, uint32_t listed, uint32_t wanted) {
  for (uint32_t i = listed + team.thread; i < wanted; i += team.threads()) {
    list[2 * i] = sampling::bits_of(-INFINITY);
    list[2 * i + 1] = MPK_SAMPLE_NO_TOKEN;
  }
}
__device__ __forceinline__ uint64_t pair_key(const uint32_t* list, uint32_t i) {
  const uint2 pair = *reinterpret_cast<const uint2*>(list + 2 * i);
  return pair.y == MPK_SAMPLE_NO_TOKEN ? 0 : sampling::key_of(sampling::float_of(pair.x), pair.y);
}

/* The records [ranks, parts, samples, words] of row `sample`. */
struct SampleRecords {
  const uint32_t* first;
  uint64_t rank_stride, part_stride;
  uint32_t parts, count;
  __device__ __forceinline__ SampleRecords(const mpk_operand& records, uint32_t sample) {
    first = reinterpret_cast<const uint32_t*>(records.addr) + static_cast<uint64_t>(sample) * records.strides[2];
    rank_stride = records.strides[0];
    part_stride = records.strides[1];
    parts = records.dims[1];
    count = records.dims[0] * parts;
  }
  __device__ __forceinline__ const uint32_t* at(uint32_t r) const {
    if (count == parts) return first + r * part_stride; /* one rank */
    const uint32_t rank = quotient(r, parts);
    return first + rank * rank_stride + (r - rank * parts) * part_stride;
  }
};

/* The head of a record of sample_partial, and its entry `i`: token and noisy value. */
static_assert(MPK_SAMPLE_ENTRIES == 4 && MPK_SAMPLE_ENTRY_WORDS == 4 && MPK_SAMPLE_WORDS % 4 == 0, "16 bytes each");
static_assert(MPK_SAMPLE_HIGHEST == 0 && MPK_SAMPLE_HIGHEST_TOKEN == 1 && MPK_SAMPLE_COUNT == 2 && MPK_SAMPLE_HASH == 3, "words of the head");
__device__ __forceinline__ uint4 head_of(const uint32_t* record) { return *reinterpret_cast<const uint4*>(record); }
__device__ __forceinline__ uint4 entry_words(const uint32_t* record, uint32_t i) { return *reinterpret_cast<const uint4*>(record + MPK_SAMPLE_ENTRIES + i * MPK_SAMPLE_ENTRY_WORDS); }
__device__ __forceinline__ NoisyToken entry_of(const uint4& words) {
  return {sampling::key_of(sampling::float_of(words.x), words.z), sampling::float_of(words.y)};
}
/* The key of the highest logit of a record; 0: it has none. */
__device__ __forceinline__ uint64_t highest_of(const uint4& head) { return head.y == MPK_SAMPLE_NO_TOKEN ? 0 : sampling::key_of(sampling::float_of(head.x), head.y); }
__device__ __forceinline__ void store_entry(uint32_t* record, uint32_t i, const NoisyToken& entry) {
  *reinterpret_cast<uint4*>(record + MPK_SAMPLE_ENTRIES + i * MPK_SAMPLE_ENTRY_WORDS) =
      make_uint4(sampling::bits_of(sampling::value_of_key(entry.key)), sampling::bits_of(entry.noisy), sampling::token_of_key(entry.key), 0);
}
__device__ __forceinline__ void store_head(const Context& context, uint32_t* record, uint64_t highest, uint32_t count) {
  const bool none = highest == 0;
  *reinterpret_cast<uint4*>(record) = make_uint4(sampling::bits_of(none ? -INFINITY : sampling::value_of_key(highest)),
                                                 none ? MPK_SAMPLE_NO_TOKEN : sampling::token_of_key(highest), count,
                                                 sampling::folded(context.slot->batch_hash));
}

/* A warp: hands the frontier of the `count` candidates in `list` to each(i, entry), the highest noisy value first and so the lowest
 * logit first, up to `most` of them. Returns their number; all lanes get the same. Each entry has the highest noisy value of the tokens
 * that precede the previous entry; `top`, the token with the highest logit, is the last one. */
template <typename Each>
__device__ __forceinline__ uint32_t frontier_of(const NoisyToken* list, uint32_t count, uint32_t most, uint64_t top, uint32_t lane, Each each) {
  /* Usually a lane's candidates fit into registers. */
  constexpr uint32_t kOwn = 4;
  uint64_t key[kOwn];
  uint32_t noisy[kOwn];
#pragma unroll
  for (uint32_t h = 0; h < kOwn; ++h) {
    const bool here = 32 * h + lane < count;
    const NoisyToken own = list[here ? 32 * h + lane : 0];
    key[h] = here ? own.key : 0;
    noisy[h] = ordered(own.noisy);
  }
  uint64_t floor = 0;
  uint32_t found = 0;
#pragma unroll 1
  while (found < most && floor != top) {
    uint64_t best_key = 0;
    uint32_t best = 0;
#pragma unroll
    for (uint32_t h = 0; h < kOwn; ++h) {
      const bool better = key[h] > floor && (noisy[h] > best || (noisy[h] == best && key[h] > best_key));
      best_key = better ? key[h] : best_key;
      best = better ? noisy[h] : best;
    }
#pragma unroll 1
    for (uint32_t i = 32 * kOwn + lane; i < count; i += 32) {
      const NoisyToken other = list[i];
      const uint32_t own = ordered(other.noisy);
      if (other.key <= floor || own < best || (own == best && other.key <= best_key)) continue;
      best_key = other.key;
      best = own;
    }
    const uint32_t highest = warp_maximum(best);
    if (highest == 0) break;
    const uint32_t owners = __ballot_sync(0xFFFFFFFFu, best == highest);
    floor = __shfl_sync(0xFFFFFFFFu, best_key, __ffs(static_cast<int>(owners)) - 1);
    /* Of equal noisy values, the highest logit. */
    if ((owners & (owners - 1)) != 0) floor = highest_of_warp(best == highest ? best_key : 0);
    each(found, NoisyToken{floor, float_of_ordered(highest)});
    ++found;
  }
  return found;
}

}  // namespace gpu
}  // namespace mpk
