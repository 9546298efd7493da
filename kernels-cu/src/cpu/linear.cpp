#include "cpu/linear.h"

MPK_DECLARE_LEVELS(int, mpk_linear, const mpk::LinearTask*)
#ifdef MPK_X86
extern "C" int mpk_linear_avx512_bf16(const mpk::LinearTask*);
#endif

namespace mpk {

static int run_on_level(const LinearTask& task) {
#ifdef MPK_X86
  if (mpk_cpu_isa() == MPK_LEVEL_AVX512_BF16) return mpk_linear_avx512_bf16(&task);
#endif
  return MPK_PICK(mpk_linear)(&task);
}

// Reads the operands up to the weight; `next` continues after x and the norm weight.
static LinearTask begin_task(const mpk_kernel_args* args, RowSource source, const mpk_operand*& next) {
  LinearTask task{};
  task.args = args;
  task.params = reinterpret_cast<const mpk_linear_params*>(args->params);
  task.source = source;
  next = args->inputs;
  task.x = next++;
  if (source == RowSource::RMSNORM) task.norm = next++;
  task.out = args->outputs;
  return task;
}

int run_linear_task(const mpk_kernel_args* args, RowSource source) {
  const mpk_operand* next;
  LinearTask task = begin_task(args, source, next);
  task.weight = next++;
  const int32_t* leaves_out = args->task->args; // the bias; the residual
  if (task.params->has_bias) {
    if (task.params->add_bias && leaves_out[0] == 0) task.bias = next;
    ++next;
  }
  if (task.params->has_residual && leaves_out[1] == 0) task.residual = next;
  return run_on_level(task);
}

int run_gated_linear_task(const mpk_kernel_args* args, RowSource source) {
  if (args->outputs->dtype == MPK_F32_FLAGGED) return MPK_ABORT_KERNEL; // the output holds the gates meanwhile
  const mpk_operand* next;
  LinearTask task = begin_task(args, source, next);
  const mpk_operand *weights = next, *biases = task.params->has_bias && task.params->add_bias ? next + 2 : nullptr;
  for (int half = 0; half < 2; ++half) {
    task.weight = weights + half;
    task.bias = biases ? biases + half : nullptr;
    task.gated = half == 1;
    const int code = run_on_level(task);
    if (code != MPK_OK) return code;
  }
  return MPK_OK;
}

} // namespace mpk
