// SPDX-License-Identifier: Apache-2.0
// A value that the compiler does not know how to compute again.
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// x, kept in a register instead of being computed anew where it is used.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
