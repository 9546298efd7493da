#ifndef MPK_RMSNORM_LINEAR_SILU_MUL_PARAMS_H
#define MPK_RMSNORM_LINEAR_SILU_MUL_PARAMS_H

#include "tasks/linear/params.h"

typedef mpk_linear_params mpk_rmsnorm_linear_silu_mul_params;

#endif
