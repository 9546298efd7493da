#pragma once

#include "cpu/task.h"
#include "tasks/wide_rows/params.h"

namespace mpk {

// The rows of a task in MPK_LAYOUT_WIDE, on the CPU target. `numbers`: the task's arguments (params.h). `norm` is read only by normed
// rows. The scratch memory is the task's.
void wide_rows(const mpk_kernel_args* args, const mpk_wide_rows_params* params, const int32_t* numbers, const mpk_operand& x,
               const mpk_operand* norm, const mpk_operand& out);

} // namespace mpk
