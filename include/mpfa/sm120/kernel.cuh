// SPDX-License-Identifier: Apache-2.0
// MXFP8 attention for SM120/SM121, prefill and decode: one persistent CTA per worker and KV head.
// docs/kernels/sm120.md has the timeline, the barrier ledger and the maps.
#pragma once

#include "mpfa/ptx/setmaxnreg.cuh"
#include "mpfa/sm120/load.cuh"
#include "mpfa/sm120/mma.cuh"

namespace mpfa::sm120 {

#if defined(__CUDACC__)

template <class C>
__device__ __forceinline__ void init_barriers(SharedMemory<C>& shared) {
  for (int i = 0; i < C::kStages; ++i) {
    ptx::mbarrier_init(ptx::smem_address(&shared.full[i]), 1);              // producer lane
    ptx::mbarrier_init(ptx::smem_address(&shared.empty[i]), C::kMmaWarps);  // a lane per MMA warp
  }
  ptx::mbarrier_init(ptx::smem_address(&shared.tail), 1);  // producer lane
  ptx::fence_mbarrier_init();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm120_prefill(const __grid_constant__ Params params) {
// Arch- and family-specific targets only: plain sm_120 has no block-scaled MMA.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM121_ALL)
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedMemory<C>& shared = *reinterpret_cast<SharedMemory<C>*>(shared_bytes);
  const int warp = ptx::uniform_warp_index(), lane = threadIdx.x % 32;
  const int kv_head = blockIdx.y;
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (warp >= C::kMmaWarps) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    if (warp > C::kMmaWarps) return;
    Producer<C>{params, shared, lane, kv_head}.run();
  } else {
    ptx::setmaxnreg_inc<C::kMmaRegisters>();
    MmaWarp<C>{params, shared, warp, lane, kv_head}.run();
  }
#endif
}

#endif  // __CUDACC__

}  // namespace mpfa::sm120
