// SPDX-License-Identifier: Apache-2.0
// The MMA role: one thread issues every tcgen05.cp, tcgen05.mma and tcgen05.commit of the block.
#pragma once

#include <cstdint>

#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

#if !defined(MPFA_PARANOID_MMA)
#define MPFA_PARANOID_MMA 0
#endif

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__) && MPFA_HAS_TCGEN05

template <class C>
class MmaRole {
  using Layout = SharedLayout<C>;

  static constexpr ptx::Swizzle kQkSwizzle =
      C::kQkRowBytes == 64 ? ptx::Swizzle::k64B : ptx::Swizzle::k32B;
  static constexpr ptx::Swizzle kVSwizzle =
      C::kVPanelBytes == 128 ? ptx::Swizzle::k128B : ptx::Swizzle::k64B;
  // Q, K and V^T: K-major, eight rows apart. V: token rows are MN-major, eight tokens apart; the
  // leading dimension steps to the next panel, where one does not hold all of head_dim.
  static constexpr uint32_t kQkHigh = ptx::matrix_desc_high(8 * C::kQkRowBytes, kQkSwizzle);
  static constexpr uint32_t kVHigh = ptx::matrix_desc_high(8 * C::kVPanelBytes, kVSwizzle);
  static constexpr uint32_t kVLbo =
      C::kVRowBytes > C::kVPanelBytes ? C::kVRows * C::kVPanelBytes : 0;
  // Compensation: K-major without swizzle, core matrices of 8 rows x 16 bytes, the two halves of
  // K next to each other.
  static constexpr uint32_t kCompHigh = ptx::matrix_desc_high(256, ptx::Swizzle::kNone);
  static constexpr uint32_t kCompLbo = 128;

  static constexpr uint32_t kQkIdesc = ptx::idesc_nvfp4(kKvBlock);
  static constexpr uint32_t kCompIdesc =
      ptx::idesc_f16(ptx::F16Kind::kBf16, kStageRows, kKvBlock, false, false);
  static constexpr uint32_t kPvIdesc =
      C::kPv == Pv::kE4m3 ? ptx::idesc_f8f6f4(ptx::F8Kind::kE4m3, ptx::F8Kind::kE4m3, kStageRows,
                                              C::kHeadDim, false, true)
      : C::kPv == Pv::kBf16
          ? ptx::idesc_f16(ptx::F16Kind::kBf16, kStageRows, C::kHeadDim, false, true)
          : ptx::idesc_nvfp4(C::kHeadDim);
  static constexpr int kPvSteps = kKvBlock / C::P::kStepTokens;
  static constexpr int kPvEarlySteps = C::P::kEarlyTokens / C::P::kStepTokens;

 public:
  __device__ __forceinline__ explicit MmaRole(const Context<C>& ctx)
      : ctx_(ctx), compensated_(!kElementwiseDelta && ctx.params.a_comp.data != nullptr) {}

  __device__ __forceinline__ void run() {
    TileWalk walk(ctx_.params);
    Tile tile;
    while (walk.next(&tile)) run_tile(tile);
  }

