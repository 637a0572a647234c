// SPDX-License-Identifier: Apache-2.0
// Approximate reciprocal. PTX ISA, "Floating Point Instructions: rcp".
#pragma once

namespace mpfa::ptx {

#if defined(__CUDACC__)

// 1/x within 1 ulp; subnormals count as zero.
__device__ __forceinline__ float rcp_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
