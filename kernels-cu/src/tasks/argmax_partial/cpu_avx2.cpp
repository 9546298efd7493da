#include "tasks/argmax_partial/kernel.h"
