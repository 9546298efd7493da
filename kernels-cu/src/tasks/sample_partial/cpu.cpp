#include "tasks/sample_partial/noise.h"

#include "cpu/task.h"

namespace mpk {
MPK_DECLARE_LEVELS(int, mpk_sample_partial, const mpk_kernel_args*)
}

extern "C" int mpk_task_sample_partial(const mpk_kernel_args* args) {
  using namespace mpk;
  return MPK_PICK(mpk_sample_partial)(args);
}

// For the tests.
extern "C" void mpk_philox4x32_10(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const auto words = mpk::sampling::philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1]);
  for (int i = 0; i < 4; ++i) out[i] = words.word[i];
}
extern "C" float mpk_gumbel(uint32_t word) { return mpk::sampling::gumbel(word); }
extern "C" float mpk_most_gumbel(uint32_t word) { return mpk::sampling::most_gumbel(word); }
