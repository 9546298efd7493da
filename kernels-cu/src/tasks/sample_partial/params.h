/* Parameters of `sample_partial` and the words of its records. */
#ifndef MPK_TASK_SAMPLE_PARTIAL_PARAMS_H
#define MPK_TASK_SAMPLE_PARTIAL_PARAMS_H

#include <stdint.h>

/* The largest top_k that is allowed together with a top_p below 1. */
#define MPK_SAMPLE_MOST_LISTED 1024u

typedef struct mpk_sample_partial_params {
  uint32_t kept; /* capacity of a list of the highest logits: MPK_SAMPLE_MOST_LISTED, or the vocabulary if that is smaller */
} mpk_sample_partial_params;

/* No token: for a part without columns, and past the end of a list. */
#define MPK_SAMPLE_NO_TOKEN 0xFFFFFFFFu

/* The frontier of a set of tokens: those that no other one beats both in order (higher logit, lower token among equals) and
 * in noisy value. Filters keep the first tokens in order, so the drawn token is in the frontier. For a vocabulary of V it
 * has at most 1 + 1/2 + ... + 1/V tokens on average; with 150,000 it has more than 64 in one of 10^22 draws. */
#define MPK_SAMPLE_FRONTIER 64u

/* A record: the highest logit with its token, the number of entries, the two halves of the batch state's hash, one xor the other,
 * then entries (logit, noisy value, token, a word without meaning) of the part's frontier, the highest noisy value first, so the
 * lowest logit first. Its head and each entry have 16 bytes, which are loaded at once. For a request that takes lists, a
 * record has the hash, but no logit and no entries. */
enum mpk_sample_record {
  MPK_SAMPLE_HIGHEST = 0,
  MPK_SAMPLE_HIGHEST_TOKEN = 1,
  MPK_SAMPLE_COUNT = 2,
  MPK_SAMPLE_HASH = 3,
  MPK_SAMPLE_ENTRIES = 4,
  MPK_SAMPLE_ENTRY_WORDS = 4,
  MPK_SAMPLE_WORDS = 4 + 4 * 64,
};

#endif
