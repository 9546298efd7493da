// Writes the rows in use of a view into the same view of a peer, or into the rank's own memory. The worker loop sends
// the signal afterwards.
#include <cstring>

#include "cpu/task.h"
#include "platform/platform.h"
#include "tasks/nvshmem_copy/params.h"

namespace {

// The output is in the rank's own memory, which need not be symmetric.
constexpr int32_t OWN = -1;

void copy_rows(uint8_t* to, uint64_t to_stride, const uint8_t* from, uint64_t from_stride, uint32_t rows, uint64_t bytes) {
  for (uint32_t row = 0; row < rows; ++row) memcpy(to + row * to_stride, from + row * from_stride, bytes);
}

} // namespace

extern "C" int mpk_task_nvshmem_copy(const mpk_kernel_args* args) {
  const auto& params = *reinterpret_cast<const mpk_nvshmem_copy_params*>(args->params);
  const mpk_operand &from = args->inputs[0], &to = args->outputs[0];
  const bool own = to.pe == OWN;
  if ((!own && (to.pe < 0 || static_cast<uint32_t>(to.pe) >= args->rank->world)) || from.ndim != to.ndim || from.ndim == 0 ||
      from.dtype != to.dtype)
    return MPK_ABORT_KERNEL;
  const uint64_t bytes = mpk::element_bytes(from.dtype);
  const uint32_t columns = from.dims[from.ndim - 1];
  const uint32_t capacity = from.ndim >= 2 ? from.dims[from.ndim - 2] : 1;
  const uint32_t rows = from.ndim >= 2 ? mpk::rows_in_use_from(args, params.rows_kind, static_cast<uint32_t>(args->task->args[0]), capacity) : 1;
  const uint64_t from_stride = from.ndim >= 2 ? from.strides[from.ndim - 2] * bytes : columns * bytes;
  const uint64_t to_stride = to.ndim >= 2 ? to.strides[to.ndim - 2] * bytes : columns * bytes;
  const uint32_t outer0 = from.ndim >= 3 ? from.dims[0] : 1, outer1 = from.ndim == 4 ? from.dims[1] : 1;
  for (uint32_t i = 0; i < outer0; ++i) {
    for (uint32_t j = 0; j < outer1; ++j) {
      const auto at = [&](const mpk_operand& view) {
        uint64_t elements = view.ndim >= 3 ? uint64_t{i} * view.strides[0] : 0;
        if (view.ndim == 4) elements += uint64_t{j} * view.strides[1];
        return reinterpret_cast<uint8_t*>(view.addr) + elements * bytes;
      };
      if (own)
        copy_rows(at(to), to_stride, at(from), from_stride, rows, columns * bytes);
      else if (!mpk::platform::put_rows(args->rank, static_cast<uint32_t>(to.pe), at(to), to_stride, at(from), from_stride,
                                   rows, columns * bytes))
        return MPK_ABORT_PEER;
    }
  }
  return MPK_OK;
}
