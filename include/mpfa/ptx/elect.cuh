// SPDX-License-Identifier: Apache-2.0
// One lane of a converged warp. PTX ISA, "elect.sync" (sm_90).
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// True in one lane, always the same one while all 32 lanes take part.
// why: around TMA and commit instructions; a plain `lane == 0` makes ptxas emit its own elect loop.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// The warp's index as a value that the compiler knows to be uniform.
__device__ __forceinline__ int uniform_warp_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
