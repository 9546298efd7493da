#ifndef MPK_WIDE_LINEAR_PARAMS_H
#define MPK_WIDE_LINEAR_PARAMS_H

#include <stdint.h>

/* Operands: x in MPK_LAYOUT_WIDE, weight (for a gated product two, gate and then up, or one in MPK_LAYOUT_PAIRED), bias (for a gated
 * product always two) and residual if there are any; then the output, as rows or in MPK_LAYOUT_WIDE. args[0]: first row of the
 * task's tile of the output. args[1] and args[2]: the blocks of 16 k that the task goes through; bias and residual belong to the
 * first of them. */
typedef struct mpk_wide_linear_params {
  uint32_t rows_kind;    /* of the output; 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t rows;         /* rows of the whole output */
  uint32_t has_bias;     /* 1: there is a bias operand */
  uint32_t add_bias;     /* 0: it is left to another rank */
  uint32_t has_residual; /* 1: there is a residual operand */
  uint32_t gated;        /* 1: gate and up are each rounded to the output's type; silu(gate) * up */
  uint32_t wide_output;  /* 1: the output is in MPK_LAYOUT_WIDE */
  /* The tile: `high` rows of the weights, `tokens` tiles of `width` rows of x. */
  uint32_t high, tokens, width;
  uint32_t push; /* 1: the output is pushed as flagged words to every rank; then one tile has all rows */
} mpk_wide_linear_params;

#endif
