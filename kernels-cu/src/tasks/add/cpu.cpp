#include "cpu/ops.h"
#include "tasks/add/params.h"
#include "tasks/wide_rows/rows.h"

extern "C" int mpk_task_add(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_add_params*>(args->params);
  const bool norms = args->task->num_outputs == 2;
  const uint32_t summands = args->task->num_inputs - (norms ? 1 : 0);
  const mpk_operand& a = args->inputs[0];
  const mpk_operand& residual = args->inputs[1];
  const mpk_operand& out = args->outputs[0];
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint32_t rows = mpk::rows_in_use_from(args, params->rows_kind, params->first_row + static_cast<uint32_t>(args->task->args[0]), out.dims[0]);
  for (uint32_t row = 0; row < rows; ++row) {
    void* const to = mpk::row_address(out, row);
    float* const sum = static_cast<float*>(out.dtype == MPK_F32 ? to : args->scratch);
    ops.add(sum, mpk::row_address(a, row), a.dtype, reinterpret_cast<const float*>(mpk::row_address(residual, row)), out.dims[1]);
    for (uint32_t i = 2; i < summands; ++i)
      ops.add(sum, mpk::row_address(args->inputs[i], row), args->inputs[i].dtype, sum, out.dims[1]);
    if (out.dtype != MPK_F32) ops.from_f32(to, out.dtype, sum, out.dims[1]);
  }
  if (norms) {
    const auto* of_rows = reinterpret_cast<const mpk_add_rows_params*>(args->params);
    mpk::wide_rows(args, &of_rows->rows, args->task->args + 1, out, args->inputs + summands, args->outputs[1]);
  }
  return MPK_OK;
}
