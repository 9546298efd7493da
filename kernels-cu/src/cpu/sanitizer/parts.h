// The runtime's memory besides tensors, and what a task may do there.
#pragma once

#include <stdint.h>

#include <vector>

#include "mpk/abi.h"

namespace mpk {
namespace sanitizer {

enum class Allowed : uint8_t { NOTHING, READ, WRITE /* and read */ };

// `number` is a worker, a rank or another index, for the part's name.
struct Range {
  uintptr_t start, end;
  uint32_t number;
  bool write;
};

// A call of a kernel. The frames of the kernel and of what it calls are below `frame`.
struct Call {
  const mpk_kernel_args* args;
  uintptr_t frame;
};

struct Part {
  const char* name; // a format for the number
  Allowed allowed;
  const char* reason; // why tasks need it
  void (*ranges)(const Call& call, std::vector<Range>* found);
};

// Adds what a task may access besides its operands.
void add_permitted(const Call& call, std::vector<Range>* found);
// The part that `at` lies in and its range; NULL: none.
const Part* part_of(const Call& call, uintptr_t at, Range* range);

} // namespace sanitizer
} // namespace mpk
