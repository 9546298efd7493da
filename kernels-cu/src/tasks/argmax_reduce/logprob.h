/* A log-probability, with one source for both targets and for all tasks that compute one. */
#ifndef MPK_TASK_ARGMAX_REDUCE_LOGPROB_H
#define MPK_TASK_ARGMAX_REDUCE_LOGPROB_H

#include <math.h>

#ifdef __CUDACC__
#define MPK_LOGPROB_FN __device__ __forceinline__
#else
#define MPK_LOGPROB_FN static inline
#endif

namespace mpk {

/* Of a token with logit `value`. `log_sum` is the logarithm of the sum of exp(x - maximum) over all logits x. */
MPK_LOGPROB_FN float logprob_of(float value, float maximum, double log_sum) {
  if (value == -INFINITY) return -INFINITY;
  /* The difference of two infinities is not a number. */
  const double below = value == maximum ? 0.0 : static_cast<double>(value) - static_cast<double>(maximum);
  return static_cast<float>(below - log_sum);
}

}  // namespace mpk

#endif
