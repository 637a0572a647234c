// SPDX-License-Identifier: Apache-2.0
// A sink joins a finished row as one more key without a value.
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"

namespace mpfa {

#if defined(__CUDACC__)

struct SinkResult {
  float lse;   // base 2, with the sink
  float keep;  // factor on the row's output
};

// `lse` base 2, -inf = no key; `sink` a natural-log logit, -inf = none. A NaN on either side
// reaches both results: fmaxf alone would drop it.
__device__ __forceinline__ SinkResult join_sink(float lse, float sink) {
  const float other = __fmul_rn(sink, kLog2e);
  if (lse == -INFINITY && other == -INFINITY) return {-INFINITY, 0.0f};
  const float both = fmaxf(lse, other) + log2f(1.0f + exp2f(-fabsf(lse - other)));
  return {both, exp2f(lse - both)};
}

#endif  // __CUDACC__

}  // namespace mpfa
