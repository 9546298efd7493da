#include "tasks/attention_merge/kernel.h"
