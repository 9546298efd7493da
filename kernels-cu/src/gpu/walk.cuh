/* How the compute threads divide a tile. */
#pragma once

#include "gpu/config.cuh"
#include "gpu/numbers.cuh"

namespace mpk {
namespace gpu {

/* A thread's pieces of `rows` rows with `pieces` pieces each: every kComputeThreads-th piece, row by row, without a
 * division per piece. */
class Walk {
 public:
  uint32_t row = 0, at; /* until row == rows or more */

  __device__ __forceinline__ Walk(uint32_t thread, uint32_t rows, uint32_t pieces) : at(thread), pieces_(pieces), step_(kComputeThreads) {
    if (pieces >= kComputeThreads) return;
    if (rows == 1 || pieces == 0) { /* no division */
      row = thread >= pieces ? rows : 0;
      step_rows_ = 1;
      return;
    }
    row = quotient(thread, pieces);
    at = thread - row * pieces;
    step_rows_ = quotient(kComputeThreads, pieces);
    step_ = kComputeThreads - step_rows_ * pieces;
  }
  __device__ __forceinline__ void next() {
    row += step_rows_;
    at += step_;
    if (at < pieces_) return;
    at -= pieces_;
    ++row;
  }

 private:
  uint32_t pieces_, step_, step_rows_ = 0;
};

}  // namespace gpu
}  // namespace mpk
