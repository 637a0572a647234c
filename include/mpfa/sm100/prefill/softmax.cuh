// SPDX-License-Identifier: Apache-2.0
// The softmax role: four warps per query stage, one thread per row. S comes from Tensor Memory into
// registers once; P goes back as e4m3 (paper section 4.1, Algorithm 1 lines 13-16).
#pragma once

#include <cstdint>

#include "mpfa/core/soft_cap.cuh"
#include "mpfa/ptx/f32x2.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__) && MPFA_HAS_TCGEN05

constexpr float kNegInf = -__builtin_huge_valf();
// Scores outside [begin, end) of the row's block become -inf. A select: whatever hidden keys and
// unwritten scales left in S, NaN included, disappears.
__device__ __forceinline__ void mask_scores(uint32_t (&s)[kKvBlock], int32_t begin, int32_t end) {
#pragma unroll
  for (int g = 0; g < kKvBlock / 32; ++g) {
    const int32_t low = min(max(begin - 32 * g, 0), 32);
    const int32_t high = min(max(end - 32 * g, 0), 32);
    // Funnel shifts clamp at 32, where plain ones are undefined.
    const uint32_t below_high = __funnelshift_lc(0xffffffffu, 0, high);
    const uint32_t below_low = __funnelshift_lc(0xffffffffu, 0, low);
    const uint32_t keep = below_high & ~below_low;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if ((keep >> i & 1) == 0) s[32 * g + i] = __float_as_uint(kNegInf);
    }
  }
}

__device__ __forceinline__ void cap_scores(uint32_t (&s)[kKvBlock], float row_term, float ratio,
                                           float cap) {
#pragma unroll
  for (int i = 0; i < kKvBlock; ++i) {
    s[i] = __float_as_uint(soft_cap(__uint_as_float(s[i]) + row_term, cap, ratio));
  }
}

__device__ __forceinline__ float row_max(const uint32_t (&s)[kKvBlock], float seed) {
  float m[4] = {seed, kNegInf, kNegInf, kNegInf};
#pragma unroll
  for (int i = 0; i < kKvBlock; i += 8) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      m[c] = fmaxf(fmaxf(m[c], __uint_as_float(s[i + 2 * c])), __uint_as_float(s[i + 2 * c + 1]));
    }
  }
  return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
}

__device__ __forceinline__ float row_sum(const float (&p)[kKvBlock]) {
  ptx::F32x2 total[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) total[c] = {p[2 * c], p[2 * c + 1]};
#pragma unroll
  for (int i = 8; i < kKvBlock; i += 8) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      total[c] = ptx::add_f32x2(total[c], {p[i + 2 * c], p[i + 2 * c + 1]});
    }
  }
  const ptx::F32x2 all =
      ptx::add_f32x2(ptx::add_f32x2(total[0], total[1]), ptx::add_f32x2(total[2], total[3]));
  return all.x + all.y;
}

// sm_103 finds the row maximum while it loads S. Delta of the measurement build comes after that.
#if MPFA_HAS_TCGEN05_LD_RED
constexpr bool kLoadFindsMax = !kElementwiseDelta;
#else
constexpr bool kLoadFindsMax = false;
#endif

// Which of a row's 128 keys take 2^x from the FMA pipe instead of the MUFU (paper section 5.1): 47
// on sm_100, whose 16 MUFU lanes per SM and cycle are the bottleneck, which makes the cycles of
// MUFU, FMA pipe and issue slots equal (with the 48th the FMA pipe would be the longest); none on
// sm_103, which has twice as many lanes. They lie in the middle chunks, so that the first and the
// last store of P wait for no long chain.
__device__ __forceinline__ constexpr bool by_polynomial(int key) {
#if __CUDA_ARCH__ >= 1030
  return false;
#else
  return key >= 32 && key < 96 && key % 8 >= 2 && key != 93;
#endif
}

