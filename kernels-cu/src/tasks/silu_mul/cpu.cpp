#include "cpu/ops.h"
#include "tasks/silu_mul/params.h"

extern "C" int mpk_task_silu_mul(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_silu_mul_params*>(args->params);
  const mpk_operand& gate = args->inputs[0];
  const mpk_operand& up = args->inputs[1];
  const mpk_operand& out = args->outputs[0];
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint32_t rows = mpk::rows_in_use(args, params->rows_kind, out.dims[0]);
  for (uint32_t row = 0; row < rows; ++row)
    ops.silu_mul(mpk::row_address(out, row), mpk::row_address(gate, row), mpk::row_address(up, row), out.dtype,
                 reinterpret_cast<float*>(args->scratch), out.dims[1]);
  return MPK_OK;
}
