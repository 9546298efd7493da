#include "tasks/attention_prefill/kernel.h"
