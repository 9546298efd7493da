#include "cpu/ops.h"

extern "C" {
extern const mpk::VectorOps mpk_vector_ops_scalar;
#ifdef MPK_X86
extern const mpk::VectorOps mpk_vector_ops_avx2;
extern const mpk::VectorOps mpk_vector_ops_avx512;
#endif
}

const mpk::VectorOps& mpk::vector_ops() { return MPK_PICK(mpk_vector_ops); }
