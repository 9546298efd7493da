/* Distributes the work of an iteration to the tasks of `attention_prefill`, in the same way on both targets.
 *
 * A unit is a query tile of one slot and one key-value head. It has up to kTileRows rows. A row is a token and a query head; a unit
 * includes all query heads that share the keys. Its keys are counted in tiles of kTileKeys positions; with a window, from the first
 * tile that its first token sees. Units are ordered by active
 * slot, then by head, then by tile. The weight of a unit is the number of keys that its tokens see together, plus kUnitKeys for its
 * fixed cost. The tasks cut the sum of all weights evenly. A cut may fall inside a unit. Then the parts of the unit give partial
 * results, which `attention_prefill_merge` joins.
 *
 * The cuts depend only on the task's number and the batch, and are monotone in the task's number. A task has what lies between its
 * cut and the next one, so the units of an iteration are disjoint and complete. The CPU's tasks check that order. */
#ifndef MPK_TASK_ATTENTION_PREFILL_UNITS_H
#define MPK_TASK_ATTENTION_PREFILL_UNITS_H

#include <stdint.h>

/* On the CPU, each level of vector instructions has its own functions. */
#if defined(__CUDACC__)
#define MPK_UNITS __device__ __forceinline__
#else
#define MPK_UNITS static inline
#endif

