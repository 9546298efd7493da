#include "tasks/attention/kernel.h"
