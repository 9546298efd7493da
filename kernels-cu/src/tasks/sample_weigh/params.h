/* Parameters of `sample_weigh` and the words of its records. */
#ifndef MPK_TASK_SAMPLE_WEIGH_PARAMS_H
#define MPK_TASK_SAMPLE_WEIGH_PARAMS_H

#include <stdint.h>

typedef struct mpk_sample_weigh_params {
  uint32_t kept; /* the capacity of a list of the highest logits */
} mpk_sample_weigh_params;

/* A record: the number of entries, the highest logit of the sample, the weight of the part's tokens that min-p keeps (low, high
 * word), then for each entry of the sample's frontier, the highest logit first: logit, noisy value, token, and the number
 * and the weight (low, high word) of the part's tokens before it. With one entry all sums are 0. */
enum mpk_weigh_record {
  MPK_WEIGH_COUNT = 0,
  MPK_WEIGH_HIGHEST = 1,
  MPK_WEIGH_SUM = 2,
  MPK_WEIGH_ENTRIES = 4,
  MPK_WEIGH_ENTRY_WORDS = 6,
  MPK_WEIGH_WORDS = 4 + 6 * 64,
};

#endif
