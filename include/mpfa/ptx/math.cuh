// SPDX-License-Identifier: Apache-2.0
// Approximate fp32 functions. PTX ISA, "ex2", "lg2", "rcp", "fma".
#pragma once

namespace mpfa::ptx {

#if defined(__CUDACC__)

// 2^x within 2 ulp; subnormal results are flushed to 0. ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// log2 x, absolute error below 2^-22; lg2(0) = -inf.
__device__ __forceinline__ float lg2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1/x within 1 ulp; subnormals count as zero.
__device__ __forceinline__ float rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// a * b + c in one rounding, clamped to [0, 1]; NaN becomes 0.
__device__ __forceinline__ float fma_sat(float a, float b, float c) {
  float r;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
