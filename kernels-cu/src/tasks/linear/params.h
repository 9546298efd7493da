#ifndef MPK_LINEAR_PARAMS_H
#define MPK_LINEAR_PARAMS_H

#include <stdint.h>

/* Used by all task types of the linear family. Operands: x, the norm weight (rmsnorm_linear), weight, then
 * bias and residual if there are any; then the output. A task's args: 1 if it leaves out the bias; 1 if it leaves out the residual.
 * A normed x and the residual may be summands [parts, rows, columns] (f32). */
typedef struct mpk_linear_params {
  uint32_t push;           /* 1: the output is pushed as flagged words to every rank */
  uint32_t rows_kind;      /* of the output; 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t gather_samples; /* 1: output row s is computed from input row mpk_batch.sample_row[s] */
  uint32_t has_bias;       /* 1: there is a bias operand */
  uint32_t add_bias;       /* 0: another rank adds it */
  uint32_t has_residual;   /* 1: there is a residual operand */
  uint32_t chunk_rows;     /* rows that are prepared at a time in scratch */
  uint32_t gated;          /* 1: two weights, gate and up (one in MPK_LAYOUT_PAIRED), and two biases, each rounded to the output's type; silu(gate) * up */
  float eps;               /* of the norm */
  uint32_t activation;     /* enum mpk_activation of the gates */
} mpk_linear_params;

#endif
