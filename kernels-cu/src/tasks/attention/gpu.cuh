/* Attention of one or more active slots, one or more local key-value heads, and a split.
 *
 * The queries (the slot's new rows times the query heads) are handled in passes. In a pass the 8 warps form groups. Each
 * group has one tile of queries; its warps share the units of keys and join their results in shared memory. A decode row
 * is one group of 8 warps; a long prompt is 8 groups of one warp.
 *
 * A task may have several heads. Where keys and values are streamed, each head has the same number of warps; otherwise the
 * heads are computed one after the other. Besides its keys and values, a task takes about 8 us (H200), during which the
 * compute warps take nothing from the ring. Two heads share that time.
 *
 * A task of several heads may also have several slots, one after the other. It waits for its events once, and checks the pages of all
 * slots before. The loader fills the ring with keys and values of the next slot meanwhile. Batch 128 of 8B takes 2 % less (H100).
 *
 * Keys and values of earlier iterations are final: tasks of this rank wrote them before this iteration was published. So
 * before the task waits for its events, each warp loads its first unit and reads or prefetches the page table, the
 * batch's numbers, rope and norm weights. Only this task makes the iteration's own new keys. */
#pragma once

#include "gpu/wide_layout.cuh"
#include "tasks/attention/gpu_fma.cuh"
#include "tasks/attention/gpu_mma.cuh"
#include "tasks/attention/gpu_rows.cuh"
#include "tasks/attention/gpu_streamed.cuh"

namespace mpk {
namespace gpu {

/* `Columns`: of a column tile of the result if it is in MPK_LAYOUT_WIDE; 0: it is rows. */
template <uint32_t Dtype, uint32_t Dim, uint32_t PageSize, bool QkNorm, bool Partial, bool Streamed = false, uint32_t Heads = 1, bool Window = false,
          uint32_t Columns = 0>
struct Attention : TaskCode {
  static constexpr bool kInlined = true;
  using Share = attention::Share<Dtype, Dim, PageSize>;
  using Element = typename Share::Element;

  static __device__ __forceinline__ int run(Context& context) {
    Share& share = reinterpret_cast<Share*>(context.work())[context.warp];
    static_assert(kComputeWarps * sizeof(Share) <= Share::kShareBytes, "attention");
    const int32_t* args = context.slot->task.args;
    if constexpr (kOneSlot) {
      Share own = {}; /* a value that is undefined on one path would keep its registers alive through all kernel variants */
      const int found = find(context, static_cast<uint32_t>(args[0]), own);
      if (found == kFound) check_pages(context, own);
      if (context.lane == 0) share = own;
      __syncwarp();
      if (found == kFound) return attend_slot(context, share, true, attention::kNoRow);
      if (found == kImpossible) context.fail(MPK_ABORT_KERNEL);
      return context.wait_inputs();
    } else {
      const uint32_t slots = static_cast<uint32_t>(args[6]), distance = static_cast<uint32_t>(args[7]);
#pragma unroll 1
      for (uint32_t i = 0; i < slots; ++i) {
        Share own = {};
        const int found = find(context, static_cast<uint32_t>(args[0]) + i * distance, own);
        if (found == kFound) check_pages(context, own);
        if (found == kImpossible) context.fail(MPK_ABORT_KERNEL);
      }
      bool first = true; /* the task has not waited yet */
#pragma unroll 1
      for (uint32_t i = 0; i < slots; ++i) {
        Share own = {};
        const int found = find(context, static_cast<uint32_t>(args[0]) + i * distance, own);
        if (found != kFound) continue;
        if (context.lane == 0) share = own;
        __syncwarp();
        const int code = attend_slot(context, share, first, i + 1 < slots ? static_cast<uint32_t>(args[0]) + (i + 1) * distance : attention::kNoRow);
        if (code != MPK_OK) return code;
        __syncwarp(); /* all lanes have read the slot's share */
        first = false;
      }
      return first ? context.wait_inputs() : static_cast<int>(MPK_OK);
    }
  }

