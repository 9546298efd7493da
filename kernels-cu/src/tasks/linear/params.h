#ifndef MPK_LINEAR_PARAMS_H
#define MPK_LINEAR_PARAMS_H

#include <stdint.h>

/* All task types of the linear family. Operands: x, the norm weight (rmsnorm_linear), weight, bias and residual
 * where there are any; then the output. */
typedef struct mpk_linear_params {
  uint32_t push;           /* 1: the output goes as flagged words to every rank */
  uint32_t rows_kind;      /* of the output; 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t gather_samples; /* 1: output row s is made of input row mpk_batch.sample_row[s] */
  uint32_t has_bias;       /* 1: there is a bias operand */
  uint32_t add_bias;       /* 0: it is left to another rank */
  uint32_t has_residual;   /* 1: there is a residual operand */
  uint32_t chunk_rows;     /* rows that are prepared at once in scratch */
  uint32_t gated;          /* 1: two weights (and biases), gate and up, each rounded to the output's type; silu(gate) * up */
  float eps;               /* of the norm */
  uint32_t activation;     /* enum mpk_activation, of gates */
} mpk_linear_params;

#endif
