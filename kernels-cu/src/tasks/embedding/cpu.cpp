#include "cpu/ops.h"
#include "cpu/push.h"
#include "tasks/embedding/params.h"

namespace {

// Columns [first, first + n) of a row of a tiled table, as they are stored.
template <class Element>
void gather(Element* out, const mpk_operand& table, uint64_t row, uint32_t first, uint32_t n) {
  const Element* tile = reinterpret_cast<const Element*>(table.addr) + row / 16 * 16 * table.strides[0];
  const uint64_t lane = row % 16;
  if (table.dtype == MPK_BF16) {
    for (uint64_t i = first; i < uint64_t{first} + n; ++i) out[i - first] = tile[(i / 2 * 16 + lane) * 2 + i % 2];
  } else {
    for (uint64_t i = first; i < uint64_t{first} + n; ++i) out[i - first] = tile[i * 16 + lane];
  }
}

} // namespace

extern "C" int mpk_task_embedding(const mpk_kernel_args* args) {
  const auto* params = reinterpret_cast<const mpk_embedding_params*>(args->params);
  const mpk_operand& table = args->inputs[0];
  const mpk_operand& out = args->outputs[0];
  const mpk::VectorOps& ops = mpk::vector_ops();
  const uint32_t rows = mpk::rows_in_use(args, mpk::ROWS_TOKENS, out.dims[0]);
  const uint32_t first_column = static_cast<uint32_t>(args->task->args[0]);
  constexpr uint32_t BLOCK = 256;
  for (uint32_t row = 0; row < rows; ++row) {
    // for a token of another rank, or no token, this rank adds 0
    const int64_t token = int64_t{args->batch->row_token[row]} - params->first_token;
    const bool here = token >= 0 && token < params->num_tokens;
    for (uint32_t column = 0; column < out.dims[1]; column += BLOCK) {
      const uint32_t n = out.dims[1] - column < BLOCK ? out.dims[1] - column : BLOCK;
      float values[BLOCK] = {};
      if (here && table.dtype == MPK_F32) {
        gather(values, table, static_cast<uint64_t>(token), first_column + column, n);
      } else if (here) {
        uint16_t stored[BLOCK];
        gather(stored, table, static_cast<uint64_t>(token), first_column + column, n);
        ops.to_f32(values, stored, table.dtype, n);
      }
      uint8_t* at = mpk::row_address(out, row) + column * mpk::element_bytes(out.dtype);
      if (out.dtype != MPK_F32_FLAGGED)
        ops.from_f32(at, out.dtype, values, n);
      else if (!mpk::push_flagged(args, reinterpret_cast<uint64_t>(at), values, n))
        return MPK_ABORT_PEER;
    }
  }
  return MPK_OK;
}
