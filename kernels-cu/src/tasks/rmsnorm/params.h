#ifndef MPK_RMSNORM_PARAMS_H
#define MPK_RMSNORM_PARAMS_H

#include <stdint.h>

/* args[0]: first row of the task's block. */
typedef struct mpk_rmsnorm_params {
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t rows;      /* rows of the whole tensor */
  float eps;
} mpk_rmsnorm_params;

#endif
