#ifndef MPK_SILU_MUL_PARAMS_H
#define MPK_SILU_MUL_PARAMS_H

#include <stdint.h>

typedef struct mpk_silu_mul_params {
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
} mpk_silu_mul_params;

#endif
