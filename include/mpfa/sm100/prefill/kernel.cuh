// SPDX-License-Identifier: Apache-2.0
// QK4PV8 attention for SM100 and SM103, prefill (paper sections 4 and 5): NVFP4 QK^T on top of a
// bf16 product that restores what centring and outlier channels took out, FP8 PV.
//
//   load (2 warps) -> shared memory -> MMA (1 thread) -> S in Tensor Memory -> softmax (2 x 4
//   warps)
//     -> P in Tensor Memory -> MMA -> O in Tensor Memory -> correction (4 warps) -> shared memory
//     -> epilogue (1 warp)
//
// A tile is two query stages of 128 rows over the same keys, so that one stage's softmax runs
// beside the other's products. Timeline, Tensor Memory map, barrier ledger and hazards:
// docs/kernels/sm100_prefill.md.
#pragma once

#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/setmaxnreg.cuh"
#include "mpfa/sm100/prefill/config.h"
#include "mpfa/sm100/prefill/correction.cuh"
#include "mpfa/sm100/prefill/load.cuh"
#include "mpfa/sm100/prefill/mma.cuh"
#include "mpfa/sm100/prefill/softmax.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__)

#if MPFA_HAS_TCGEN05

template <class C>
__device__ __forceinline__ void init_barriers(const Context<C>& ctx) {
  using L = SharedLayout<C>;
  for (int i = 0; i < kRingSlots; ++i) {
    ptx::mbarrier_init(ctx.bar(L::full, i), Arrivals::full);
    ptx::mbarrier_init(ctx.bar(L::empty, i), Arrivals::empty_of(i));
  }
  for (int r = 0; r < kStages; ++r) {
    ptx::mbarrier_init(ctx.bar(L::q_full, r), Arrivals::q_full);
    ptx::mbarrier_init(ctx.bar(L::q_empty, r), Arrivals::q_empty);
    ptx::mbarrier_init(ctx.bar(L::s_full, r), Arrivals::s_full);
    ptx::mbarrier_init(ctx.bar(L::s_loaded, r), Arrivals::s_loaded);
    ptx::mbarrier_init(ctx.bar(L::p_ready, r), Arrivals::p_ready);
    ptx::mbarrier_init(ctx.bar(L::p_last, r), Arrivals::p_last);
    ptx::mbarrier_init(ctx.bar(L::rescale_full, r), Arrivals::rescale);
    ptx::mbarrier_init(ctx.bar(L::final_full, r), Arrivals::final_stats);
    ptx::mbarrier_init(ctx.bar(L::final_read, r), Arrivals::final_read);
    ptx::mbarrier_init(ctx.bar(L::o_full, r), Arrivals::o_full);
  }
  ptx::mbarrier_init(ctx.bar(L::out_full), Arrivals::out_full);
  ptx::mbarrier_init(ctx.bar(L::out_empty), Arrivals::out_empty);
  ptx::mbarrier_init(ctx.bar(L::paranoid), 1);
  ptx::fence_mbarrier_init();
}

template <class C>
__device__ __forceinline__ void run_block(const PrefillParams& p, uint8_t* shared) {
  using L = SharedLayout<C>;
  const int warp = ptx::uniform_warp_index();
  const uint32_t base = round_up<uint32_t>(ptx::smem_address(shared), L::kAlignment);
  Context<C> ctx = {p.attention, p.k_map, p.v_map, base, 0, static_cast<int32_t>(blockIdx.y)};
  if (warp == kMmaWarp) {
    ptx::tmem_alloc(ctx.at(L::tmem_address), kTmemColumns);
    ptx::tmem_relinquish();
    if (ptx::elect_one()) init_barriers(ctx);
  }
  ptx::tmem_fence_before_sync();
  __syncthreads();
  ptx::tmem_fence_after_sync();
  ctx.tmem = ptx::ld_shared_u32(ctx.at(L::tmem_address));

  if (warp < kCorrectionFirstWarp) {
    ptx::setmaxnreg_inc<kSoftmaxRegisters>();
    SoftmaxRole<C>(ctx, warp / kSoftmaxWarps).run();
  } else if (warp < kMmaWarp) {
    ptx::setmaxnreg_dec<kCorrectionRegisters>();
    CorrectionRole<C>(ctx).run();
  } else {
    ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp == kMmaWarp) {
      if (ptx::elect_one()) MmaRole<C>(ctx).run();
      __syncwarp();
    } else if (warp == kEpilogueWarp) {
      epilogue_role(ctx);
    } else {
      LoadRole<C>(ctx).run();
    }
  }

  // Every tcgen05 operation has been waited for: O by the correction warps, S and P before it.
  ptx::tmem_fence_before_sync();
  __syncthreads();
  if (warp == kMmaWarp) {
    ptx::tmem_fence_after_sync();
    ptx::tmem_dealloc(ctx.tmem, kTmemColumns);
  }
}

#endif

// Grid (workers, KV heads). Shared memory: dynamic_shared_bytes.
template <int HeadDim, Pv kPv = Pv::kE4m3>
__global__ void __launch_bounds__(kThreads, 1)
    mpfa_sm100_prefill(const __grid_constant__ PrefillParams params) {
#if MPFA_HAS_TCGEN05
  extern __shared__ uint8_t shared[];
  run_block<Config<HeadDim, kPv>>(params, shared);
#endif
}

template <int HeadDim, Pv kPv = Pv::kE4m3>
constexpr int dynamic_shared_bytes =
    SharedLayout<Config<HeadDim, kPv>>::bytes + SharedLayout<Config<HeadDim, kPv>>::kAlignment;

#endif

}  // namespace mpfa::sm100::prefill
