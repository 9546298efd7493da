#include "cpu/sanitizer/operands.h"

#include <string.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace mpk {
namespace sanitizer {
namespace {

enum Trust : uint32_t { ROWS_OF_SLOT = 0, PAGES_OF_SLOT = 1, PAGES_OF_ROWS = 2, ROWS_OF_SLOT_IN_TILES = 3 };

// An operand whose bytes are known only at run time; `lo` and `hi` count from the view's first element.
struct Declared {
  uint32_t trust, slot;
  uint32_t lo[MPK_MAX_DIMS], hi[MPK_MAX_DIMS];
};

std::shared_mutex lock;
std::unordered_map<const mpk_operand*, Declared>& declared() {
  static std::unordered_map<const mpk_operand*, Declared> all;
  return all;
}

// The pages of active slot `active`: for reads all that hold tokens, for writes those that hold new ones. Pages before the new tokens
// are full, and may be shared with other slots.
void add_pages(const mpk_kernel_args* args, const mpk_operand& o, const Declared& trust, uint32_t active, Box box, std::vector<Box>* boxes) {
  const mpk_batch* batch = args->batch;
  const mpk_batch_config* config = args->rank->batch_config;
  const uint64_t bytes = element_bytes(o.dtype);
  const uint32_t slot = static_cast<uint32_t>(batch->active_slot[active]), context = static_cast<uint32_t>(batch->active_context[active]);
  const uint32_t tokens = context + static_cast<uint32_t>(batch->active_num_rows[active]);
  box.pages = batch->page_table + uint64_t{slot} * config->pages_per_slot;
  box.num_pages = std::min((tokens + config->page_size - 1) / config->page_size, config->pages_per_slot);
  if (box.write) {
    const uint32_t full = std::min(context / config->page_size, box.num_pages);
    box.pages += full;
    box.num_pages -= full;
  }
  box.planes = o.dims[1];
  // The region of a task of many rows is an index of its own, not one of heads.
  const bool all = trust.trust == PAGES_OF_ROWS;
  box.first_plane = all ? 0 : trust.lo[1];
  box.last_plane = all ? box.planes / 2 : trust.hi[1];
  box.stride[0] = o.strides[0] * bytes;
  box.stride[1] = o.strides[1] * bytes;
  boxes->push_back(box);
}

} // namespace

bool add_operand(const mpk_kernel_args* args, const mpk_operand& o, bool write, std::vector<Box>* boxes) {
  const mpk_batch* batch = args->batch;
  Box box;
  box.write = write;
  const Declared* trust = nullptr;
  {
    std::shared_lock<std::shared_mutex> hold(lock);
    const auto found = declared().find(&o);
    if (found != declared().end()) trust = &found->second;
  }
  if (trust != nullptr && trust->trust == PAGES_OF_ROWS) {
    if (!view_box(o, nullptr, nullptr, 0, &box)) return true;
    for (uint32_t active = 0; active < batch->num_active; ++active) add_pages(args, o, *trust, active, box, boxes);
    return true;
  }
  if (trust != nullptr && trust->slot >= batch->num_active) return true; // the slot is not active: nothing may be accessed
  if (trust != nullptr && trust->trust == PAGES_OF_SLOT) {
    if (view_box(o, nullptr, nullptr, 0, &box)) add_pages(args, o, *trust, trust->slot, box, boxes);
    return true;
  }
  if (trust != nullptr) {
    uint32_t lo[MPK_MAX_DIMS], hi[MPK_MAX_DIMS];
    memcpy(lo, trust->lo, sizeof(lo));
    memcpy(hi, trust->hi, sizeof(hi));
    const uint32_t first = static_cast<uint32_t>(batch->active_first_row[trust->slot]);
    const uint32_t end = first + static_cast<uint32_t>(batch->active_num_rows[trust->slot]);
    if (trust->trust == ROWS_OF_SLOT_IN_TILES) {
      const uint32_t of_tile = o.dims[2]; // the rows of a tile are dimension 2
      for (uint32_t row = first; row < end; row = (lo[0] + 1) * of_tile) {
        lo[0] = row / of_tile, hi[0] = lo[0] + 1;
        lo[2] = row % of_tile, hi[2] = std::min(end - lo[0] * of_tile, of_tile);
        if (view_box(o, lo, hi, 0, &box)) boxes->push_back(box);
      }
    } else {
      lo[0] = first, hi[0] = end;
      if (view_box(o, lo, hi, 0, &box)) boxes->push_back(box);
    }
    // The invariant: no row belongs to two slots.
    for (uint32_t a = 0; a + 1 < batch->num_active; ++a)
      if (batch->active_first_row[a] + batch->active_num_rows[a] > batch->active_first_row[a + 1]) return false;
    return true;
  }
  const mpk_rank* rank = args->rank;
  for (uint32_t pe = 0; pe < rank->world; ++pe) {
    const bool own = pe == rank->rank;
    if (o.pe == -1 ? !own : o.pe != -2 && static_cast<uint32_t>(o.pe) != pe) continue;
    // The proxy writes to ranks out of reach; the task itself has nothing to access there.
    if (!own && rank->sym[pe] == nullptr) continue;
    const int64_t shift = own ? 0 : static_cast<int64_t>(rank->sym[pe] - rank->sym[rank->rank]);
    if (view_box(o, nullptr, nullptr, shift, &box)) boxes->push_back(box);
  }
  return true;
}

} // namespace sanitizer
} // namespace mpk

// Declares before the run what an operand stands for: `slot` is the active slot, and the box counts from the view's
// start.
extern "C" void mpk_sanitizer_declare(const mpk_operand* operand, uint32_t trust, uint32_t slot, const uint32_t* lo,
                                      const uint32_t* hi) {
  using namespace mpk::sanitizer;
  Declared entry{trust, slot, {}, {}};
  memcpy(entry.lo, lo, sizeof(entry.lo));
  memcpy(entry.hi, hi, sizeof(entry.hi));
  std::unique_lock<std::shared_mutex> hold(lock);
  declared()[operand] = entry;
}

// Forgets the declarations of the `count` operands at this address.
extern "C" void mpk_sanitizer_forget(const mpk_operand* operands, uint64_t count) {
  using namespace mpk::sanitizer;
  std::unique_lock<std::shared_mutex> hold(lock);
  if (declared().empty()) return;
  for (uint64_t i = 0; i < count; ++i) declared().erase(operands + i);
}
