// The boxes of a task's operands.
#pragma once

#include <vector>

#include "cpu/sanitizer/boxes.h"

namespace mpk {
namespace sanitizer {

// Adds the boxes of operand `o`: those of `write` may be written. False if the batch breaks an assumption about the operand.
bool add_operand(const mpk_kernel_args* args, const mpk_operand& o, bool write, std::vector<Box>* boxes);

} // namespace sanitizer
} // namespace mpk
