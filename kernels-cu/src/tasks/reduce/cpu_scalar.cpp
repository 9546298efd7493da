#include "tasks/reduce/kernel.h"
