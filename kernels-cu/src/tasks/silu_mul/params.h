#ifndef MPK_SILU_MUL_PARAMS_H
#define MPK_SILU_MUL_PARAMS_H

#include <stdint.h>

/* The function that is applied to a gate before it is multiplied. */
enum mpk_activation {
  MPK_ACTIVATION_SILU = 0,      /* x / (1 + e^-x) */
  MPK_ACTIVATION_GELU_TANH = 1, /* x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU with the tanh formula */
  MPK_ACTIVATION_GELU = 2,      /* x (1 + erf(x / sqrt(2))) / 2 */
};

typedef struct mpk_silu_mul_params {
  uint32_t rows_kind;  /* 0: token rows, 1: sample rows, 2: all rows are in use */
  uint32_t activation; /* enum mpk_activation */
} mpk_silu_mul_params;

#endif
