#include "cpu/ops.inc"
