/* Parameters of `add`. args[0]: the first row of a task that also norms its rows, otherwise 0. */
#ifndef MPK_ADD_PARAMS_H
#define MPK_ADD_PARAMS_H

#include <stdint.h>

#include "tasks/wide_rows/params.h"

typedef struct mpk_add_params {
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t first_row; /* the row of the whole output that is the first of the summands */
} mpk_add_params;

/* With a second output, the rows are also normed, as by `wide_rows`. args[1..] are those of `wide_rows`; first_row is 0. */
typedef struct mpk_add_rows_params {
  mpk_add_params sum;
  mpk_wide_rows_params rows;
} mpk_add_rows_params;

#endif
