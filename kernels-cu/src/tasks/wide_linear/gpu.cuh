/* A wide product: mpk::gpu::WideLinear of gpu/wide_linear.cuh, or for fewer rows mpk::gpu::WideBroad of
 * gpu/wide_broad.cuh, mpk::gpu::WideTall of gpu/wide_tall.cuh, mpk::gpu::WideNarrow of gpu/wide_narrow.cuh or mpk::gpu::WideFew of
 * gpu/wide_few.cuh. */
#pragma once

#include "gpu/wide_broad.cuh"
#include "gpu/wide_few.cuh"
#include "gpu/wide_narrow.cuh"
#include "gpu/wide_tall.cuh"
