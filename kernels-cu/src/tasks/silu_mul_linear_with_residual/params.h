#ifndef MPK_SILU_MUL_LINEAR_WITH_RESIDUAL_PARAMS_H
#define MPK_SILU_MUL_LINEAR_WITH_RESIDUAL_PARAMS_H

#include "tasks/linear/params.h"

typedef mpk_linear_params mpk_silu_mul_linear_with_residual_params;

#endif
