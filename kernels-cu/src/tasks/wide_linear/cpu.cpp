#include "cpu/linear.h"
#include "cpu/wide.h"
#include "tasks/wide_linear/params.h"

#include <cstring>

namespace {

// The rows of one of two summands, whose view has three dimensions.
mpk_operand rows_of(const mpk_operand& view) {
  if (view.ndim != 3) return view;
  mpk_operand rows = view;
  rows.ndim = 2;
  rows.dims[0] = view.dims[1], rows.dims[1] = view.dims[2];
  rows.strides[0] = view.strides[1], rows.strides[1] = view.strides[2];
  return rows;
}

} // namespace

// Converts the tile of x back to plain rows, and runs the corresponding task of the linear family.
extern "C" int mpk_task_wide_linear(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_wide_linear_params*>(args->params);
  const mpk_operand& x = args->inputs[0];
  const mpk_operand& weight = args->inputs[1];
  const mpk_operand& out = args->outputs[0];
  const uint32_t all = mpk::rows_in_use(args, params->rows_kind, params->rows), first = static_cast<uint32_t>(args->task->args[0]);
  uint32_t rows = all > first ? all - first : 0;
  if (rows > params->tokens * params->width) rows = params->tokens * params->width;
  const uint32_t k = weight.dims[1], from_k = static_cast<uint32_t>(args->task->args[1]) * 16, to_k = static_cast<uint32_t>(args->task->args[2]) * 16;
  const bool is_first = from_k == 0;
  const uint32_t width = x.dims[3];
  uint16_t* const to = reinterpret_cast<uint16_t*>(args->scratch);
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(x.addr);
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < k; ++i)
      // For a task with a part of k, the other columns are zeros.
      to[static_cast<uint64_t>(r) * k + i] = i < from_k || i >= to_k ? 0 :
          from[static_cast<uint64_t>(r / params->width) * x.strides[0] + static_cast<uint64_t>(i / width) * x.strides[1] +
               r % params->width * width + mpk::wide_place((first + r) % MPK_WIDE_ROWS, i % width, width)];

  mpk_operand inputs[6], output = rows_of(out);
  const uint32_t count = 2 + params->gated + params->has_bias * (1 + params->gated) + params->has_residual;
  for (uint32_t i = 0; i < count && i < 6; ++i) inputs[i] = args->inputs[i];
  const uint64_t as_rows = (static_cast<uint64_t>(params->tokens) * params->width * k * 2 + 63) / 64 * 64;
  uint64_t results = 0;
  if (params->wide_output) {
    // Computed as plain rows first; their layout is changed afterwards.
    results = (static_cast<uint64_t>(params->tokens) * params->width * (params->high / (1 + params->gated)) * 2 + 63) / 64 * 64;
    output = mpk_operand{};
    output.addr = reinterpret_cast<uint64_t>(args->scratch + as_rows);
    output.dims[1] = output.strides[0] = weight.dims[0];
    output.strides[1] = 1;
    output.dtype = out.dtype;
    output.ndim = 2;
    output.pe = -1;
  }
  // The residual may be two summands only with narrow column tiles.
  const uint64_t summed = width != MPK_WIDE_NARROW ? 0 : (static_cast<uint64_t>(params->tokens) * params->width * params->high * 4 + 63) / 64 * 64;
  if (params->has_residual && inputs[count - 1].ndim == 3) {
    const mpk_operand both = inputs[count - 1];
    mpk_operand& residual = inputs[count - 1];
    residual = rows_of(both);
    float* const sum = reinterpret_cast<float*>(args->scratch + as_rows + results);
    const uint32_t columns = residual.dims[1];
    for (uint32_t r = 0; r < rows; ++r) {
      const float* const a = reinterpret_cast<const float*>(both.addr) + static_cast<uint64_t>(r) * both.strides[1];
      for (uint32_t c = 0; c < columns; ++c) sum[r * columns + c] = a[c] + a[both.strides[0] + c];
    }
    residual.addr = reinterpret_cast<uint64_t>(sum);
    residual.strides[0] = columns;
  }
  mpk_operand& plain = inputs[0];
  plain = mpk_operand{};
  plain.addr = reinterpret_cast<uint64_t>(to);
  plain.dims[0] = output.dims[0] = rows;
  plain.dims[1] = k;
  plain.strides[0] = k;
  plain.strides[1] = 1;
  plain.dtype = x.dtype;
  plain.ndim = 2;
  plain.pe = -1;
  mpk_linear_params linear{};
  linear.rows_kind = 2;
  linear.has_bias = params->has_bias;
  linear.add_bias = is_first ? params->add_bias : 0;
  linear.has_residual = is_first ? params->has_residual : 0;
  linear.chunk_rows = MPK_WIDE_ROWS;
  linear.gated = params->gated;
  mpk_task task = *args->task;
  memset(task.args, 0, sizeof(task.args)); // those of the family mean something else
  mpk_kernel_args inner = *args;
  inner.task = &task;
  inner.inputs = inputs;
  inner.outputs = &output;
  inner.params = reinterpret_cast<const uint32_t*>(&linear);
  inner.scratch = args->scratch + as_rows + results + summed;
  if (!params->gated) return mpk::run_linear_task(&inner, mpk::RowSource::PLAIN);
  const int code = mpk::run_gated_linear_task(&inner, mpk::RowSource::PLAIN);
  if (code != MPK_OK || !params->wide_output) return code;
  const uint16_t* const made = reinterpret_cast<const uint16_t*>(output.addr);
  uint16_t* const laid_out = reinterpret_cast<uint16_t*>(out.addr);
  const uint32_t of_tile = out.dims[3];
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < out.dims[1] * of_tile; ++i)
      laid_out[static_cast<uint64_t>(r / MPK_WIDE_ROWS) * out.strides[0] + static_cast<uint64_t>(i / of_tile) * out.strides[1] +
               r % MPK_WIDE_ROWS * of_tile + mpk::wide_place(r % MPK_WIDE_ROWS, i % of_tile, of_tile)] =
          i < weight.dims[0] ? made[static_cast<uint64_t>(r) * weight.dims[0] + i] : 0;
  return code;
}
