// SPDX-License-Identifier: Apache-2.0
// Address arithmetic. PTX ISA, "Integer Arithmetic Instructions: mad".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// base + count * stride, a 32 x 32 bit product, as one instruction. Written in C, ptxas multiplies
// 64 by 64 bits.
template <class T>
__device__ __forceinline__ T* advance(T* base, uint32_t count, uint32_t stride) {
  uint64_t p;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(p)
      : "r"(count), "r"(stride), "l"(reinterpret_cast<uint64_t>(base)));
  return reinterpret_cast<T*>(p);
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
