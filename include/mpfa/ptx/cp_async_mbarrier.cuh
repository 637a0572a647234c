// SPDX-License-Identifier: Apache-2.0
// Non-bulk asynchronous copies that complete on an mbarrier. PTX ISA, "cp.async.mbarrier.arrive".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// This thread arrives once all its earlier cp.async have landed. The arrival is one of those that
// mbarrier_init counted (.noinc).
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
