#include "tasks/attention_append/kernel.h"
