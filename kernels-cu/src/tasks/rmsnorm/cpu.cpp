#include "cpu/ops.h"
#include "tasks/rmsnorm/params.h"

extern "C" int mpk_task_rmsnorm(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_rmsnorm_params*>(args->params);
  const mpk_operand& x = args->inputs[0];
  const mpk_operand& weight = args->inputs[1];
  const mpk_operand& out = args->outputs[0];
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint32_t used = mpk::rows_in_use(args, params->rows_kind, params->rows);
  const uint32_t first = static_cast<uint32_t>(args->task->args[0]);
  for (uint32_t row = 0; row < out.dims[0] && first + row < used; ++row)
    ops.rmsnorm(mpk::row_address(out, row), out.dtype, mpk::row_address(x, row), x.dtype,
                reinterpret_cast<const void*>(weight.addr), weight.dtype, params->eps,
                reinterpret_cast<float*>(args->scratch), out.dims[1]);
  return MPK_OK;
}
