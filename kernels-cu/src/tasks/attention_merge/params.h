/* Parameters of `attention_merge`. */
#ifndef MPK_TASK_ATTENTION_MERGE_PARAMS_H
#define MPK_TASK_ATTENTION_MERGE_PARAMS_H

#include <stdint.h>

typedef struct mpk_attention_merge_params {
  uint32_t head_dim;
  uint32_t splits;
} mpk_attention_merge_params;

#endif
