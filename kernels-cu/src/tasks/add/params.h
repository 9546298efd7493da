#ifndef MPK_ADD_PARAMS_H
#define MPK_ADD_PARAMS_H

#include <stdint.h>

typedef struct mpk_add_params {
  uint32_t rows_kind; /* 0: token rows, 1: sample rows, 2: all rows are in use */
} mpk_add_params;

#endif
