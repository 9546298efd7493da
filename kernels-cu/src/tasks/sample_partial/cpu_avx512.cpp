#include "tasks/sample_partial/kernel.h"
