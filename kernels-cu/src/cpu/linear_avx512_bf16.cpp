#include "cpu/linear.inc"
