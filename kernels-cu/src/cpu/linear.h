// Shared by the task types of the linear family.
#pragma once

#include "cpu/ops.h"
#include "tasks/linear/params.h"

namespace mpk {

// How a row of the product's left side is computed.
enum class RowSource : uint32_t {
  PLAIN,    // the row of x
  RMSNORM,  // x / sqrt(mean(x^2) + eps) * norm weight
  SILU_MUL, // silu(first half of x) * second half
};

struct LinearTask {
  const mpk_kernel_args* args;
  const mpk_linear_params* params;
  RowSource source;
  const mpk_operand* x;
  const mpk_operand* norm; // or null
  const mpk_operand* weight;
  const mpk_operand* bias;     // or null: there is none, or another rank adds it
  const mpk_operand* residual; // or null
  const mpk_operand* out;
  bool gated; // the product is the ups, and the output already holds the gates
};

// Runs a task of the linear family, with the operands in the order of params.h.
int run_linear_task(const mpk_kernel_args* args, RowSource source);

// The same for a gated product: weight, and bias if there is one, first of the gates, then of the
// ups.
int run_gated_linear_task(const mpk_kernel_args* args, RowSource source);

} // namespace mpk
