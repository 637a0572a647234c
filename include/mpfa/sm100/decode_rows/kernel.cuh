// SPDX-License-Identifier: Apache-2.0
// The replicated-row decode kernel; docs/kernels/sm100_decode.md compares it with the swapped one.
#pragma once

#include "mpfa/sm100/decode/kernel.cuh"
#include "mpfa/sm100/decode_rows/epilogue.cuh"
#include "mpfa/sm100/decode_rows/mma.cuh"

namespace mpfa::sm100::decode_rows {

#if MPFA_HAS_TCGEN05

// P off the diagonal tiles is 0 for the whole life of the kernel.
__device__ __forceinline__ void clear_probs(const Context& c, int32_t warp) {
  if (warp >= kSoftmaxWarps) return;
  const uint32_t zero[32] = {};
  ptx::tmem_st_x32(c.tmem + kTmemProbs + (static_cast<uint32_t>(warp) * 32u << 16), zero);
  ptx::tmem_wait_st();
}

#endif  // MPFA_HAS_TCGEN05

__global__ void __launch_bounds__(decode::kThreads, 1)
    sm100_decode_rows(const __grid_constant__ Params p) {
#if MPFA_HAS_TCGEN05
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Context c{p, dynamic, ptx::smem_address(dynamic), 0, static_cast<int32_t>(blockIdx.y)};
  const int32_t warp = ptx::uniform_warp_index();
  decode::start_kernel(c, warp, kTmemColumns);
  clear_probs(c, warp);
  ptx::grid_dependency_wait();

  if (warp == decode::kLoadWarp) {
    decode::load_loop(c);
  } else if (warp == decode::kMmaWarp) {
    if (ptx::elect_one()) mma_loop(c);
  } else if (warp >= decode::kChannelWarp) {
    decode::channel_loop(c);
  } else {
    softmax_loop(c);
  }
  ptx::grid_launch_dependents();
  decode::end_kernel(c, warp, kTmemColumns);
#endif
}

}  // namespace mpfa::sm100::decode_rows
