/* Parameters of `sample_merge`. */
#ifndef MPK_TASK_SAMPLE_MERGE_PARAMS_H
#define MPK_TASK_SAMPLE_MERGE_PARAMS_H

#include <stdint.h>

typedef struct mpk_sample_merge_params {
  uint32_t kept; /* capacity of a list */
} mpk_sample_merge_params;

#endif