  /* Streamed: brings the keys and values of earlier iterations, ahead of the task's events. */
  static __device__ __forceinline__ bool load(Loader& loader) {
    if constexpr (kStreams) {
      const int32_t* args = loader.slot->task.args;
      bool begun = false; /* an earlier slot has been brought */
#pragma unroll 1
      for (uint32_t i = 0; i < (kOneSlot ? 1 : static_cast<uint32_t>(args[6])); ++i)
        if (!stream(loader, static_cast<uint32_t>(args[0]) + (kOneSlot ? 0 : i * static_cast<uint32_t>(args[7])), begun)) return false;
    }
    return true;
  }

 private:
  using OfStages = attention::StreamedTile<Dtype, Dim, PageSize, Heads, Window>;
  static constexpr bool kStreams = Streamed && OfStages::kPossible;
  /* Tasks of one head have one slot: the graph builder gives tasks more heads first. */
  static constexpr bool kOneSlot = Heads == 1;

  /* `first`: the task has not waited for its events. `next`: the active slot after this one, if there is one. */
  static __device__ __forceinline__ int attend_slot(Context& context, Share& share, bool first, uint32_t next) {
    if constexpr (Dtype == MPK_F32) return attend_all<attention::FmaTile<Dim, PageSize, Window>>(context, share, first);
    else {
      static_assert(OfStages::kQueries == 8, "a task that is not streamed has more queries than a streamed one");
      if constexpr (kTwoTiles) {
        if (share.queries > 8) return attend_all<attention::MmaTile<Dtype, Dim, PageSize, 2, Window>>(context, share, first);
      }
      if constexpr (kStreams) {
        if (kTwoTiles || OfStages::streams(share.queries)) return attend<OfStages, Heads>(context, share, first, next);
      }
      if constexpr (!kStreams || !kTwoTiles) return attend_all<attention::MmaTile<Dtype, Dim, PageSize, 1, Window>>(context, share, first);
    }
  }

  static __device__ __forceinline__ bool stream(Loader& loader, uint32_t active, bool& begun) {
    const TaskSlot& slot = *loader.slot;
    const int32_t* args = slot.task.args;
    if (active >= slot.num_active) return true;
    const Context::Active numbers = Context::active(active);
    const mpk_operand& cache = slot.operands[3];
    const uint32_t pages_per_slot = Context::pages_per_slot();
    const uint32_t pages = (numbers.context + numbers.num_rows + PageSize - 1) / PageSize;
    /* As in `find`. Other faults end the run, so it does not matter what is brought then. */
    if (numbers.num_rows == 0 || !OfStages::streams(numbers.num_rows * static_cast<uint32_t>(args[5])) || (cache.addr & 15) != 0 ||
        pages > pages_per_slot)
      return true;
    const uint32_t split = static_cast<uint32_t>(args[2]);
    const uint32_t splits = reinterpret_cast<const mpk_attention_params*>(slot.params)->splits;
    const uint32_t skipped = skipped_pages(numbers.context, reinterpret_cast<const mpk_attention_params*>(slot.params)->window), seen = pages - skipped;
    uint32_t first = (skipped + seen * split / splits) * PageSize, end = (skipped + seen * (split + 1) / splits) * PageSize;
    if (end > numbers.context) end = numbers.context;
    if (end <= first) return true;
    if (loader.prefetches()) {
      loader.skip(2 * Heads * ((end - first + OfStages::kPiece - 1) / OfStages::kPiece));
      return true;
    }
    if (!begun) loader.begin_cache();
    begun = true;
    const int32_t* const table = shared_state().batch.page_table + static_cast<uint64_t>(numbers.slot) * pages_per_slot;
    const uint32_t num_pages = cache.dims[0], kv_heads = cache.dims[1] / 2;
    constexpr uint32_t kRowBytes = Dim * sizeof(Element);
    /* Entries of the page table are in flight for two pieces. */
    uint32_t page = static_cast<uint32_t>(table[first / PageSize]);
    uint32_t next = static_cast<uint32_t>(table[(first + OfStages::kPiece < end ? first + OfStages::kPiece : first) / PageSize]);
    for (; first < end; first += OfStages::kPiece) {
      const uint32_t later = first + 2 * OfStages::kPiece;
      const uint32_t after = static_cast<uint32_t>(table[(later < end ? later : first) / PageSize]);
      const uint32_t row = ((page < num_pages ? page : 0) * 2 * kv_heads + static_cast<uint32_t>(args[1])) * PageSize + first % PageSize;
      const uint32_t rows = end - first < OfStages::kPiece ? (end - first + 7) / 8 * 8 : OfStages::kPiece; /* whole blocks */
      const uint32_t bytes = rows * kRowBytes;
      const uint8_t* const keys = reinterpret_cast<const uint8_t*>(cache.addr) + static_cast<uint64_t>(row) * kRowBytes;
      constexpr uint64_t kHeadBytes = static_cast<uint64_t>(PageSize) * kRowBytes;
#pragma unroll 1
      for (uint32_t head = 0; head < Heads; ++head) {
        if (!loader.template stream<true>(keys + head * kHeadBytes, bytes)) return false;
        if (!loader.template stream<true>(keys + (kv_heads + head) * kHeadBytes, bytes)) return false;
      }
      page = next;
      next = after;
    }
    return true;
  }

