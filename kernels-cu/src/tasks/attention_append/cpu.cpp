#include "cpu/task.h"

namespace mpk {
MPK_DECLARE_LEVELS(int, mpk_attention_append, const mpk_kernel_args*)
}

extern "C" int mpk_task_attention_append(const mpk_kernel_args* args) {
  using namespace mpk;
  return MPK_PICK(mpk_attention_append)(args);
}