// 2^(kExp2Top - kExp2Range u) for u in [0, 1], as 2^n p(f) with n + f the exponent, |f| <= 1/2.
// why u: one saturating FMA scales the score and bounds it, where a clamp of the exponent takes an
// instruction more; and the fp32 grid is finest at u = 0, where P is largest. u = 1, from -inf or
// too low a score, gives 2^-119.
constexpr float kExp2Top = 9.0f;  // above log2 448
constexpr float kExp2Range = 128.0f;
// Numbers of this size are 1 / kExp2Range apart, so that n lands in the low bits.
constexpr float kExp2Magic = (12582912.0f + kExp2Top) / kExp2Range;
// Minimax of 2^f: relative error 2.7e-6, 1/20000 of an e4m3 step.
// why degree 4: degree 3, enough for e4m3 by itself with 7.5e-5, moves one P in 700 of those
// computed to the neighbouring code, which shows in rows that one key dominates.
constexpr float kExp2C0 = 0.9999992361310348f;
constexpr float kExp2C1 = 0.6931217337697929f * kExp2Range;
constexpr float kExp2C2 = 0.24024766689727003f * kExp2Range * kExp2Range;
constexpr float kExp2C3 = 0.05591824792817075f * kExp2Range * kExp2Range * kExp2Range;
constexpr float kExp2C4 = 0.009569674966302883f * kExp2Range * kExp2Range * kExp2Range * kExp2Range;

__device__ __forceinline__ float scale_by_power(float p, float n) {
  return __uint_as_float((__float_as_uint(n) << 23) + __float_as_uint(p));
}

__device__ __forceinline__ ptx::F32x2 exp2_polynomial(ptx::F32x2 u) {
  const auto all = [](float x) { return ptx::F32x2{x, x}; };
  const ptx::F32x2 n = ptx::fma_f32x2(u, all(-1.0f), all(kExp2Magic));
  const ptx::F32x2 f =
      ptx::fma_f32x2(u, all(-1.0f), ptx::fma_f32x2(n, all(-1.0f), all(kExp2Magic)));
  ptx::F32x2 p = ptx::fma_f32x2(all(kExp2C4), f, all(kExp2C3));
  p = ptx::fma_f32x2(p, f, all(kExp2C2));
  p = ptx::fma_f32x2(p, f, all(kExp2C1));
  p = ptx::fma_f32x2(p, f, all(kExp2C0));
  return {scale_by_power(p.x, n.x), scale_by_power(p.y, n.y)};
}

// The same steps for one number.
__device__ __forceinline__ float exp2_polynomial(float u) {
  const float n = kExp2Magic - u;
  const float f = (kExp2Magic - n) - u;
  float p = fmaf(kExp2C4, f, kExp2C3);
  p = fmaf(p, f, kExp2C2);
  p = fmaf(p, f, kExp2C1);
  return scale_by_power(fmaf(p, f, kExp2C0), n);
}

template <class C>
class SoftmaxRole {
  using Layout = SharedLayout<C>;

 public:
  __device__ __forceinline__ SoftmaxRole(const Context<C>& ctx, int stage)
      : ctx_(ctx),
        stage_(stage),
        lane_(threadIdx.x % 32),
        row_(threadIdx.x % kStageRows),
        scores_(warp_value(ctx.tmem + C::tmem_s(0) + stage * kKvBlock +
                           (static_cast<uint32_t>(row_ / 32 * 32) << 16))) {}

  __device__ __forceinline__ void run() {
    TileWalk walk(ctx_.params);
    Tile tile;
    while (walk.next(&tile)) {
      if (tile.blocks > 0 && stage_ < tile.stages) {
        run_tile(tile);
      } else if (kElementwiseDelta) {
        for (int32_t j = 0; j < tile.blocks; ++j) delta_read(j);
      }
      ring_ += 2 * tile.blocks;
    }
  }