  /* Pages that no row sees, if the first one is at `position`. */
  static __device__ __forceinline__ uint32_t skipped_pages(uint32_t position, uint32_t window) {
    return !Window || position < window ? 0 : (position - window + 1) / PageSize;
  }

  enum : int { kFound, kNothing, kImpossible };

  /* The work area: shares, kept rows, queries, results. */
  static constexpr uint32_t kFixedBytes = Share::kShareBytes + Heads * Share::kKeptBytes;
  template <class Tile>
  static constexpr uint32_t kQueryBytes = kComputeWarps * Tile::kQueryElements * sizeof(Element);
  template <class Tile>
  static constexpr uint32_t kOutBytes = kComputeWarps * Tile::kQueries * (Share::kOutPitch + 2) * 4;
  /* If there is no room for both, results go where the queries were. */
  template <class Tile>
  static constexpr bool kOverlay = kFixedBytes + kQueryBytes<Tile> + kOutBytes<Tile> > kWorkBytes;
  template <class Tile>
  static constexpr bool kFits = kFixedBytes + kOutBytes<Tile> <= kWorkBytes && kFixedBytes + kQueryBytes<Tile> <= kWorkBytes;
  /* Whether there are tiles of 16 queries. Only 2-byte types have them; for others MmaTile must not be instantiated. */
  static constexpr bool kTwoTiles = [] {
    if constexpr (Dtype == MPK_F32 || Dim > 128) return false;
    else return kFits<attention::MmaTile<Dtype, Dim, PageSize, 2, Window>>;
  }();

  static __device__ __forceinline__ int find(Context& context, uint32_t active, Share& share) {
    const mpk_batch* batch = context.batch();
    const int32_t* args = context.slot->task.args;
    if (active >= context.slot->num_active) return kNothing;
    share.in_views = 0;
    share.kv_head = static_cast<uint32_t>(args[1]);
    share.heads = static_cast<uint32_t>(args[5]);
    const Context::Active numbers = context.active(active);
    share.first_row = numbers.first_row;
    share.rows = numbers.num_rows;
    share.context = numbers.context;
    if (share.rows == 0) return kNothing;
    share.queries = share.rows * share.heads;

    const mpk_attention_params& params = context.params<mpk_attention_params>();
    const mpk_operand& cache = context.input(3);
    share.pages = reinterpret_cast<Element*>(cache.addr);
    share.num_pages = cache.dims[0];
    share.kv_heads = cache.dims[1] / 2;
    share.scale = params.scale;
    const uint32_t pages_per_slot = context.pages_per_slot();
    share.page_table = batch->page_table + static_cast<uint64_t>(numbers.slot) * pages_per_slot;
    const uint32_t total = share.context + share.rows;
    const uint32_t pages = (total + PageSize - 1) / PageSize;
    /* The rows of the cache have no gaps, so its start determines whether 16-byte loads are aligned. */
    if (share.heads == 0 || (cache.addr & 15) != 0 || share.first_row + share.rows > context.input(0).dims[0] ||
        pages > pages_per_slot || total > context.input(4).dims[0])
      return kImpossible;
    const uint32_t split = static_cast<uint32_t>(args[2]);
    const uint32_t skipped = skipped_pages(share.context, params.window), seen = pages - skipped;
    share.first = (skipped + seen * split / params.splits) * PageSize;
    share.last = (skipped + seen * (split + 1) / params.splits) * PageSize;
    if constexpr (Window) share.window = params.window;
    if (share.last > total) share.last = total;
    share.first_new = share.first > share.context ? share.first : share.context;
    share.num_new = share.last > share.first_new ? share.last - share.first_new : 0;
    return kFound;
  }

