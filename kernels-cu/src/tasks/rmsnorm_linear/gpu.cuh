/* Normed x times weight: mpk::gpu::Linear of gpu/linear.cuh; the arguments select the member of the family. */
#pragma once

#include "gpu/linear.cuh"
