// SPDX-License-Identifier: Apache-2.0
// Fences and named barriers. PTX ISA, "membar / fence" and "bar".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Orders this thread's mbarrier.init before later operations of the cluster and of the async proxy;
// the CTA's own threads still need a barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Between generic accesses to shared memory and asynchronous ones (bulk and tensor copies, wgmma,
// tcgen05) that follow: the writing (or reading) thread fences, then signals.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for every state space.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Barrier `id` (1..15; 0 is __syncthreads) of `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
