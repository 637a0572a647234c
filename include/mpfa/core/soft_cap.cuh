// SPDX-License-Identifier: Apache-2.0
// Logits soft cap, shared by the attention kernels.
#pragma once

#include "mpfa/ptx/math.cuh"

namespace mpfa {

#if defined(__CUDACC__)

// tanh x within 2^-20, relatively, for any x. 1 - 2 / (1 + e^2x) has an absolute error of 2^-22:
// nothing beside a tanh near 1, but scores far below the cap are made of tanh's low bits. They take
// x + x^3 Q(x^2) instead: minimax for |x| <= 1/2, 1.3 ulp. why not tanh.approx: its 2^-11 would be
// 0.015 in the exponent at cap 30.
__device__ __forceinline__ float tanh_accurate(float x) {
  constexpr float kTwoLog2e = 2.8853900817779268f;
  const float large = 1.0f - 2.0f * ptx::rcp(1.0f + ptx::ex2(kTwoLog2e * x));
  const float t = x * x;
  float q = fmaf(0.017256973311305046f, t, -0.05305294319987297f);
  q = fmaf(q, t, 0.1332598775625229f);
  q = fmaf(q, t, -0.33333149552345276f);
  const float small = fmaf(x * t, q, x);
  return fabsf(x) < 0.5f ? small : large;
}

// cap tanh(s ratio), ratio = sm_scale / cap.
__device__ __forceinline__ float soft_cap(float s, float cap, float ratio) {
  return cap * tanh_accurate(s * ratio);
}

#endif  // __CUDACC__

}  // namespace mpfa
