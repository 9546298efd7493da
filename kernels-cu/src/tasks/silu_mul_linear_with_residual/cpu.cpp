#include "cpu/linear.h"

extern "C" int mpk_task_silu_mul_linear_with_residual(const mpk_kernel_args* args) {
  return mpk::run_linear_task(args, mpk::RowSource::SILU_MUL);
}
