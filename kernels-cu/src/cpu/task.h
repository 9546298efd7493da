// What every task kernel needs from the ABI.
#pragma once

#include "cpu/isa.h"
#include "mpk/abi.h"

namespace mpk {

// Which rows of an activation are in use: the values of a `rows_kind` word in a params struct.
enum RowsKind : uint32_t { ROWS_TOKENS = 0, ROWS_SAMPLES = 1, ROWS_FIXED = 2 };

// The number of rows in use out of `capacity`; all of them if flagged words are refreshed (MPK_FLAG_REFRESH).
static inline uint32_t rows_in_use(const mpk_kernel_args* args, uint32_t rows_kind, uint32_t capacity) {
  uint32_t rows = capacity;
  if (MPK_FLAG_REFRESH(*args->task, args->batch->epoch)) return rows;
  if (rows_kind == ROWS_TOKENS) rows = args->batch->num_rows;
  if (rows_kind == ROWS_SAMPLES) rows = args->batch->num_samples;
  return rows < capacity ? rows : capacity;
}
// The same for a block of `capacity` rows that starts at row `first` of its tensor.
static inline uint32_t rows_in_use_from(const mpk_kernel_args* args, uint32_t rows_kind, uint32_t first, uint32_t capacity) {
  const uint32_t rows = rows_in_use(args, rows_kind, first + capacity);
  return rows > first ? rows - first : 0;
}

static inline uint64_t element_bytes(uint32_t dtype) {
  switch (dtype) {
    case MPK_U8: return 1;
    case MPK_F16:
    case MPK_BF16: return 2;
    case MPK_F32_FLAGGED: return 8;
    default: return 4;
  }
}

// Address of row `row` of a view whose dimension 0 is rows.
static inline uint8_t* row_address(const mpk_operand& view, uint64_t row) {
  return reinterpret_cast<uint8_t*>(view.addr) + row * view.strides[0] * element_bytes(view.dtype);
}

// Selects the function of the level in use from the compiled ones. For cpu.cpp, if kernel.h defines
// MPK_LEVEL_NAME(mpk_x) and cpu_scalar.cpp, cpu_avx2.cpp and cpu_avx512.cpp compile it:
//   namespace mpk { MPK_DECLARE_LEVELS(int, mpk_x, const mpk_kernel_args*) }
//   extern "C" int mpk_task_x(const mpk_kernel_args* args) { using namespace mpk; return MPK_PICK(mpk_x)(args); }
#ifdef MPK_X86
#define MPK_DECLARE_LEVELS(result, name, ...)                                                              \
  extern "C" result name##_scalar(__VA_ARGS__);                                                            \
  extern "C" result name##_avx2(__VA_ARGS__);                                                              \
  extern "C" result name##_avx512(__VA_ARGS__);
#define MPK_PICK(name)                                                                                     \
  (mpk_cpu_isa() >= MPK_LEVEL_AVX512 ? name##_avx512 : mpk_cpu_isa() == MPK_LEVEL_AVX2 ? name##_avx2 : name##_scalar)
#else
#define MPK_DECLARE_LEVELS(result, name, ...) extern "C" result name##_scalar(__VA_ARGS__);
#define MPK_PICK(name) (name##_scalar)
#endif

} // namespace mpk

// In a file compiled for a level: NAME_LEVEL, e.g. MPK_LEVEL_NAME(mpk_task_x) in x_avx2.cpp is mpk_task_x_avx2.
#ifdef MPK_ISA
#define MPK_CONCAT2(a, b) a##_##b
#define MPK_CONCAT(a, b) MPK_CONCAT2(a, b)
#define MPK_LEVEL_NAME(name) MPK_CONCAT(name, MPK_ISA)
#endif
