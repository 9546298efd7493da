/* Words of the counts tensor. `token_counts` has no parameters of its own. */
#ifndef MPK_TASK_TOKEN_COUNTS_PARAMS_H
#define MPK_TASK_TOKEN_COUNTS_PARAMS_H

#include <stdint.h>

/* A count: this bit where the token is in the prompt, and how often it came as a new token in the other bits. */
#define MPK_COUNT_IN_PROMPT 0x80000000u

typedef struct mpk_token_counts_params {
  uint32_t unused;
} mpk_token_counts_params;

#endif