 private:
  __device__ __forceinline__ void run_tile(const Tile& tile) {
    const AttentionParams& p = ctx_.params;
    // Rows past the tile's end hold zeros and are not stored; they mask like the last row.
    const int32_t tile_row = stage_ * kStageRows + row_;
    const int32_t row = min(tile_row, tile.pack.rows - 1);
    const int32_t first = tile.pack.token(min(stage_ * kStageRows, tile.pack.rows - 1));
    const int32_t last = tile.pack.token(min((stage_ + 1) * kStageRows, tile.pack.rows) - 1);
    const KeyRange mine = visible_keys(tile.mask, tile.q_begin + tile.pack.token(row));
    const KeyRange all = keys_visible_to_all(tile.mask, tile.q_begin + first, tile.q_begin + last);
    const float cap = p.logits_soft_cap;
    const bool capped = cap > 0.0f;
    float row_term = 0.0f;
    if (capped && p.row_term.data != nullptr) {
      const int32_t head = ctx_.kv_head * p.group_size + tile.pack.head(row);
      row_term = __ldg(reinterpret_cast<const float*>(
          p.row_term.row(tile.q_first + tile.pack.token(row), head)));
    }
    const float ratio = p.soft_cap_ratio;
    const float lambda = capped ? kLog2e : p.sm_scale_log2;
    // Keys count from the first one that all rows see: blocks at [0, plain_range) need no mask.
    const int32_t origin = all.begin;
    const uint32_t plain_range = capped ? 0 : max(all.end - kKvBlock + 1 - origin, 0);
    const int32_t first_block = tile.block_begin(0) - origin;
    const int32_t last_block = tile.mask.kv_begin - origin;
    float m = kNegInf, l = 0.0f;
#pragma unroll 1
    for (int32_t block = first_block; block >= last_block; block -= kKvBlock) {
      uint32_t s[kKvBlock];
      [[maybe_unused]] float peak = load_scores(s);
      if constexpr (kElementwiseDelta) {
        const int32_t j = (first_block - block) / kKvBlock;
        const int head = tile.pack.head(row) - tile.pack.first_head;
        if (p.aux_delta.data != nullptr) add_delta(s, j, head);
        delta_read(j);
      }
      if (static_cast<uint32_t>(block) >= plain_range) {
        if (capped) cap_scores(s, row_term, ratio, cap);
        mask_scores(s, mine.begin - origin - block, mine.end - origin - block);
        if constexpr (kLoadFindsMax) peak = row_max(s, kNegInf);
      }
      const float block_max = kLoadFindsMax ? fmaxf(m, peak) : row_max(s, m);
      const float new_max = kSoftmaxCut >= 2 ? 0.0f : block_max;
      // Rows that have seen no key yet: -inf - -inf would be NaN.
      const float anchor = new_max == kNegInf ? 0.0f : new_max;
      const float alpha = ptx::ex2(lambda * (m - anchor));
      m = new_max;
      if (block != first_block) publish_rescale(kSoftmaxCut >= 3 ? 1.0f : alpha);
      float probability[kKvBlock];
      store_probabilities(s, probability, lambda, anchor);
      l = kSoftmaxCut >= 3 ? probability[0] : l * alpha + row_sum(probability);
    }
    // A row without any key: exp2_polynomial gives 2^-119 for -inf, the correction tests l for 0.
    const bool empty = m == kNegInf;
    publish_final(empty ? 0.0f : l, empty ? 0.0f : m * lambda);
  }

  // why the shuffle: ptxas then keeps the value in a uniform register, where tcgen05.ld and st need
  // their address, instead of moving it there for each of them.
  __device__ __forceinline__ static uint32_t warp_value(uint32_t x) {
    return __shfl_sync(0xffffffffu, x, 0);
  }

