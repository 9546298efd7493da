/* Parameters of `reduce`. args[0]: index of the tile's first row within the tensor whose rows in
 * use are counted. */
#ifndef MPK_TASK_REDUCE_PARAMS_H
#define MPK_TASK_REDUCE_PARAMS_H

#include <stdint.h>

#include "tasks/wide_rows/params.h"

typedef struct mpk_reduce_params {
  uint32_t world;
  uint32_t rank;
  uint32_t rows_kind; /* rows in use: 0 tokens, 1 samples, 2 all */
  uint32_t flags;     /* MPK_REDUCE_* */
} mpk_reduce_params;

#define MPK_REDUCE_FLAGGED 1u
#define MPK_REDUCE_RESIDUAL 2u
/* The rows are also normed, as by `wide_rows`. The parameters are mpk_reduce_rows_params; args[1..] are those of `wide_rows`. */
#define MPK_REDUCE_ROWS 4u

typedef struct mpk_reduce_rows_params {
  mpk_reduce_params sum;
  mpk_wide_rows_params rows;
} mpk_reduce_rows_params;

#endif
