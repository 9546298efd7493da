#ifndef MPK_EMBEDDING_PARAMS_H
#define MPK_EMBEDDING_PARAMS_H

#include <stdint.h>

/* args[0]: first column of the task's tile. */
typedef struct mpk_embedding_params {
  uint32_t push;        /* 1: the output is pushed as flagged words to every rank */
  uint32_t first_token; /* token of the table's first row on this rank */
  uint32_t num_tokens;  /* rows of the table on this rank */
} mpk_embedding_params;

#endif
