#include "cpu/ops.h"

extern "C" {
extern const mpk::VectorOps mpk_vector_ops_scalar;
#ifdef MPK_X86
extern const mpk::VectorOps mpk_vector_ops_avx2;
extern const mpk::VectorOps mpk_vector_ops_avx512;
#endif
}

const mpk::VectorOps& mpk::vector_ops() { return MPK_PICK(mpk_vector_ops); }

extern "C" uint32_t mpk_cpu_read(const void* memory, uint64_t bytes, uint32_t streams, uint32_t prefetch) {
  return mpk::vector_ops().read(memory, bytes, streams, prefetch);
}
