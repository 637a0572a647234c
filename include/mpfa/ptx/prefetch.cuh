// SPDX-License-Identifier: Apache-2.0
// Cache hints without a result. PTX ISA, "prefetch".
#pragma once

namespace mpfa::ptx {

#if defined(__CUDACC__)

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ void prefetch_l1(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
