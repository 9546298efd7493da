#include "cpu/task.h"

namespace mpk {
MPK_DECLARE_LEVELS(int, mpk_silu_mul, const mpk_kernel_args*)
}

extern "C" int mpk_task_silu_mul(const mpk_kernel_args* args) {
  using namespace mpk;
  return MPK_PICK(mpk_silu_mul)(args);
}
