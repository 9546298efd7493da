#include "cpu/task.h"
#include "kernel_wait.h"
#include "tasks/reduce/params.h"
#include "tasks/wide_rows/rows.h"

namespace mpk {
MPK_DECLARE_LEVELS(int, mpk_reduce, const mpk_kernel_args*)
}

extern "C" int mpk_reduce_wait(const mpk_kernel_args* args, const uint64_t* words, uint32_t count) {
  return mpk_wait_flagged(args, words, count);
}

extern "C" int mpk_task_reduce(const mpk_kernel_args* args) {
  using namespace mpk;
  const int code = MPK_PICK(mpk_reduce)(args);
  const auto& params = *reinterpret_cast<const mpk_reduce_rows_params*>(args->params);
  if (code != MPK_OK || (params.sum.flags & MPK_REDUCE_ROWS) == 0) return code;
  const mpk_operand* norm = args->inputs + args->task->num_inputs - 1;
  wide_rows(args, &params.rows, args->task->args + 1, args->outputs[0], norm, args->outputs[1]);
  return MPK_OK;
}

extern "C" int mpk_task_reduce_ready(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_reduce_params*>(args->params);
  if ((params.flags & MPK_REDUCE_FLAGGED) == 0) return 1;
  const mpk_operand& receive = args->inputs[0];
  const auto first = static_cast<uint32_t>(args->task->args[0]);
  const uint32_t rows = mpk::rows_in_use_from(args, params.rows_kind, first, receive.dims[1]);
  // The words of the last rank and of the last rows usually arrive last.
  for (uint32_t rank = params.world; rank-- > 0;)
    for (uint32_t row = rows; row-- > 0;) {
      const auto* words = reinterpret_cast<const uint64_t*>(receive.addr) +
                          uint64_t{rank} * receive.strides[0] + uint64_t{row} * receive.strides[1];
      if (!mpk_flagged_ready(args, words, receive.dims[2])) return 0;
    }
  return 1;
}
