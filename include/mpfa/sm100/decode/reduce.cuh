// SPDX-License-Identifier: Apache-2.0
// Reductions over the 32 lanes of a warp for several columns at once.
#pragma once

#include <cstdint>

namespace mpfa::sm100::decode {

struct Max {
  __device__ static float apply(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
  __device__ static float apply(float a, float b) { return a + b; }
};

// Lanes that hold the same column after a reduction of N columns.
template <int N>
constexpr int kLanesPerColumn = 32 / N;

// v[i] is this lane's value of column i; returns the reduction of column lane / kLanesPerColumn<N>.
// Each of the first steps halves the columns that a lane holds and sends the other half to its
// partner: 16 shuffles for 16 columns instead of 80.
template <class Op, int N>
__device__ __forceinline__ float reduce_columns(const float (&v)[N], int32_t lane) {
  float held[N];
#pragma unroll
  for (int i = 0; i < N; ++i) held[i] = v[i];
#pragma unroll
  for (int width = N / 2; width >= 1; width /= 2) {
    const int bit = width * kLanesPerColumn<N>;
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float sent = upper ? held[i] : held[i + width];
      const float kept = upper ? held[i + width] : held[i];
      held[i] = Op::apply(kept, __shfl_xor_sync(0xffffffffu, sent, bit));
    }
  }
#pragma unroll
  for (int bit = kLanesPerColumn<N> / 2; bit >= 1; bit /= 2) {
    held[0] = Op::apply(held[0], __shfl_xor_sync(0xffffffffu, held[0], bit));
  }
  return held[0];
}

}  // namespace mpfa::sm100::decode
