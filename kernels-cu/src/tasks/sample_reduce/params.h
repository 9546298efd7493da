/* Parameters of `sample_reduce`. */
#ifndef MPK_TASK_SAMPLE_REDUCE_PARAMS_H
#define MPK_TASK_SAMPLE_REDUCE_PARAMS_H

#include <stdint.h>

typedef struct mpk_sample_reduce_params {
  uint32_t kept; /* capacity of a list of the highest logits */
} mpk_sample_reduce_params;

#endif
