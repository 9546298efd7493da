#include "cpu/linear.h"

extern "C" int mpk_task_rmsnorm_linear_silu_mul(const mpk_kernel_args* args) {
  return mpk::run_gated_linear_task(args, mpk::RowSource::RMSNORM);
}
