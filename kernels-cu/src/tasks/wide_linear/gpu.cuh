/* A wide product: mpk::gpu::WideLinear of gpu/wide_linear.cuh, or for few rows mpk::gpu::WideFew of
 * gpu/wide_few.cuh or mpk::gpu::WideTall of gpu/wide_tall.cuh. */
#pragma once

#include "gpu/wide_few.cuh"
#include "gpu/wide_tall.cuh"
