// SPDX-License-Identifier: Apache-2.0
// SM100/SM103 split-KV decode over a paged qk4pv8 cache, operands swapped: keys are the rows of the
// score MMA and the packed (query token, head) pairs its columns. docs/kernels/sm100_decode.md.
#pragma once

#include "mpfa/ptx/pdl.cuh"
#include "mpfa/sm100/decode/channels.cuh"
#include "mpfa/sm100/decode/epilogue.cuh"
#include "mpfa/sm100/decode/load.cuh"
#include "mpfa/sm100/decode/mma.cuh"

namespace mpfa::sm100::decode {

#if MPFA_HAS_TCGEN05

template <int D>
__device__ __forceinline__ void init_barriers(const Context<D>& c) {
  using B = Barriers<D>;
  ptx::mbarrier_init(c.bar(kQueryFull), kSoftmaxThreads);
  ptx::mbarrier_init(c.bar(kOutFull), 1);
  ptx::mbarrier_init(c.bar(kProbsFull), kSoftmaxThreads);
  for (uint32_t i = 0; i < 2; ++i) ptx::mbarrier_init(c.bar(kScoresFull + i), 1);
  for (uint32_t i = 0; i < B::kStages; ++i) {
    ptx::mbarrier_init(c.bar(kKeysFull + i), 1);
    ptx::mbarrier_init(c.bar(B::kKeysEmpty + i), 1 + kSoftmaxWarps);
    ptx::mbarrier_init(c.bar(B::kValuesFull + i), 1);
    ptx::mbarrier_init(c.bar(B::kValuesEmpty + i), 1);
    ptx::mbarrier_init(c.bar(B::kChannelsFull + i), kChannelThreads);
  }
  ptx::fence_mbarrier_init();
}

// What the tensor instructions read beyond the columns of a tile: rows 64..127 of the query's scale
// atoms, and P^T up to the next multiple of 16 columns.
template <int D>
__device__ __forceinline__ void clear_padding(const Context<D>& c) {
  for (uint32_t i = threadIdx.x * 16; i < Config<D>::kBytesP; i += kThreads * 16) {
    ptx::st_shared_v4(c.smem + Smem<D>::kP + i, make_uint4(0, 0, 0, 0));
  }
  for (uint32_t i = threadIdx.x * 16; i < Config<D>::kBytesScale; i += kThreads * 16) {
    ptx::st_shared_v4(c.smem + Smem<D>::kScaleQ + i, make_uint4(0, 0, 0, 0));
  }
  ptx::fence_proxy_async_shared();
}

// With M = 64 half of the lanes of O^T are never written, but loaded and rescaled with the others.
template <int D>
__device__ __forceinline__ void clear_out(const Context<D>& c, int32_t warp) {
  if (D == 128 || warp >= kSoftmaxWarps) return;
  const uint32_t zero[16] = {};
  for (uint32_t first = 0; first < kMaxColumns; first += 16) {
    ptx::tmem_st_x16(c.tmem + kTmemOut + first + (static_cast<uint32_t>(warp) * 32u << 16), zero);
  }
  ptx::tmem_wait_st();
}

// Barriers, Tensor Memory and zeroed padding; on return every thread may use them.
template <int D>
__device__ __forceinline__ void start_kernel(Context<D>& c, int32_t warp, uint32_t tmem_columns) {
  const uint32_t tmem_slot = c.smem + Smem<D>::kTmemAddress;
  if (c.smem % 1024 != 0) __trap();  // the swizzle patterns would be off
  if (warp == kLoadWarp && ptx::elect_one()) {
    init_barriers(c);
    ptx::prefetch_tensor_map(&c.p.map_k);
    ptx::prefetch_tensor_map(&c.p.map_v);
  }
  if (warp == kMmaWarp) {
    ptx::tmem_alloc(tmem_slot, tmem_columns);
    ptx::tmem_relinquish();
  }
  clear_padding(c);
  ptx::tmem_fence_before_sync();
  __syncthreads();
  ptx::tmem_fence_after_sync();
  c.tmem = ptx::ld_shared_u32(tmem_slot);
}

template <int D>
__device__ __forceinline__ void end_kernel(const Context<D>& c, int32_t warp,
                                           uint32_t tmem_columns) {
  __syncwarp();
  ptx::tmem_fence_before_sync();
  __syncthreads();
  ptx::tmem_fence_after_sync();
  if (warp == kMmaWarp) ptx::tmem_dealloc(c.tmem, tmem_columns);
}

#endif  // MPFA_HAS_TCGEN05

template <int D>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    sm100_decode(const __grid_constant__ Params p) {
#if MPFA_HAS_TCGEN05
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Context<D> c{p, dynamic, ptx::smem_address(dynamic), 0, static_cast<int32_t>(blockIdx.y)};
  const int32_t warp = ptx::uniform_warp_index();
  start_kernel(c, warp, kTmemColumns);
  clear_out(c, warp);
  ptx::grid_dependency_wait();

  if (warp == kLoadWarp) {
    load_loop(c);
  } else if (warp == kMmaWarp) {
    if (ptx::elect_one()) mma_loop(c);
  } else if (warp >= kChannelWarp) {
    channel_loop(c);
  } else {
    softmax_loop(c);
  }
  ptx::grid_launch_dependents();
  end_kernel(c, warp, kTmemColumns);
#endif
}

}  // namespace mpfa::sm100::decode
