#ifndef MPK_ADD_PARAMS_H
#define MPK_ADD_PARAMS_H

#include <stdint.h>

typedef struct mpk_add_params {
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t first_row; /* the row of the whole output that is the first of the summands */
} mpk_add_params;

#endif
