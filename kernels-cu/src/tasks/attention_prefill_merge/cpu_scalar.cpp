#include "tasks/attention_prefill_merge/kernel.h"