 private:
  // Step j: PV of block j - 1, then QK of block j, each for both stages.
  // why: QK of stage r follows PV of stage r, which is the last reader of P_r inside S_r; the
  // tensor pipe is in order, so no wait lies between them.
  __device__ __forceinline__ void run_tile(const Tile& tile) {
    const int32_t n = tile.blocks;
    const uint32_t first = ring_;
#pragma unroll 1
    for (int32_t j = 0; n > 0 && j <= n; ++j) {
      const uint32_t k_at = first + C::kBlockSlots * j, v_at = k_at - C::P::kVUnits;
#pragma unroll
      for (int r = 0; r < kStages; ++r) {
        if (r >= tile.stages) break;
        const bool last_stage = r + 1 == tile.stages;
        if (j > 0) {
          for (int u = 0; r == 0 && u < C::P::kVUnits; ++u) wait_full(v_at + u);
          p_ready_.wait(ctx_.bar(Layout::p_ready, r), r);
          ptx::tmem_fence_after_sync();
          issue_pv(r, v_at, j > 1);
          if (j == n) commit(ctx_.bar(Layout::o_full, r));
          for (int u = 0; last_stage && u < C::P::kVUnits; ++u) {
            commit(ctx_.bar(Layout::empty, (v_at + u) % kRingSlots));
          }
        }
        if (j < n) {
          if (j == 0) q_full_.wait(ctx_.bar(Layout::q_full, r), r);
          if (r == 0) wait_full(k_at);
          if constexpr (C::kBorrowedScales) {
            // Every S tile issued so far for the other stage is in registers.
            ptx::mbarrier_wait(ctx_.bar(Layout::s_loaded, 1 - r), (s_issued_[1 - r] - 1) & 1);
            ptx::tmem_fence_after_sync();
          }
          issue_qk(r, k_at);
          ++s_issued_[r];
          commit(ctx_.bar(Layout::s_full, r));
          if (last_stage) commit(ctx_.bar(Layout::empty, k_at % kRingSlots));
          if (j + 1 == n) commit(ctx_.bar(Layout::q_empty, r));
        }
      }
    }
    ring_ = first + C::kBlockSlots * n;
  }

  __device__ __forceinline__ void wait_full(uint32_t position) {
    ptx::mbarrier_wait(ctx_.bar(Layout::full, position % kRingSlots), (position / kRingSlots) & 1);
  }

  __device__ __forceinline__ uint32_t slot(uint32_t position) const {
    return ctx_.at(Layout::ring) + position % kRingSlots * C::kSlotBytes;
  }

  // S_r = A_comp B_comp^T + Q K^T, the scales first.
  __device__ __forceinline__ void issue_qk(int r, uint32_t k_at) {
    const uint32_t k = slot(k_at);
    const uint32_t q = ctx_.at(Layout::q) + r * C::kQkBytes;
    const uint32_t q_scale = ctx_.at(Layout::q_scale) + r * C::kScaleBytes;
    const uint32_t scale_q = ctx_.tmem + C::tmem_scale_q(r);
    const uint32_t scale_k = ctx_.tmem + C::tmem_scale_k(r);
    const uint32_t s = ctx_.tmem + C::tmem_s(r);
#pragma unroll
    for (int a = 0; a < C::kScaleAtoms; ++a) {
      ptx::tcgen05_cp_scale_atom(scale_q + 4 * a, ptx::scale_atom_desc(q_scale + 512 * a));
      ptx::tcgen05_cp_scale_atom(scale_k + 4 * a,
                                 ptx::scale_atom_desc(k + C::kSlotScale + 512 * a));
    }
    paranoid();
    if (compensated_) {
      const uint32_t a = ctx_.at(Layout::a_comp) + r * C::kCompBytes;
      ptx::mma_f16_ss(s, comp_desc(a), comp_desc(k + C::kSlotComp), kCompIdesc, false);
      paranoid();
    }
#pragma unroll
    for (int a = 0; a < C::kScaleAtoms; ++a) {
      ptx::mma_nvfp4_ss(s, ptx::matrix_desc(ptx::matrix_desc_low(q + 32 * a, 0), kQkHigh),
                        ptx::matrix_desc(ptx::matrix_desc_low(k + 32 * a, 0), kQkHigh), kQkIdesc,
                        scale_q + 4 * a, scale_k + 4 * a, a > 0 || compensated_);
    }
    paranoid();
  }

  __device__ __forceinline__ static uint64_t comp_desc(uint32_t address) {
    return ptx::matrix_desc(ptx::matrix_desc_low(address, kCompLbo), kCompHigh);
  }

