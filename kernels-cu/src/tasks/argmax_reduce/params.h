/* Parameters of `argmax_reduce`. */
#ifndef MPK_TASK_ARGMAX_REDUCE_PARAMS_H
#define MPK_TASK_ARGMAX_REDUCE_PARAMS_H

#include <stdint.h>

typedef struct mpk_argmax_reduce_params {
  uint32_t kept;  /* candidates of a record: max(1, top_k) */
  uint32_t top_k; /* number of log-probabilities; with 0, next_token is the only output */
} mpk_argmax_reduce_params;

#endif