  /* Before the task writes anything. */
  static __device__ __forceinline__ void check_pages(Context& context, const Share& share) {
#pragma unroll 1
    for (uint32_t page = share.first / PageSize + context.thread; page * PageSize < share.last; page += kComputeThreads)
      if (static_cast<uint32_t>(share.page_table[page]) >= share.num_pages) context.fail(MPK_ABORT_KERNEL);
  }

  /* By one warp: loads a word of each line that the first row of active slot `next` needs, and of its entry of the page table. So the
   * first-level cache has them when the queries of that slot are prepared, and the loads take less than 0.1 us instead of about 1 us. */
  static __device__ __forceinline__ void touch(const Context& context, uint32_t heads, uint32_t next) {
    if (next >= context.slot->num_active) return;
    constexpr uint32_t kLine = 128;
    const Context::Active numbers = Context::active(next);
    const uint32_t of_queries = Heads * heads * Dim * sizeof(Element) / kLine;
    constexpr uint32_t kOfKeys = Heads * Dim * sizeof(Element) / kLine, kOfRope = Dim * 4 / kLine;
    const uint32_t of_rows = of_queries + 2 * kOfKeys;
#pragma unroll 1
    for (uint32_t line = context.lane; line <= of_rows + kOfRope; line += 32) {
      const bool of_rope = line >= of_rows;
      const uint32_t input = of_rope ? 4 : line < of_queries ? 0 : line < of_queries + kOfKeys ? 1 : 2;
      const uint32_t at = of_rope ? line - of_rows : input == 0 ? line : (line - of_queries) % kOfKeys;
      const mpk_operand& from = context.input(input);
      const uint32_t row = of_rope ? numbers.context : numbers.first_row, page = numbers.context / PageSize;
      if (row >= from.dims[0] || page >= context.pages_per_slot()) return;
      uint64_t address = reinterpret_cast<uint64_t>(row_address(from, row)) + at * kLine;
      if (line == of_rows + kOfRope)
        address = reinterpret_cast<uint64_t>(context.batch()->page_table + static_cast<uint64_t>(numbers.slot) * context.pages_per_slot() + page);
      uint32_t word;
      asm volatile("ld.global.u32 %0,[%1];" : "=r"(word) : "l"(address));
    }
  }

  /* All heads, one after the other. These tiles lay out the work area in their own way: the next head's or slot's queries may lie where
   * this one's results are. So a task of several slots has a barrier before and after. */
  template <class Tile>
  static __device__ __forceinline__ int attend_all(Context& context, Share& share, bool first) {
    if (!kOneSlot && !first) {
      if (const int code = context.sync(); code != MPK_OK) return code;
    }
#pragma unroll 1
    for (;;) {
      if (const int code = attend<Tile, 1>(context, share, first); code != MPK_OK || (kOneSlot && share.in_views + 1 == Heads)) return code;
      if (const int code = context.sync(); code != MPK_OK || (!kOneSlot && share.in_views + 1 == Heads)) return code;
      if (context.lane == 0) {
        ++share.in_views;
        ++share.kv_head;
      }
      __syncwarp();
    }
  }