  // One arrival for the warp; what its lanes did before is ordered by __syncwarp.
  __device__ __forceinline__ void arrive(int offset) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ctx_.bar(offset, stage_));
  }

  // The maximum comes with the load where that exists. Of scores as loaded: masks and the soft cap
  // change it.
  __device__ __forceinline__ float load_scores(uint32_t (&s)[kKvBlock]) {
    ptx::mbarrier_wait(ctx_.bar(Layout::s_full, stage_), s_parity_);
    s_parity_ ^= 1;
    ptx::tmem_fence_after_sync();
    uint32_t peak[kKvBlock / 32];
#pragma unroll
    for (int i = 0; i < kKvBlock; i += 32) {
      if constexpr (kLoadFindsMax) {
#if MPFA_HAS_TCGEN05_LD_RED
        peak[i / 32] = __float_as_uint(ptx::tmem_ld_max_x32(s + i, scores_ + i));
#endif
      } else {
        ptx::tmem_ld_x32(s + i, scores_ + i);
        peak[i / 32] = 0;
      }
    }
    ptx::tmem_wait_ld(s);
    if constexpr (kLoadFindsMax) ptx::tmem_hold(peak);
    // Ahead of every arrival of this block: S is read, and PV of the block before is complete.
    ptx::tmem_fence_before_sync();
    // invariant: the MMA role may overwrite this S with scales from here on; nothing reads it
    // again.
    if constexpr (C::kBorrowedScales) arrive(Layout::s_loaded);
    return fmaxf(fmaxf(__uint_as_float(peak[0]), __uint_as_float(peak[1])),
                 fmaxf(__uint_as_float(peak[2]), __uint_as_float(peak[3])));
  }

  // Measurement build: Delta of the row's head from the slot of K's block, one bf16 per key.
  __device__ __forceinline__ void add_delta(uint32_t (&s)[kKvBlock], int32_t j, int head) {
    const uint32_t at = ctx_.at(Layout::ring) + (ring_ + 2 * j) % kRingSlots * C::kSlotBytes +
                        C::kSlotComp + 2 * head * kKvBlock;
#pragma unroll
    for (int i = 0; i < kKvBlock; i += 8) {
      const uint4 bits = ptx::ld_shared_v4(at + 2 * i);
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        const ptx::F32x2 sum = ptx::add_f32x2(
            {__uint_as_float(s[i + k]), __uint_as_float(s[i + k + 1])},
            {__uint_as_float(pairs[k / 2] << 16), __uint_as_float(pairs[k / 2] & 0xffff0000u)});
        s[i + k] = __float_as_uint(sum.x);
        s[i + k + 1] = __float_as_uint(sum.y);
      }
    }
  }

  __device__ __forceinline__ void delta_read(int32_t j) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ctx_.bar(Layout::empty, (ring_ + 2 * j) % kRingSlots));
  }

  __device__ __forceinline__ void publish_rescale(float alpha) {
    ptx::st_shared_u32(row_address(Layout::rescale), __float_as_uint(alpha));
    // why no wait for PV: the correction warps touch O after this arrival, and S complete means
    // that PV of the block before is complete too.
    arrive(Layout::rescale_full);
  }

  static constexpr int kChunks = kKvBlock / 32;

  // p = 448 P = 2^(lambda (S - anchor) + log2 448), fp32; the e4m3 copy goes to Tensor Memory.
  __device__ __forceinline__ void store_probabilities(const uint32_t (&s)[kKvBlock],
                                                      float (&p)[kKvBlock], float lambda,
                                                      float anchor) {
    const uint32_t to = scores_ + C::kTmemPOffset;
    // u of exp2_polynomial.
    const float slope = lambda * (-1.0f / kExp2Range);
    const float offset = fmaf(-slope, anchor, (kExp2Top - kLog2PScale) / kExp2Range);
    const float bias = kLog2PScale - lambda * anchor;
#pragma unroll
    for (int g = 0; g < kChunks; ++g) {
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        float* e = p + 32 * g + i;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const int key = 32 * g + i + k;
          const ptx::F32x2 score = {__uint_as_float(s[key]), __uint_as_float(s[key + 1])};
          const ptx::F32x2 x = ptx::fma_f32x2(score, {lambda, lambda}, {bias, bias});
          ptx::F32x2 y = x;
          if (kSoftmaxCut == 0) {
            const float ux = ptx::fma_sat(score.x, slope, offset);
            if (by_polynomial(key + 1)) {
              y = exp2_polynomial({ux, ptx::fma_sat(score.y, slope, offset)});
            } else {
              y = {by_polynomial(key) ? exp2_polynomial(ux) : ptx::ex2(x.x), ptx::ex2(x.y)};
            }
          }
          e[k] = y.x;
          e[k + 1] = y.y;
        }
        words[i / 4] = ptx::cvt_e4m3x4(e[0], e[1], e[2], e[3]);
      }
      ptx::tmem_st_x8(to + 8 * g, words);
      // why: PV starts on three quarters of P while the last one is computed.
      if (g + 2 == kChunks) publish_probabilities(Layout::p_ready);
    }
    publish_probabilities(Layout::p_last);
  }

  __device__ __forceinline__ void publish_probabilities(int barrier) {
    ptx::tmem_wait_st();
    ptx::tmem_fence_before_sync();
    arrive(barrier);
  }

  __device__ __forceinline__ void publish_final(float l, float scaled_max) {
    final_read_.wait(ctx_.bar(Layout::final_read, stage_), 0);
    ptx::st_shared_u32(row_address(Layout::row_sum), __float_as_uint(l));
    ptx::st_shared_u32(row_address(Layout::row_max), __float_as_uint(scaled_max));
    arrive(Layout::final_full);
  }

  __device__ __forceinline__ uint32_t row_address(int offset) const {
    return ctx_.at(offset) + 4 * (stage_ * kStageRows + row_);
  }

  const Context<C>& ctx_;
  const int stage_;
  const int lane_;
  const int row_;
  const uint32_t scores_;  // Tensor Memory address of S, this warp's lanes
  uint32_t s_parity_ = 0;
  PhaseCounters final_read_{1};
  uint32_t ring_ = 0;  // position of the tile's first K block, for element-wise Delta
};

#endif

}  // namespace mpfa::sm100::prefill
