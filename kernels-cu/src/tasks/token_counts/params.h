/* Words of the counts tensor. `token_counts` has no parameters. */
#ifndef MPK_TASK_TOKEN_COUNTS_PARAMS_H
#define MPK_TASK_TOKEN_COUNTS_PARAMS_H

#include <stdint.h>

/* A count: this bit is set if the token is in the prompt; the other bits count how often it occurred as a new
 * token. */
#define MPK_COUNT_IN_PROMPT 0x80000000u

typedef struct mpk_token_counts_params {
  uint32_t unused;
} mpk_token_counts_params;

#endif