  /* `Joined` heads at a time, with the same number of warps each. */
  template <class Tile, uint32_t Joined>
  static __device__ __forceinline__ int attend(Context& context, Share& share, bool first, uint32_t next = attention::kNoRow) {
    static_assert(kFits<Tile>, "the work area is too small for attention");
    static_assert(kOneSlot || Joined == 1 || !kOverlay<Tile>, "a slot's results would be overwritten by the next one's queries");
    constexpr uint32_t kWarps = kComputeWarps / Joined; /* per head */
    if constexpr (Joined > 1) {
      if (context.lane == 0) {
        share.in_views = context.warp / kWarps;
        share.kv_head += context.warp / kWarps;
      }
      __syncwarp();
    }
    Element* queries = reinterpret_cast<Element*>(context.work() + kFixedBytes);
    float* out = reinterpret_cast<float*>(context.work() + kFixedBytes + (kOverlay<Tile> ? 0 : kQueryBytes<Tile>));
    float* state = out + kComputeWarps * Tile::kQueries * Share::kOutPitch;

    const uint32_t tiles = (share.queries + Tile::kQueries - 1) / Tile::kQueries;
    const uint32_t shift = tiles > 4 ? 0 : tiles > 2 ? 1 : tiles == 2 ? 2 : 3;
    const uint32_t group_warps = Joined > 1 ? kWarps : 1u << shift, groups = kWarps / group_warps;
    const uint32_t group = context.warp % kWarps / group_warps, member = context.warp % group_warps;
    const float eps = context.params<mpk_attention_params>().eps;
    const uint32_t step = group_warps * Tile::kKeys;
    uint32_t begin = share.first + member * Tile::kKeys;

    using Rows = attention::Rows<Dtype, Dim, PageSize, QkNorm, Joined>;
    Rows rows(share);
    const bool aligned = Rows::kAligned && Rows::aligned(context);
    queries += context.warp / kWarps * Tile::kQueryElements;
    Tile tile(share, context.lane);
    for (uint32_t pass = 0; pass < share.queries; pass += groups * Tile::kQueries) {
      const uint32_t room = groups * Tile::kQueries;
      const uint32_t count = share.queries - pass < room ? share.queries - pass : room;
      const bool visible = share.keys_of(pass + count - 1, share.last) > share.first;
      rows.start(pass == 0 ? share.num_new : 0, pass, visible ? count : 0);

      const uint32_t first_query = pass + group * Tile::kQueries;
      const uint32_t after = first_query + Tile::kQueries < share.queries ? first_query + Tile::kQueries : share.queries;
      const uint32_t last = first_query < share.queries ? share.keys_of(after - 1, share.last) : 0;
      tile.start(queries + group * Tile::kQueryElements, first_query, last);
      if constexpr (Window) { /* steps before the tile's window */
        const uint32_t from = share.first_key(first_query);
        begin = share.first + member * Tile::kKeys + (from > share.first ? (from - share.first) / step * step : 0);
      }
      tile.fetch(begin, pass == 0 && share.context < last ? share.context : last);
      if (pass == 0) {
        /* If slots, or heads, are computed one after the other, only the first one waits. */
        if ((kOneSlot || first) && (Joined == Heads || share.in_views == 0)) {
          rows.hint(context);
          const int code = context.wait_inputs(/*loads_under_way=*/!std::is_same<Tile, OfStages>::value);
          if (code != MPK_OK) return code;
        }
        if (!aligned) rows.append_values(context);
      }
      if constexpr (Rows::kAligned) {
        if (aligned) rows.template prepare_aligned<Tile>(context, eps, queries);
      }
      if (!aligned) rows.template prepare<Tile>(context, eps, queries);
      int code = context.sync();
      if (code != MPK_OK) return code;
      if (!kOneSlot && context.warp == kComputeWarps - 1) touch(context, share.heads, next);
      if (pass == 0) tile.fetch_rest(begin, share.context);
      /* What depends on the thread is not kept in registers while the keys are read. */
      context.find_thread();
      tile.run(begin, step);
      context.find_thread();
      if (kOverlay<Tile> && (code = context.sync()) != MPK_OK) return code;
      tile.store(out + context.warp * Tile::kQueries * Share::kOutPitch, state + context.warp * Tile::kQueries * 2);
      code = context.sync();
      if (code != MPK_OK) return code;
      if constexpr (std::is_same<Tile, OfStages>::value) {
        if (context.thread == 0) tile.leave();
      }
      for (uint32_t q = member; q < Tile::kQueries && first_query + q < share.queries; q += group_warps)
        join(context, share, first_query + q, group_warps, out + ((context.warp - member) * Tile::kQueries + q) * Share::kOutPitch,
             state + ((context.warp - member) * Tile::kQueries + q) * 2, Tile::kQueries);
      if (share.queries - pass > room && (code = context.sync()) != MPK_OK) return code;
    }
    return MPK_OK;
  }

