/* Parameters of `nvshmem_copy`. args[0]: index of the view's first row within the tensor whose rows in
 * use are counted. */
#ifndef MPK_TASK_NVSHMEM_COPY_PARAMS_H
#define MPK_TASK_NVSHMEM_COPY_PARAMS_H

#include <stdint.h>

typedef struct mpk_nvshmem_copy_params {
  uint32_t rows_kind; /* rows in use: 0 tokens, 1 samples, 2 all */
} mpk_nvshmem_copy_params;

#endif
