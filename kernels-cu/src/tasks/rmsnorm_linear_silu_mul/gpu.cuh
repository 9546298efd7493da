/* Normed x times gate and up, gated: mpk::gpu::Linear of gpu/linear.cuh, whose arguments say which member of the family it
 * is. */
#pragma once

#include "gpu/linear.cuh"
