// SPDX-License-Identifier: Apache-2.0
// mbarrier objects in this CTA's shared memory. PTX ISA, "mbarrier" (sm_90 forms).
//
// All operations are the default .release / .acquire at CTA scope and clobber memory, so that the
// compiler moves no access across them.
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// `count` arrivals end a phase. Follow with fence_mbarrier_init() and a CTA barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// One arrival that also makes the phase wait for `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// True once the phase with this parity has ended; may block for a while. A fresh barrier is in
// phase 0: waiting for parity 1 returns at once.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
