// SPDX-License-Identifier: Apache-2.0
// Bulk and tensor copies (TMA, sm_90). PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
//
// One thread issues a copy (elect_one). A load completes on an mbarrier by bytes; a store belongs
// to the issuing thread's bulk groups. Tensor maps are passed by address: a __grid_constant__
// parameter or global memory, 64-byte aligned.
#pragma once

#include <cstdint>

// why: on sm_120 the shared::cluster form makes ptxas add an address check and a call, and there
// are no clusters worth using; sm_90 and sm_100 kernels are written for the cluster form.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define MPFA_TMA_DST "shared::cta"
#else
#define MPFA_TMA_DST "shared::cluster"
#endif

namespace mpfa::ptx {

#if defined(__CUDACC__)

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 1-D copy; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile("cp.async.bulk." MPFA_TMA_DST
               ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

// Box of a tensor map at coordinates c0 (innermost) .. c3; elements outside the tensor read as
// zero.
__device__ __forceinline__ void tensor_load_4d(uint32_t dst, const void* map, uint32_t bar,
                                               int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d." MPFA_TMA_DST
      ".global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Stores from shared memory: fence_proxy_async_shared() first, then commit and wait by the issuing
// thread.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most N groups have still to read their source: shared memory may be written again.
template <int N>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
