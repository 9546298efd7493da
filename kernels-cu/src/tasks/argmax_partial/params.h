/* Parameters of `argmax_partial` and the words of its records. */
#ifndef MPK_TASK_ARGMAX_PARTIAL_PARAMS_H
#define MPK_TASK_ARGMAX_PARTIAL_PARAMS_H

#include <stdint.h>

typedef struct mpk_argmax_partial_params {
  uint32_t kept;    /* candidates of a record: max(1, top_k) */
  uint32_t sampled; /* 1: other tasks find the tokens, so only log-probabilities need candidates */
} mpk_argmax_partial_params;

/* A record: hash of the batch state (low, high), maximum (f32), sum of exp(x - maximum) (f32), then `kept` pairs
 * of value (f32) and global token, highest value first, lowest token first among equals. */
enum mpk_argmax_record {
  MPK_ARGMAX_HASH_LOW = 0,
  MPK_ARGMAX_HASH_HIGH = 1,
  MPK_ARGMAX_MAXIMUM = 2,
  MPK_ARGMAX_SUM = 3,
  MPK_ARGMAX_PAIRS = 4,
};
/* Token of a pair without a candidate; its value is -infinity. */
#define MPK_ARGMAX_NO_TOKEN 0xFFFFFFFFu

#endif
