#include "cpu/ops.h"
#include "cpu/wide.h"
#include "tasks/wide_rows/rows.h"

#include <cstring>

// Computes a row in the output's type, then distributes its columns.
void mpk::wide_rows(const mpk_kernel_args* args, const mpk_wide_rows_params* params, const int32_t* numbers, const mpk_operand& x,
                    const mpk_operand* norm, const mpk_operand& out) {
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint32_t used = mpk::rows_in_use(args, params->rows_kind, params->rows), k = params->columns;
  const uint32_t first = static_cast<uint32_t>(numbers[0]), in_x = static_cast<uint32_t>(numbers[1]);
  const uint32_t rows = static_cast<uint32_t>(numbers[2]), width = out.dims[3], padded = out.dims[1] * width;
  float* const values = reinterpret_cast<float*>(args->scratch);
  const bool stacked = x.ndim == 3; // two summands
  float* const sum = values + (stacked ? k : 0);
  uint16_t* const row = reinterpret_cast<uint16_t*>(sum + k);
  for (uint32_t r = 0; r < rows && first + r < used; ++r) {
    const uint32_t in_view = params->gather != 0 ? static_cast<uint32_t>(args->batch->sample_row[first + r]) : in_x + r;
    const uint8_t* from = stacked ? reinterpret_cast<const uint8_t*>(sum) : mpk::row_address(x, in_view);
    if (stacked) {
      const float* a = reinterpret_cast<const float*>(x.addr) + static_cast<uint64_t>(in_view) * x.strides[1];
      for (uint32_t c = 0; c < k; ++c) sum[c] = a[c] + a[x.strides[0] + c];
    }
    memset(row, 0, padded * sizeof(uint16_t));
    if (params->source == 1) {
      ops.rmsnorm(row, out.dtype, from, x.dtype, reinterpret_cast<const void*>(norm->addr), norm->dtype, params->eps, values, k);
    } else if (params->source == 2) {
      ops.silu_mul(row, from, from + k * mpk::element_bytes(x.dtype), out.dtype, values, k);
    } else {
      ops.to_f32(values, from, x.dtype, k);
      ops.from_f32(row, out.dtype, values, k);
    }
    uint16_t* const to = reinterpret_cast<uint16_t*>(out.addr);
    for (uint32_t column = 0; column < padded; ++column)
      to[static_cast<uint64_t>(column / width) * out.strides[1] + r * width +
         mpk::wide_place((first + r) % MPK_WIDE_ROWS, column % width, width)] = row[column];
  }
}

extern "C" int mpk_task_wide_rows(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_wide_rows_params*>(args->params);
  mpk::wide_rows(args, params, args->task->args, args->inputs[0], args->inputs + 1, args->outputs[0]);
  return MPK_OK;
}
