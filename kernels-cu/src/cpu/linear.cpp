#include "cpu/linear.h"

MPK_DECLARE_LEVELS(int, mpk_linear, const mpk::LinearTask*)
#ifdef MPK_X86
extern "C" int mpk_linear_avx512_bf16(const mpk::LinearTask*);
#endif

int mpk::run_linear_task(const mpk_kernel_args* args, RowSource source) {
  LinearTask task{};
  task.args = args;
  task.params = reinterpret_cast<const mpk_linear_params*>(args->params);
  task.source = source;
  const mpk_operand* next = args->inputs;
  task.x = next++;
  if (source == RowSource::RMSNORM) task.norm = next++;
  task.weight = next++;
  if (task.params->has_bias) {
    if (task.params->add_bias) task.bias = next;
    ++next;
  }
  if (task.params->has_residual) task.residual = next++;
  task.out = args->outputs;
#ifdef MPK_X86
  if (mpk_cpu_isa() == MPK_LEVEL_AVX512_BF16) return mpk_linear_avx512_bf16(&task);
#endif
  return MPK_PICK(mpk_linear)(&task);
}
