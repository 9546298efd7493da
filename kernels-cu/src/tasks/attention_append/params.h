/* Parameters of `attention_append`, the same for all tasks of an operator. */
#ifndef MPK_TASK_ATTENTION_APPEND_PARAMS_H
#define MPK_TASK_ATTENTION_APPEND_PARAMS_H

#include <stdint.h>

typedef struct mpk_attention_append_params {
  uint32_t head_dim;
  uint32_t qk_norm; /* 1: queries and keys go through rmsnorm over head_dim */
  float eps;        /* of that norm */
} mpk_attention_append_params;

#endif
