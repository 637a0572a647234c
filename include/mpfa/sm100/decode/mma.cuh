// SPDX-License-Identifier: Apache-2.0
// Tensor instructions, all issued by one thread: S^T = K Q^T and O^T += V^T P^T.
#pragma once

#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/decode/context.cuh"

namespace mpfa::sm100::decode {

#if MPFA_HAS_TCGEN05

// Walks the blocks of all items. Invariant: S(j+1) may overwrite the buffer of S(j-1) because the
// wait for P(j-1) precedes it, and P is published after S was read; the same wait covers the scale
// buffer of block j-1.
template <int D>
struct MmaLoop {
  using C = Config<D>;
  using S = Smem<D>;
  using B = Barriers<D>;

  const Context<D>& c;
  RingState<C::kStages> keys, values;
  RingState<2> scores;
  uint32_t probs_phase = 0;
  uint32_t query_phase = 0;

  // Opens the accumulator with the channels of K and Q, K = 16 (paper equation 11).
  __device__ void issue_channels(uint32_t d, int32_t columns) {
    ptx::mbarrier_wait(c.bar(B::kChannelsFull + keys.index), keys.phase);
    const auto operand = [&](uint32_t at) {
      return ptx::matrix_desc(c.smem + at, kSlotsLbo, kSlotsSbo, ptx::Swizzle::kNone);
    };
    ptx::mma_f16_ss(d, operand(c.channels(keys.index)), operand(S::kComp),
                    ptx::idesc_f16(ptx::F16Kind::kBf16, kBlock, columns, false, false), false);
  }

  // M = 128 keys, N = columns, K = 64 per step.
  __device__ void issue_scores(int32_t columns) {
    ptx::mbarrier_wait(c.bar(kKeysFull + keys.index), keys.phase);
    ptx::tmem_fence_after_sync();
    const uint32_t scale_k = c.tmem + kTmemScaleK + 8 * scores.index;
    const uint64_t atoms = ptx::scale_atom_desc(c.smem + S::kScaleK + keys.index * C::kBytesScale);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::tcgen05_cp_scale_atom(scale_k + 4 * i, ptx::advance(atoms, i * C::kAtomBytes));
    }
    const uint32_t d = c.tmem + kTmemScores + kMaxColumns * scores.index;
    const uint64_t k =
        ptx::matrix_desc(c.smem + S::kK + keys.index * C::kBytesK, 0, 8 * C::kRowQK, C::kSwizzleQK);
    const uint64_t q = ptx::matrix_desc(c.smem + S::kQ, 0, 8 * C::kRowQK, C::kSwizzleQK);
    const uint32_t idesc = ptx::idesc_nvfp4(columns);
    const bool compensated = c.p.a.channels > 0;
    if (compensated) issue_channels(d, columns);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::mma_nvfp4_ss(d, ptx::advance(k, 32 * i), ptx::advance(q, 32 * i), idesc, scale_k + 4 * i,
                        c.tmem + kTmemScaleQ + 4 * i, compensated || i > 0);
    }
    ptx::tcgen05_commit(c.bar(kScoresFull + scores.index));
    ptx::tcgen05_commit(c.bar(B::kKeysEmpty + keys.index));
    keys.advance();
    scores.advance();
  }

  // M = D channels, N = columns, K = 32 keys per step. V^T is read MN-major from [key][channel].
  __device__ void issue_output(int32_t columns, bool accumulate) {
    ptx::mbarrier_wait(c.bar(B::kValuesFull + values.index), values.phase);
    ptx::mbarrier_wait(c.bar(kProbsFull), probs_phase);
    probs_phase ^= 1;
    ptx::tmem_fence_after_sync();
    const uint64_t v =
        ptx::matrix_desc(c.smem + S::kV + values.index * C::kBytesV, 0, 8 * C::kRowV, C::kSwizzleV);
    const uint64_t p = ptx::matrix_desc(c.smem + S::kP, 0, 8 * kBlock, ptx::Swizzle::k128B);
    const uint32_t idesc =
        ptx::idesc_f8f6f4(ptx::F8Kind::kE4m3, ptx::F8Kind::kE4m3, D, columns, true, false);
#pragma unroll
    for (int i = 0; i < kBlock / 32; ++i) {
      ptx::mma_f8f6f4_ss(c.tmem + kTmemOut, ptx::advance(v, i * 32 * C::kRowV),
                         ptx::advance(p, 32 * i), idesc, accumulate || i > 0);
    }
    ptx::tcgen05_commit(c.bar(B::kValuesEmpty + values.index));
    ptx::tcgen05_commit(c.bar(kOutFull));
    values.advance();
  }

  __device__ void run_item(const WorkItem& item, int32_t columns) {
    const int32_t blocks = num_blocks(item);
    if (blocks == 0) return;
    ptx::mbarrier_wait(c.bar(kQueryFull), query_phase);
    query_phase ^= 1;
    ptx::tmem_fence_after_sync();
    const uint64_t atoms = ptx::scale_atom_desc(c.smem + S::kScaleQ);
#pragma unroll
    for (int i = 0; i < C::kAtoms; ++i) {
      ptx::tcgen05_cp_scale_atom(c.tmem + kTmemScaleQ + 4 * i,
                                 ptx::advance(atoms, i * C::kAtomBytes));
    }
    issue_scores(columns);
    for (int32_t j = 0; j < blocks; ++j) {
      // why: S of the next block before O of this one, so that the softmax finds it ready.
      if (j + 1 < blocks) issue_scores(columns);
      issue_output(columns, j > 0);
    }
  }
};

template <int D>
__device__ __forceinline__ void mma_loop(const Context<D>& c) {
  const AttentionParams& a = c.p.a;
  const int32_t heads_per_group = __ldg(&a.plan.header->heads_per_group);
  MmaLoop<D> loop{c};
  for_each_item(a.plan, [&](const WorkItem& item) {
    const int32_t columns = row_packing(item, heads_per_group, a.group_size).rows;
    loop.run_item(item, (columns + kColumnStep - 1) / kColumnStep * kColumnStep);
  });
}

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode
