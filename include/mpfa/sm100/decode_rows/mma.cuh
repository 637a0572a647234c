// SPDX-License-Identifier: Apache-2.0
// Tensor instructions of the replicated-row scheme: S = Q K^T and O += P V, P in Tensor Memory.
#pragma once

#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/decode_rows/config.cuh"

namespace mpfa::sm100::decode_rows {

#if MPFA_HAS_TCGEN05

// The order of issue and the reasons for it are those of decode::MmaLoop.
struct MmaLoop {
  using S = decode::Smem<kDim>;

  const Context& c;
  RingState<C::kStages> keys, values;
  RingState<2> scores;
  uint32_t probs_phase = 0;
  uint32_t query_phase = 0;

  __device__ void issue_scores() {
    ptx::mbarrier_wait(c.bar(decode::kKeysFull + keys.index), keys.phase);
    ptx::tmem_fence_after_sync();
    const uint32_t scale_k = c.tmem + kTmemScaleK + 8 * scores.index;
    const uint64_t atoms = ptx::scale_atom_desc(c.smem + S::kScaleK + keys.index * C::kBytesScale);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::tcgen05_cp_scale_atom(scale_k + 4 * i, ptx::advance(atoms, i * C::kAtomBytes));
    }
    const uint32_t d = c.tmem + kTmemScores + kBlock * scores.index;
    const bool compensated = c.p.a.channels > 0;
    if (compensated) {
      ptx::mbarrier_wait(c.bar(B::kChannelsFull + keys.index), keys.phase);
      const auto operand = [&](uint32_t at) {
        return ptx::matrix_desc(c.smem + at, decode::kSlotsLbo, decode::kSlotsSbo,
                                ptx::Swizzle::kNone);
      };
      ptx::mma_f16_ss(d, operand(kSmemChannelsQ), operand(c.channels(keys.index)),
                      ptx::idesc_f16(ptx::F16Kind::kBf16, 128, kBlock, false, false), false);
    }
    const auto rows = [&](uint32_t at) {
      return ptx::matrix_desc(c.smem + at, 0, 8 * C::kRowQK, C::kSwizzleQK);
    };
    const uint64_t q = rows(kSmemQ), k = rows(S::kK + keys.index * C::kBytesK);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::mma_nvfp4_ss(d, ptx::advance(q, 32 * i), ptx::advance(k, 32 * i),
                        ptx::idesc_nvfp4(kBlock), c.tmem + kTmemScaleQ + 4 * i, scale_k + 4 * i,
                        compensated || i > 0);
    }
    ptx::tcgen05_commit(c.bar(decode::kScoresFull + scores.index));
    ptx::tcgen05_commit(c.bar(B::kKeysEmpty + keys.index));
    keys.advance();
    scores.advance();
  }

  __device__ void issue_output(bool accumulate) {
    ptx::mbarrier_wait(c.bar(B::kValuesFull + values.index), values.phase);
    ptx::mbarrier_wait(c.bar(decode::kProbsFull), probs_phase);
    probs_phase ^= 1;
    ptx::tmem_fence_after_sync();
    const uint64_t v =
        ptx::matrix_desc(c.smem + S::kV + values.index * C::kBytesV, 0, 8 * C::kRowV, C::kSwizzleV);
    constexpr uint32_t kDesc = ptx::idesc_f8f6f4(ptx::F8Kind::kE4m3, ptx::F8Kind::kE4m3, 128, kDim,
                                                 false, /*mn_major_b=*/true);
#pragma unroll
    for (int i = 0; i < kBlock / 32; ++i) {
      ptx::mma_f8f6f4_ts(c.tmem + kTmemOut, c.tmem + kTmemProbs + 8 * i,
                         ptx::advance(v, i * 32 * C::kRowV), kDesc, accumulate || i > 0);
    }
    ptx::tcgen05_commit(c.bar(B::kValuesEmpty + values.index));
    ptx::tcgen05_commit(c.bar(decode::kOutFull));
    values.advance();
  }

  __device__ void run_item(const WorkItem& item) {
    const int32_t blocks = decode::num_blocks(item);
    if (blocks == 0) return;
    ptx::mbarrier_wait(c.bar(decode::kQueryFull), query_phase);
    query_phase ^= 1;
    ptx::tmem_fence_after_sync();
    const uint64_t atoms = ptx::scale_atom_desc(c.smem + S::kScaleQ);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::tcgen05_cp_scale_atom(c.tmem + kTmemScaleQ + 4 * i,
                                 ptx::advance(atoms, i * C::kAtomBytes));
    }
    issue_scores();
    for (int32_t j = 0; j < blocks; ++j) {
      if (j + 1 < blocks) issue_scores();
      issue_output(j > 0);
    }
  }
};

__device__ __forceinline__ void mma_loop(const Context& c) {
  MmaLoop loop{c};
  decode::for_each_item(c.p.a.plan, [&](const WorkItem& item) { loop.run_item(item); });
}

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode_rows
