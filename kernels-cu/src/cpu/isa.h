// Which vector instructions the kernels use, chosen once at run time.
#pragma once

#include <cstdint>

// Levels in order. All but MPK_ISA_BF16_DOT give the same bits: they carry out the same IEEE operations.
enum mpk_isa_level : int32_t {
  MPK_LEVEL_SCALAR = 0,
  MPK_LEVEL_AVX2 = 1,
  MPK_LEVEL_AVX512 = 2,
  MPK_LEVEL_AVX512_BF16 = 3, // products of bf16 by vdpbf16ps
};

extern "C" {
// The level in use: MPK_CPU_ISA=scalar|avx2|avx512|avx512_bf16 where the CPU has it, else the best one
// (bf16 dot products only on AMD, where they are faster than f32 multiply-adds).
int32_t mpk_cpu_isa(void);
// The highest level that this CPU has.
int32_t mpk_cpu_isa_supported(void);
// Sets the level, for tests; -1 goes back to the choice above. Returns the level then in use.
int32_t mpk_cpu_set_isa(int32_t level);
}
