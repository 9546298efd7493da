#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int32_t> chosen{-1};

int32_t choose() {
  static const char* const names[] = {"scalar", "avx2", "avx512", "avx512_bf16"};
  const int32_t supported = mpk_cpu_isa_supported();
  if (const char* wanted = std::getenv("MPK_CPU_ISA")) {
    for (int32_t level = 0; level <= supported; ++level)
      if (std::strcmp(wanted, names[level]) == 0) return level;
  }
#ifdef MPK_X86
  __builtin_cpu_init();
  if (supported == MPK_LEVEL_AVX512_BF16 && !__builtin_cpu_is("amd")) return MPK_LEVEL_AVX512;
#endif
  return supported;
}

} // namespace

extern "C" int32_t mpk_cpu_isa_supported(void) {
#ifdef MPK_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return MPK_LEVEL_SCALAR;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return MPK_LEVEL_AVX2;
  return __builtin_cpu_supports("avx512bf16") ? MPK_LEVEL_AVX512_BF16 : MPK_LEVEL_AVX512;
#else
  return MPK_LEVEL_SCALAR;
#endif
}

extern "C" int32_t mpk_cpu_isa(void) {
  int32_t level = chosen.load(std::memory_order_relaxed);
  if (level < 0) {
    level = choose();
    chosen.store(level, std::memory_order_relaxed);
  }
  return level;
}

extern "C" int32_t mpk_cpu_set_isa(int32_t level) {
  if (level > mpk_cpu_isa_supported()) level = mpk_cpu_isa_supported();
  chosen.store(level < 0 ? -1 : level, std::memory_order_relaxed);
  return mpk_cpu_isa();
}
