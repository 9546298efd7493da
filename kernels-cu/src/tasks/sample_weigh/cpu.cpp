#include "cpu/task.h"

namespace mpk {
MPK_DECLARE_LEVELS(int, mpk_sample_weigh, const mpk_kernel_args*)
}

extern "C" int mpk_task_sample_weigh(const mpk_kernel_args* args) {
  using namespace mpk;
  return MPK_PICK(mpk_sample_weigh)(args);
}