  /* By one warp: combines a query's results from the group's warps, which are `distance` rows apart. */
  static __device__ __forceinline__ void join(const Context& context, const Share& share, uint32_t query, uint32_t warps, const float* out,
                                              const float* state, uint32_t distance) {
    const uint32_t lane = context.lane;
    float highest = -INFINITY, sum = 0.0f;
    if (lane < warps) {
      highest = state[lane * distance * 2];
      sum = state[lane * distance * 2 + 1];
    }
    const float own = highest;
#pragma unroll
    for (uint32_t s = 4; s > 0; s /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, s));
    highest = __shfl_sync(0xFFFFFFFFu, highest, 0);
    const float weight = own == -INFINITY ? 0.0f : own == highest ? 1.0f : __expf(own - highest);
    sum *= weight;
#pragma unroll
    for (uint32_t s = 4; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    sum = __shfl_sync(0xFFFFFFFFu, sum, 0);

    constexpr uint32_t kLaneDims = (Dim + 31) / 32;
    float total[kLaneDims];
#pragma unroll
    for (uint32_t i = 0; i < kLaneDims; ++i) total[i] = 0.0f;
    for (uint32_t w = 0; w < warps; ++w) {
      const float of_warp = __shfl_sync(0xFFFFFFFFu, weight, w);
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i) total[i] = fmaf(of_warp, out[w * distance * Share::kOutPitch + lane + 32 * i], total[i]);
    }

    const uint32_t row = share.first_row + query / share.heads;
    const uint32_t head = static_cast<uint32_t>(context.slot->task.args[4]) + share.in_views * share.heads + query % share.heads;
    const mpk_operand& to = context.output(0);
    if constexpr (Partial) {
      const uint32_t split = static_cast<uint32_t>(context.slot->task.args[2]);
      const mpk_operand& to_state = context.output(1);
      float* values = attention::row_of<float>(to, row) + static_cast<uint64_t>(head) * to.strides[1] +
                      static_cast<uint64_t>(split) * to.strides[2];
      float* of_row = attention::row_of<float>(to_state, row) + static_cast<uint64_t>(head) * to_state.strides[1] +
                      static_cast<uint64_t>(split) * to_state.strides[2];
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i)
        if (Dim % 32 == 0 || lane + 32 * i < Dim) values[lane + 32 * i] = total[i];
      if (lane < 2) of_row[lane] = lane == 0 ? highest : sum;
    } else if constexpr (Columns != 0) {
      static_assert(Dim % Columns == 0, "a head has whole column tiles");
      const WideHead<Columns> values(to, row, head * Dim);
      const float inverse = reciprocal(sum);
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i)
        if (Dim % 32 == 0 || lane + 32 * i < Dim) *reinterpret_cast<Element*>(values.of(lane + 32 * i)) = Number<Dtype>::from_f32(total[i] * inverse);
    } else {
      Element* values = attention::row_of<Element>(to, row) + static_cast<uint64_t>(head) * Dim;
      const float inverse = reciprocal(sum);
#pragma unroll
      for (uint32_t i = 0; i < kLaneDims; ++i)
        if (Dim % 32 == 0 || lane + 32 * i < Dim) values[lane + 32 * i] = Number<Dtype>::from_f32(total[i] * inverse);
    }
  }
};

}  // namespace gpu
}  // namespace mpk