  // O_r (+)= P_r V. The end of P may still be on its way when the first steps start.
  __device__ __forceinline__ void issue_pv(int r, uint32_t v_at, bool accumulate) {
    if constexpr (C::kVTransposed) {
      // invariant: p_ready says that S_r is in registers, so the scales may lie in it.
      copy_pv_scales(r, slot(v_at) + C::kSlotVScale, C::kTmemVScaleOffset, 0, C::kPvScaleAtoms);
      copy_pv_scales(r, p_scale(r), C::kTmemPScaleOffset, 0, 1);
    }
#pragma unroll
    for (int i = 0; i < kPvSteps; ++i) {
      if (i == kPvEarlySteps) {
        p_last_.wait(ctx_.bar(Layout::p_last, r), r);
        ptx::tmem_fence_after_sync();
        if constexpr (C::kVTransposed) copy_pv_scales(r, p_scale(r), C::kTmemPScaleOffset, 1, 2);
      }
      issue_pv_step(r, v_at, i, i > 0 || accumulate);
    }
    paranoid();
  }

  __device__ __forceinline__ void issue_pv_step(int r, uint32_t v_at, int i, bool accumulate) {
    const uint32_t o = ctx_.tmem + C::tmem_o(r);
    const uint32_t p = ctx_.tmem + C::tmem_p(r) + C::P::kStepTokens * C::P::kBits / 32 * i;
    if constexpr (C::kVTransposed) {
      const uint32_t v = slot(v_at) + C::P::kStepTokens * C::P::kBits / 8 * i;
      const uint32_t scales = ctx_.tmem + C::tmem_s(r) + 4 * i;
      ptx::mma_nvfp4_ts(o, p, ptx::matrix_desc(ptx::matrix_desc_low(v, 0), kVHigh), kPvIdesc,
                        scales + C::kTmemPScaleOffset, scales + C::kTmemVScaleOffset, accumulate);
    } else {
      constexpr int kUnitSteps = kPvSteps / C::P::kVUnits;
      const uint32_t v =
          slot(v_at + i / kUnitSteps) + C::P::kStepTokens * C::kVPanelBytes * (i % kUnitSteps);
      const uint64_t desc = ptx::matrix_desc(ptx::matrix_desc_low(v, kVLbo), kVHigh);
      if constexpr (C::kPv == Pv::kBf16) {
        ptx::mma_f16_ts(o, p, desc, kPvIdesc, accumulate);
      } else {
        ptx::mma_f8f6f4_ts(o, p, desc, kPvIdesc, accumulate);
      }
    }
  }

  __device__ __forceinline__ uint32_t p_scale(int r) const {
    return ctx_.at(Layout::p_scale) + r * C::kPvScaleBytes;
  }

  // Scale atoms [first, last) of P or V to columns of S_r.
  __device__ __forceinline__ void copy_pv_scales(int r, uint32_t from, int column, int first,
                                                 int last) {
#pragma unroll
    for (int a = first; a < last; ++a) {
      ptx::tcgen05_cp_scale_atom(ctx_.tmem + C::tmem_s(r) + column + 4 * a,
                                 ptx::scale_atom_desc(from + 512 * a));
    }
    paranoid();
  }

  __device__ __forceinline__ void commit(uint32_t bar) { ptx::tcgen05_commit(bar); }

  // Debug build: nothing is in flight when the next group is issued, so no order of the tensor
  // pipe is relied on.
  __device__ __forceinline__ void paranoid() {
    if constexpr (MPFA_PARANOID_MMA != 0) {
      const uint32_t bar = ctx_.bar(Layout::paranoid);
      ptx::tcgen05_commit(bar);
      paranoid_.wait(bar, 0);
      ptx::tmem_fence_after_sync();
    }
  }

  const Context<C>& ctx_;
  const bool compensated_;
  uint32_t ring_ = 0;
  uint32_t s_issued_[kStages] = {0, 0};
  PhaseCounters p_ready_, p_last_, q_full_, paranoid_;
};

#endif

}  // namespace mpfa::sm100::prefill
