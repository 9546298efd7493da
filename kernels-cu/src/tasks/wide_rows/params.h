#ifndef MPK_WIDE_ROWS_PARAMS_H
#define MPK_WIDE_ROWS_PARAMS_H

#include <stdint.h>

/* Operands: x, and for normed rows the norm weight; then the rows in MPK_LAYOUT_WIDE. args[0]: first row of the task's
 * block, args[1]: its place in the view of x, args[2]: its rows. */
typedef struct mpk_wide_rows_params {
  uint32_t source;    /* 0: x unchanged, 1: normed, 2: silu(first half) * second half */
  uint32_t gather;    /* 1: row s is computed from row sample_row[s] of x; the view has all of x */
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t rows;      /* rows of the whole tensor */
  uint32_t columns;   /* of the result */
  float eps;          /* of the norm */
} mpk_wide_rows_params;

#endif
