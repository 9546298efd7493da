#include "tasks/silu_mul/kernel.h"
