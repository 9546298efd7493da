/* A wide product: mpk::gpu::WideLinear of gpu/wide_linear.cuh. */
#pragma once

#include "gpu/wide_linear.cuh"
