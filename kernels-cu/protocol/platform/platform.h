/* Selects the platform header of the target. This is the only such choice in the protocol. */
#ifndef MPK_PLATFORM_PLATFORM_H
#define MPK_PLATFORM_PLATFORM_H

#if defined(__CUDACC__)
#include "platform/gpu.h"
#include "platform/gpu_puts.h"
#elif defined(MPK_MODEL)
#include "model/platform.h" /* the model checker's */
#else
#include "platform/cpu.h"
#include "platform/cpu_puts.h"
#endif

#endif
