/* Parameters of `attention`, the same for all tasks of an operator. */
#ifndef MPK_TASK_ATTENTION_PARAMS_H
#define MPK_TASK_ATTENTION_PARAMS_H

#include <stdint.h>

typedef struct mpk_attention_params {
  uint32_t head_dim;
  uint32_t splits;   /* number of shares into which a slot's positions are divided */
  uint32_t partial;  /* 1: the outputs are partial results for attention_merge */
  uint32_t qk_norm;  /* 1: queries and keys go through rmsnorm over head_dim */
  float eps;         /* of that norm */
  float scale;       /* of the scores */
  uint32_t streamed; /* 1: on GPUs the loader brings keys and values of earlier iterations, if the cache's form allows it */
  uint32_t kv_heads; /* key-value heads per task; on GPUs a power of two up to 8 */
  uint32_t window;   /* positions that a query sees, its own included; 0: all */
} mpk_attention_params;

#endif
