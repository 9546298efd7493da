// activation(gate) * up of a column tile, computed in f32 and rounded once. cpu_LEVEL.cpp compiles it for one level of
// vector instructions.
#pragma once

#include "cpu/rows.h"
#include "cpu/task.h"

namespace mpk {
namespace MPK_ISA {
namespace { // otherwise the linker could take code of the same name from another file

int silu_mul(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_silu_mul_params*>(args->params);
  const mpk_operand &gate = args->inputs[0], &up = args->inputs[1], &out = args->outputs[0];
  float* scratch = reinterpret_cast<float*>(args->scratch); // a row of the tile
  const uint32_t rows = rows_in_use(args, params.rows_kind, out.dims[0]);
  for (uint32_t row = 0; row < rows; ++row) {
    gate_row(scratch, params.activation, row_address(gate, row), row_address(up, row), out.dtype, out.dims[1]);
    narrow(row_address(out, row), out.dtype, scratch, out.dims[1]);
  }
  return MPK_OK;
}

} // namespace
} // namespace MPK_ISA
} // namespace mpk

extern "C" int MPK_LEVEL_NAME(mpk_silu_mul)(const mpk_kernel_args* args) { return mpk::MPK_ISA::silu_mul(args); }