namespace mpk {
namespace prefill {

constexpr uint32_t kTileRows = 128;
constexpr uint32_t kTileKeys = 128;
constexpr uint32_t kUnitKeys = 160;
/* Minimum size of a part, in tiles of keys. To write and join a smaller part would cost more than it saves. */
constexpr uint32_t kLeastTiles = 2;
/* A unit with fewer tiles is not cut, because its parts would cost more than uneven shares. */
constexpr uint32_t kLeastCutTiles = 6;

/* A slot of the iteration. */
struct Slot {
  uint32_t rows, context;
};

struct Shape {
  uint32_t tokens;   /* per query tile */
  uint32_t kv_heads;
  uint32_t window; /* positions that a token sees; 0: all up to its own */
};

MPK_UNITS Shape shape_of(uint32_t group, uint32_t kv_heads, uint32_t window) { return {kTileRows / group, kv_heads, window}; }

/* Start of a part of a unit: slot, head, query tile, tile of keys. */
struct Place {
  uint32_t active, head, tile, key;
};
MPK_UNITS bool same_unit(const Place& a, const Place& b) { return a.active == b.active && a.head == b.head && a.tile == b.tile; }
MPK_UNITS bool same_place(const Place& a, const Place& b) { return same_unit(a, b) && a.key == b.key; }

MPK_UNITS uint32_t query_tiles(const Shape& shape, const Slot& slot) { return (slot.rows + shape.tokens - 1) / shape.tokens; }
/* Number of tokens in the slot's first `tiles` query tiles. */
MPK_UNITS uint32_t tokens_before(const Shape& shape, const Slot& slot, uint32_t tiles) {
  return tiles * shape.tokens < slot.rows ? tiles * shape.tokens : slot.rows;
}
/* Number of tiles of keys before the window of a unit's first token. */
MPK_UNITS uint32_t hidden_tiles(const Shape& shape, const Slot& slot, uint32_t tile) {
  const uint32_t position = slot.context + tile * shape.tokens;
  return shape.window == 0 || position < shape.window ? 0 : (position - shape.window + 1) / kTileKeys;
}
/* Number of a unit's tiles of keys, up to those that its last token sees. */
MPK_UNITS uint32_t key_tiles(const Shape& shape, const Slot& slot, uint32_t tile) {
  return (slot.context + tokens_before(shape, slot, tile + 1) + kTileKeys - 1) / kTileKeys - hidden_tiles(shape, slot, tile);
}
/* The same as weight_before, of tiles whose first token sees the whole context. */
MPK_UNITS uint64_t weight_of_whole(const Shape& shape, const Slot& slot, uint32_t tiles) {
  const uint64_t fixed = static_cast<uint64_t>(tiles) * (static_cast<uint64_t>(kUnitKeys) + slot.context);
  if (tiles * shape.tokens <= slot.rows) return fixed + static_cast<uint64_t>(shape.tokens) * (static_cast<uint64_t>(tiles) * (tiles + 1) / 2);
  return fixed + static_cast<uint64_t>(shape.tokens) * (static_cast<uint64_t>(tiles) * (tiles - 1) / 2) + slot.rows;
}
/* Weight of the first `tiles` units of a slot and head. */
MPK_UNITS uint64_t weight_before(const Shape& shape, const Slot& slot, uint32_t tiles) {
  if (shape.window == 0 || slot.context + tiles * shape.tokens <= shape.window) return weight_of_whole(shape, slot, tiles);
  uint32_t whole = slot.context < shape.window ? (shape.window - slot.context - 1) / shape.tokens + 1 : 0;
  if (whole > tiles) whole = tiles;
  const uint64_t fixed = static_cast<uint64_t>(tiles - whole) * (static_cast<uint64_t>(kUnitKeys) + shape.window - 1);
  return weight_of_whole(shape, slot, whole) + fixed + (tokens_before(shape, slot, tiles) - tokens_before(shape, slot, whole));
}
MPK_UNITS uint64_t slot_weight(const Shape& shape, const Slot& slot) {
  return weight_before(shape, slot, query_tiles(shape, slot)) * shape.kv_heads;
}

/* `Slots` has count(), the number of active slots; at(a), a Slot; and before(a), the weight of all slots before `a`, for `a` up to
 * count(). */
template <typename Slots>
MPK_UNITS Place first_from(const Slots& slots, uint32_t active) {
  while (active < slots.count() && slots.at(active).rows == 0) ++active;
  return {active, 0, 0, 0};
}

/* The start of the unit after the one of `place`. */
template <typename Slots>
MPK_UNITS Place next_unit(const Slots& slots, const Shape& shape, Place place) {
  place.key = 0;
  if (++place.tile < query_tiles(shape, slots.at(place.active))) return place;
  place.tile = 0;
  if (++place.head < shape.kv_heads) return place;
  return first_from(slots, place.active + 1);
}

/* The start of task `task` of `tasks`. */
template <typename Slots>
MPK_UNITS Place cut(const Slots& slots, const Shape& shape, uint32_t task, uint32_t tasks) {
  if (task == 0) return first_from(slots, 0);
  const uint64_t all = slots.before(slots.count());
  if (task >= tasks || all == 0) return first_from(slots, slots.count());
  uint32_t shift = 0; /* on a GPU, a 64-bit division would be a call */
  while (all >> shift >> 32 != 0) ++shift;
  uint64_t at = (static_cast<uint64_t>(static_cast<uint32_t>(all >> shift) / tasks) * task) << shift;
  uint32_t active = 0;
  for (uint32_t end = slots.count(); end - active > 1;) {
    const uint32_t middle = active + (end - active) / 2;
    if (slots.before(middle) <= at) active = middle;
    else end = middle;
  }
  const Slot slot = slots.at(active);
  at -= slots.before(active);
  const uint32_t tiles = query_tiles(shape, slot);
  const uint64_t of_head = weight_before(shape, slot, tiles);
  Place place = {active, 0, 0, 0};
  for (; at >= of_head && place.head + 1 < shape.kv_heads; at -= of_head) ++place.head;
  for (uint32_t end = tiles; end - place.tile > 1;) {
    const uint32_t middle = place.tile + (end - place.tile) / 2;
    if (weight_before(shape, slot, middle) <= at) place.tile = middle;
    else end = middle;
  }
  at -= weight_before(shape, slot, place.tile);
  const uint32_t key = at <= kUnitKeys ? 0 : static_cast<uint32_t>(at - kUnitKeys) / kTileKeys;
  const uint32_t of_unit = key_tiles(shape, slot, place.tile), before = of_unit < kLeastCutTiles ? (of_unit + 1) / 2 : kLeastTiles;
  if (key < before) return place;
  if (of_unit < kLeastCutTiles || key + kLeastTiles > of_unit) return next_unit(slots, shape, place);
  place.key = key;
  return place;
}

/* A part of a unit: the tiles of keys from place.key to `end`, of all `tiles` of the unit. */
struct Part {
  Place place;
  uint32_t end, tiles;
};
MPK_UNITS bool is_whole(const Part& part) { return part.place.key == 0 && part.end == part.tiles; }
/* Each task has room for two partial results: a part that starts inside a unit, and one that starts with a unit. */
constexpr uint32_t kPartsOfTask = 2;
MPK_UNITS uint32_t partial_index(const Place& begin, uint32_t task) { return task * kPartsOfTask + (begin.key == 0 ? 1 : 0); }

/* The part at `place`, at most up to `end`. Moves `place` to the next part. */
template <typename Slots>
MPK_UNITS Part take_part(const Slots& slots, const Shape& shape, Place& place, const Place& end) {
  Part part;
  part.place = place;
  part.tiles = key_tiles(shape, slots.at(place.active), place.tile);
  part.end = part.tiles;
  if (same_unit(place, end)) {
    part.end = end.key;
    place = end;
  } else {
    place = next_unit(slots, shape, place);
  }
  return part;
}

}  // namespace prefill
}  // namespace mpk

#endif
