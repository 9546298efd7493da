/* On one rank: which entry of a sample's frontier is drawn, by about what its parts weigh; where that leaves it open, by the
 * logits themselves. */
#pragma once

#include "tasks/sample_partial/gpu_bins.cuh"
#include "tasks/sample_weigh/gpu_frontier.cuh"

namespace mpk {
namespace gpu {

struct DecideRoom {
  static constexpr uint32_t kEntries = 3072;
  NoisyToken entries[kEntries];
  FrontierRoom found;
  float before[kBins + 1]; /* of the bins above each, the highest first; the last: of all */
  float warp_mass[kComputeWarps];
  uint64_t weights[2][kComputeWarps]; /* before an entry, and of all */
  uint32_t tokens[kComputeWarps];
  float least[kComputeWarps], most[kComputeWarps];
};

enum class Verdict { kStays, kGoes, kOpen };

class Decision {
 public:
  __device__ __forceinline__ Decision(Context& context, const SampleRow& row, DecideRoom* room) : row_(row), room_(room) {
    const mpk_sampling& s = row.sampling;
    const SampleRecords records(context.input(0));
    highest_ = join_frontiers(context, records, &room->found, room->entries, DecideRoom::kEntries);
    top_bin_ = bin_of(highest_);
    /* A thread's two bins, the highest bins of all threads first. Those of a part lie by their number modulo kBins. */
    const mpk_operand& masses = context.input(1);
    const uint32_t* first = reinterpret_cast<const uint32_t*>(masses.addr);
    const uint32_t below = 2 * context.thread;
    const uint32_t at[2] = {(static_cast<uint32_t>(top_bin_) - below) % kBins, (static_cast<uint32_t>(top_bin_) - below - 1) % kBins};
    uint64_t sum[2] = {0, 0};
#pragma unroll 8
    for (uint32_t r = 0; r < records.count; ++r) {
      const uint32_t* record = records.at(r);
      uint32_t lower = static_cast<uint32_t>(top_bin_) - record[MPK_SAMPLE_TOP_BIN]; /* than the highest of all */
      if (record[MPK_SAMPLE_HIGHEST_TOKEN] == MPK_SAMPLE_NO_TOKEN) lower = 0xFFFFFFFFu; /* a part without columns */
      const uint32_t* own = first + r * masses.strides[1];
      const uint32_t mass[2] = {own[at[0]], own[at[1]]};
      /* Where the part's highest is lower, the places of bins above it hold bins far below. */
      if (below >= lower) sum[0] += mass[0];
      if (below + 1 >= lower) sum[1] += mass[1];
    }
    const float unit = s.top_k != 0 ? 1.0f : 1.0f / kMassUnit;
    float mass[2];
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) mass[b] = static_cast<float>(sum[b]) * unit * (s.top_k != 0 ? 1.0f : bin_scale(below + b));
    const MassScan scan = scan_masses(context, mass[0] + mass[1], room->warp_mass);
    room->before[below] = scan.before;
    room->before[below + 1] = scan.before + mass[0];
    if (context.thread == 0) room->before[kBins] = scan.all;
    /* What min-p keeps: whole bins but for one. */
    float least = 0.0f, most = 0.0f;
#pragma unroll
    for (uint32_t b = 0; b < 2; ++b) {
      const float edge = static_cast<float>(top_bin_ - static_cast<int32_t>(below + b)) * kBinWidth, slack = 0.001f + fabsf(edge) * 0x1p-19f;
      if (edge - slack - highest_ >= s.log_min_p) least += mass[b];
      if (edge + kBinWidth + slack - highest_ >= s.log_min_p) most += mass[b];
    }
#pragma unroll
    for (uint32_t d = 16; d > 0; d /= 2) {
      least += __shfl_xor_sync(0xFFFFFFFFu, least, d);
      most += __shfl_xor_sync(0xFFFFFFFFu, most, d);
    }
    if (context.lane == 0) {
      room->least[context.warp] = least;
      room->most[context.warp] = most;
    }
    context.sync();
    least_ = most_ = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < kComputeWarps; ++w) {
      least_ += room->least[w];
      most_ += room->most[w];
    }
  }

