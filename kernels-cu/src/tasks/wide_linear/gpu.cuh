/* A wide product: mpk::gpu::WideLinear of gpu/wide_linear.cuh; of few rows mpk::gpu::WideFew of gpu/wide_few.cuh. */
#pragma once

#include "gpu/wide_few.cuh"
