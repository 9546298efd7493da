/* Parameters of `argmax_reduce`. */
#ifndef MPK_TASK_ARGMAX_REDUCE_PARAMS_H
#define MPK_TASK_ARGMAX_REDUCE_PARAMS_H

#include <stdint.h>

typedef struct mpk_argmax_reduce_params {
  uint32_t kept;  /* candidates of a record: max(1, top_k) */
  uint32_t top_k; /* log-probabilities wanted; 0: the outputs are next_token alone */
} mpk_argmax_reduce_params;

#endif
