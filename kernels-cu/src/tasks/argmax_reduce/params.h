/* Parameters of `argmax_reduce`. */
#ifndef MPK_TASK_ARGMAX_REDUCE_PARAMS_H
#define MPK_TASK_ARGMAX_REDUCE_PARAMS_H

#include <stdint.h>

typedef struct mpk_argmax_reduce_params {
  uint32_t kept;  /* candidates of a record: max(1, top_k) */
  uint32_t top_k; /* number of log-probabilities; with 0, next_token is the only output */
  uint32_t log_sum; /* 1: the last output is log_sum */
  uint32_t sampled; /* as in mpk_argmax_partial_params */
} mpk_argmax_reduce_params;

/* Words of a row of log_sum: the highest logit (f32), and the logarithm of the sum of exp(x - highest) (f64: low word, high word). */
enum mpk_log_sum {
  MPK_LOG_SUM_MAXIMUM = 0,
  MPK_LOG_SUM_LOW = 1,
  MPK_LOG_SUM_HIGH = 2,
  MPK_LOG_SUM_WORDS = 3,
};

#endif
