// The vector instructions that the kernels use, chosen once at run time.
#pragma once

#include <cstdint>

// Levels in order. All except MPK_LEVEL_AVX512_BF16 give the same bits, because they perform the same
// IEEE operations.
enum mpk_isa_level : int32_t {
  MPK_LEVEL_SCALAR = 0,
  MPK_LEVEL_AVX2 = 1,
  MPK_LEVEL_AVX512 = 2,
  MPK_LEVEL_AVX512_BF16 = 3, // products of bf16 with vdpbf16ps
};

extern "C" {
// The level in use: MPK_CPU_ISA=scalar|avx2|avx512|avx512_bf16 if the CPU supports it, otherwise the
// best one (bf16 dot products only on AMD, where they are faster than f32 multiply-adds).
int32_t mpk_cpu_isa(void);
// The highest level that this CPU supports.
int32_t mpk_cpu_isa_supported(void);
// Sets the level, for tests; -1 restores the choice above. Returns the level that is then in use.
int32_t mpk_cpu_set_isa(int32_t level);
}
