// How many of a part's tokens come before each entry of the sample's frontier, and what they weigh.
#pragma once

#include "tasks/sample_weigh/cpu_weigh.h"

namespace mpk {
namespace MPK_ISA {
namespace { // no other file's code of the same name may take its place

using namespace sampling;

int sample_weigh(const mpk_kernel_args* args) {
  const uint32_t kept = reinterpret_cast<const mpk_sample_weigh_params*>(args->params)->kept;
  const Row row = row_of(args, static_cast<uint32_t>(args->task->args[3]), kept);
  if (row.mode != kFrontier) return MPK_OK;
  weigh_columns(args->inputs[0], Columns(args, row, 1), row, reinterpret_cast<FrontierEntry*>(args->scratch),
                reinterpret_cast<uint32_t*>(args->outputs[0].addr));
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_sample_weigh)(const mpk_kernel_args* args) { return mpk::MPK_ISA::sample_weigh(args); }
