// SPDX-License-Identifier: Apache-2.0
// Non-bulk asynchronous copies from global to shared memory (sm_80). They are accesses of the
// generic proxy: a reader needs the mbarrier or wait_group, no proxy fence.
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Bytes is 4, 8 or 16, both addresses aligned to it.
template <int Bytes>
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "sizes of cp.async");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(Bytes)
                 : "memory");
  }
}

// Reads only the first `valid` (0..Bytes) bytes and writes zeros for the rest. With 0 nothing is
// read, but `src` must still be an address that global memory has.
template <int Bytes>
__device__ __forceinline__ void cp_async_zfill(uint32_t dst, const void* src, uint32_t valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "sizes of cp.async");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(Bytes),
                 "r"(valid)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// At most N of this thread's groups are still in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
