/* Normed x times gate and up, gated: mpk::gpu::Linear of gpu/linear.cuh; the arguments select the member of the family. */
#pragma once

#include "gpu/linear.cuh"
