#include "tasks/sample_weigh/kernel.h"
