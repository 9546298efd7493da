/* Parameters of `attention_prefill` and `attention_prefill_merge`, the same for all tasks of an operator. */
#ifndef MPK_TASK_ATTENTION_PREFILL_PARAMS_H
#define MPK_TASK_ATTENTION_PREFILL_PARAMS_H

#include <stdint.h>

typedef struct mpk_attention_prefill_params {
  uint32_t head_dim;
  uint32_t group;    /* query heads per key-value head, over all ranks */
  uint32_t skipped;  /* query heads of this rank's first key-value head that belong to an earlier rank */
  uint32_t queries;  /* query heads of this rank */
  uint32_t kv_heads; /* key-value heads of this rank */
  uint32_t tasks;    /* number of tasks that share the units */
  float scale;       /* factor of the scores */
  uint32_t window;   /* positions that a query sees, its own included; 0: all */
} mpk_attention_prefill_params;

#endif
