#ifndef MPK_RMSNORM_LINEAR_PARAMS_H
#define MPK_RMSNORM_LINEAR_PARAMS_H

#include "tasks/linear/params.h"

typedef mpk_linear_params mpk_rmsnorm_linear_params;

#endif
