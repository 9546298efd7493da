/* Everything that a task type's gpu.cuh needs; see context.cuh for the rules. */
#pragma once

#include "gpu/context.cuh"
#include "gpu/numbers.cuh"
#include "gpu/push.cuh"

/* The generated jump tables, inlined into the warps that use them. */
#define MPK_DISPATCH static __device__ __forceinline__