  /* The last entry that the filters keep, the same in all threads. */
  __device__ __forceinline__ uint32_t token(Context& context, const SampleColumns& columns) const {
    /* The first entry is the highest logit, which every filter keeps. */
    const uint32_t count = min(room_->found.joined, MPK_SAMPLE_FRONTIER);
    uint32_t i = count;
#pragma unroll 1
    while (i-- > 1) {
      const NoisyToken own = room_->found.frontier[i];
      Verdict verdict = judge(sampling::value_of_key(own.key), columns.count);
      if (verdict == Verdict::kOpen) verdict = weigh(context, columns, own.key);
      if (verdict == Verdict::kStays) break;
    }
    return i < count ? sampling::token_of_key(room_->found.frontier[i].key) : MPK_SAMPLE_NO_TOKEN;
  }

 private:
  const SampleRow& row_;
  DecideRoom* room_;
  float highest_, least_, most_; /* the highest logit; masses that min-p keeps */
  int32_t top_bin_;

  /* By the bins. */
  __device__ __forceinline__ Verdict judge(float value, uint32_t vocabulary) const {
    const mpk_sampling& s = row_.sampling;
    if (!sampling::passes_min_p(value, highest_, s)) return Verdict::kGoes;
    if (s.top_k == 0 && s.top_p >= 1.0f) return Verdict::kStays;
    const uint32_t below = static_cast<uint32_t>(top_bin_ - bin_of(value));
    if (below >= kBins) return Verdict::kOpen;
    const float before = room_->before[below], through = room_->before[below + 1 < kBins ? below + 1 : kBins];
    if (s.top_k != 0) { /* whole numbers below 2^24 */
      const float k = static_cast<float>(s.top_k);
      return through - 1.0f < k ? Verdict::kStays : before >= k ? Verdict::kGoes : Verdict::kOpen;
    }
    /* How far bins and weights may differ: masses are rounded, weights lose what is below 2^-31 of the highest. The entry itself,
     * which does not count, has a mass of at least 1 there. */
    const float error = 0x1p-14f + fabsf(highest_) * 0x1p-19f + static_cast<float>(vocabulary) * 0x1p-31f;
    const float own = bin_scale(below), lost = error * room_->before[kBins];
    if (through - own + lost < s.top_p * (least_ - lost)) return Verdict::kStays;
    if (before - lost >= s.top_p * (most_ + lost)) return Verdict::kGoes;
    return Verdict::kOpen;
  }

  /* By the logits of the whole vocabulary: as exact as the second pass of several ranks. */
  __device__ __forceinline__ Verdict weigh(Context& context, const SampleColumns& columns, uint64_t key) const {
    const mpk_sampling& s = row_.sampling;
    uint64_t before = 0, all = 0;
    uint32_t tokens = 0;
    constexpr uint32_t kTogether = 8;
#pragma unroll 1
    for (uint32_t first = context.thread; first < columns.count; first += kTogether * kComputeThreads) {
      float logit[kTogether];
#pragma unroll
      for (uint32_t j = 0; j < kTogether; ++j) {
        const uint32_t i = first + j * kComputeThreads;
        logit[j] = i < columns.count ? columns.logits[i] : 0.0f;
      }
#pragma unroll 1
      for (uint32_t j = 0; j < kTogether; ++j) {
        const uint32_t i = first + j * kComputeThreads;
        if (i >= columns.count) break;
        float x = logit[0];
#pragma unroll
        for (uint32_t u = 1; u < kTogether; ++u) x = u == j ? logit[u] : x;
        const float value = columns.value(x, i, s);
        const uint32_t weight = sampling::weight(value, highest_);
        if (sampling::passes_min_p(value, highest_, s)) all += weight;
        if (sampling::key_of(value, columns.first_token + i) <= key) continue;
        before += weight;
        ++tokens;
      }
    }
    before = sum_of_warp(before);
    all = sum_of_warp(all);
    tokens = warp_sum(tokens);
    context.sync(); /* the last entry's sums have been read */
    if (context.lane == 0) {
      room_->weights[0][context.warp] = before;
      room_->weights[1][context.warp] = all;
      room_->tokens[context.warp] = tokens;
    }
    context.sync();
    before = all = tokens = 0;
#pragma unroll
    for (uint32_t w = 0; w < kComputeWarps; ++w) {
      before += room_->weights[0][w];
      all += room_->weights[1][w];
      tokens += room_->tokens[w];
    }
    const bool in_top_k = s.top_k == 0 || tokens < s.top_k;
    return in_top_k && sampling::passes_top_p(before, all, s) ? Verdict::kStays : Verdict::kGoes;
  }
};

}  // namespace gpu
}  // namespace mpk
