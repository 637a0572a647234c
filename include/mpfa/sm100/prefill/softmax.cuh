// SPDX-License-Identifier: Apache-2.0
// The softmax role: four warps per query stage, one thread per row. S comes from Tensor Memory into
// registers once; P goes back as e4m3 (paper section 4.1, Algorithm 1 lines 13-16), in the
// comparison builds as bf16 or NVFP4.
#pragma once

#include <cstdint>

#include "mpfa/core/soft_cap.cuh"
#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/f32x2.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/scale.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__) && MPFA_HAS_TCGEN05

constexpr float kInf = __builtin_huge_valf();
constexpr float kNegInf = -kInf;
constexpr float kNaN = __builtin_nanf("");
// Running maximum of a row that has seen no key. why finite: its exponents stay ordered numbers
// without a test in the loop. No score is lower: NVFP4 products are below 2^30.
constexpr float kNoKey = -1e30f;
// |lambda * max| from which a row has no answer; docs, "Exponents". why 2^24 - 16: below it the
// offsets of both kinds of exponentials, kTop apart, hold every integer.
constexpr float kLargestExponent = 16777200.0f;

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
// MUFU and issue slots equal (the 48th adds to the issue slots); none on sm_103, which has twice as
// many lanes. They lie in the middle chunks, so that the first and the last store of P wait for no
// long chain.
__device__ __forceinline__ constexpr bool by_polynomial(int key) {
#if __CUDA_ARCH__ >= 1030
  return false;
#else
  return key >= 32 && key < 96 && key % 8 >= 2 && key != 93;
#endif
}

// 2^(kTop - kExp2Range u) for u in [0, 1], as 2^n p(f) with n + f the exponent, |f| <= 1/2.
// why u: one saturating FMA scales the score and bounds it, where a clamp of the exponent takes an
// instruction more; and the fp32 grid is finest at u = 0, where P is largest. u = 1, from -inf or
// too low a score, gives 2^(kTop - 128): 0 as e4m3 or e2m1, nothing beside a row's largest P.
constexpr float kExp2Range = 128.0f;
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

template <class P>
struct Exp2 {
  static constexpr float kTop = P::kExp2Top;
  // Numbers of this size are 1 / kExp2Range apart, so that n lands in the low bits.
  static constexpr float kMagic = (12582912.0f + kTop) / kExp2Range;

  __device__ __forceinline__ static ptx::F32x2 polynomial(ptx::F32x2 u) {
    const auto all = [](float x) { return ptx::F32x2{x, x}; };
    const ptx::F32x2 n = ptx::fma_f32x2(u, all(-1.0f), all(kMagic));
    const ptx::F32x2 f = ptx::fma_f32x2(u, all(-1.0f), ptx::fma_f32x2(n, all(-1.0f), all(kMagic)));
    ptx::F32x2 p = ptx::fma_f32x2(all(kExp2C4), f, all(kExp2C3));
    p = ptx::fma_f32x2(p, f, all(kExp2C2));
    p = ptx::fma_f32x2(p, f, all(kExp2C1));
    p = ptx::fma_f32x2(p, f, all(kExp2C0));
    return {scale_by_power(p.x, n.x), scale_by_power(p.y, n.y)};
  }

  // The same steps for one number.
  __device__ __forceinline__ static float polynomial(float u) {
    const float n = kMagic - u;
    const float f = (kMagic - n) - u;
    float p = fmaf(kExp2C4, f, kExp2C3);
    p = fmaf(p, f, kExp2C2);
    p = fmaf(p, f, kExp2C1);
    return scale_by_power(fmaf(p, f, kExp2C0), n);
  }
};

template <class C>
class SoftmaxRole {
  using Layout = SharedLayout<C>;
  using P = typename C::P;

 public:
  __device__ __forceinline__ SoftmaxRole(const Context<C>& ctx, int stage)
      : ctx_(ctx),
        stage_(stage),
        lane_(threadIdx.x % 32),
        row_(threadIdx.x % kStageRows),
        scores_(warp_value(ctx.tmem + C::tmem_s(0) + stage * kKvBlock +
                           (static_cast<uint32_t>(row_ / 32 * 32) << 16))),
        bars_(warp_value(ctx.shared + 8 * stage)) {}

  __device__ __forceinline__ void run() {
    TileWalk walk(ctx_.params);
    Tile tile;
    while (walk.next(&tile)) {
      if (tile.blocks > 0 && stage_ < tile.stages) {
        run_tile(tile);
      } else if (kElementwiseDelta) {
        for (int32_t j = 0; j < tile.blocks; ++j) delta_read(j);
      }
      ring_ += C::kBlockSlots * tile.blocks;
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
    // P = 2^(lambda S + bias) of the block; bias = kLog2Scale - lambda m, rounded down.
    float m = kNoKey, l = 0.0f, bias = kInf;
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
      // why down: no P is above the format's largest number, where it would saturate while the row
      // sum does not. The difference of two biases is exactly what joins their blocks, so nothing
      // else of lambda * m is rounded away, however large it is.
      const float new_bias = __fmaf_rd(-lambda, new_max, P::kLog2Scale);
      const float alpha = ptx::ex2(new_bias - bias);
      bias = new_bias;
      m = new_max;
      if (block != first_block) publish_rescale(kSoftmaxCut >= 3 ? 1.0f : alpha);
      float probability[kKvBlock];
      store_probabilities(s, probability, lambda, bias);
      l = kSoftmaxCut >= 3 ? probability[0] : l * alpha + row_sum(probability);
    }
    // A row without any key: the polynomial gives 2^(kTop - 128) for -inf, the correction tests l
    // for 0.
    const bool empty = m == kNoKey;
    publish_final(empty ? 0.0f : l, empty ? 0.0f : -bias);
  }

  // why the shuffle: ptxas then keeps the value in a uniform register, where tcgen05.ld and st need
  // their address, instead of moving it there for each of them, or (of barriers, on sm_103a) of
  // computing it again in front of each arrival, 37 instructions a block.
  __device__ __forceinline__ static uint32_t warp_value(uint32_t x) {
    return __shfl_sync(0xffffffffu, x, 0);
  }

  // One arrival for the warp; what its lanes did before is ordered by __syncwarp.
  __device__ __forceinline__ void arrive(int offset) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(bars_ + offset);
  }

  // The maximum comes with the load where that exists. Of scores as loaded: masks and the soft cap
  // change it.
  __device__ __forceinline__ float load_scores(uint32_t (&s)[kKvBlock]) {
    ptx::mbarrier_wait(bars_ + Layout::s_full, s_parity_);
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
    const uint32_t at = ctx_.at(Layout::ring) +
                        (ring_ + C::kBlockSlots * j) % kRingSlots * C::kSlotBytes + C::kSlotComp +
                        2 * head * kKvBlock;
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
    const uint32_t slot = (ring_ + C::kBlockSlots * j) % kRingSlots;
    if (lane_ == 0) ptx::mbarrier_arrive(ctx_.bar(Layout::empty, slot));
  }

  __device__ __forceinline__ void publish_rescale(float alpha) {
    ptx::st_shared_u32(row_address(Layout::rescale), __float_as_uint(alpha));
    // why no wait for PV: the correction warps touch O after this arrival, and S complete means
    // that PV of the block before is complete too.
    arrive(Layout::rescale_full);
  }

  static constexpr int kChunk = 32;  // keys of which P is computed and stored together

  // p = 2^kLog2Scale P = 2^(lambda S + bias), fp32; the narrow copy goes to Tensor Memory.
  __device__ __forceinline__ void store_probabilities(const uint32_t (&s)[kKvBlock],
                                                      float (&p)[kKvBlock], float lambda,
                                                      float bias) {
    // u of Exp2.
    const float slope = lambda * (-1.0f / kExp2Range);
    const float offset = __fmaf_ru(bias, -1.0f / kExp2Range, P::kExp2Top / kExp2Range);
#pragma unroll
    for (int g = 0; g < kKvBlock; g += kChunk) {
#pragma unroll
      for (int key = g; key < g + kChunk; key += 2) {
        const ptx::F32x2 score = {__uint_as_float(s[key]), __uint_as_float(s[key + 1])};
        const ptx::F32x2 x = ptx::fma_f32x2(score, {lambda, lambda}, {bias, bias});
        ptx::F32x2 y = x;
        if (kSoftmaxCut == 0) {
          const float ux = ptx::fma_sat(score.x, slope, offset);
          if (by_polynomial(key + 1)) {
            y = Exp2<P>::polynomial({ux, ptx::fma_sat(score.y, slope, offset)});
          } else {
            y = {by_polynomial(key) ? Exp2<P>::polynomial(ux) : ptx::ex2(x.x), ptx::ex2(x.y)};
          }
        }
        p[key] = y.x;
        p[key + 1] = y.y;
      }
      store_chunk(p, g);
      // why: PV starts on this much of P while the rest is computed.
      if (g + kChunk == P::kEarlyTokens) publish_probabilities(Layout::p_ready);
    }
    publish_probabilities(Layout::p_last);
  }

  // Keys [g, g + kChunk) of the row, narrow.
  __device__ __forceinline__ void store_chunk(const float (&p)[kKvBlock], int g) {
    const uint32_t to = scores_ + C::kTmemPOffset + g * P::kBits / 32;
    if constexpr (C::kPv == Pv::kE4m3) {
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float* e = p + g + 4 * i;
        words[i] = ptx::cvt_e4m3x4(e[0], e[1], e[2], e[3]);
      }
      ptx::tmem_st_x8(to, words);
    } else if constexpr (C::kPv == Pv::kBf16) {
#pragma unroll
      for (int h = 0; h < kChunk; h += 16) {
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          words[i] = ptx::cvt_bf16x2(p[g + h + 2 * i], p[g + h + 2 * i + 1]);
        }
        ptx::tmem_st_x8(to + h / 2, words);
      }
    } else if (g % 64 == 32) {
      // One K = 64 step of PV: 64 keys and their four scales.
      store_nvfp4(p, g - 32);
    }
  }

  // NVFP4 (paper section 3.1, the costs of FP4 PV): the scale of 16 keys is their largest P over 6
  // as e4m3, at least its smallest number, so that no scale is 0; P goes to Tensor Memory, its
  // scales through shared memory, from where tcgen05.cp replicates them into the four lane
  // quadrants. why not tcgen05.st: a warp reaches its own quadrant alone, and each quadrant needs
  // the scales of all rows (PTX ISA 9.7.16.10.7).
  __device__ __forceinline__ void store_nvfp4(const float (&p)[kKvBlock], int first) {
    constexpr float kSmallestScale = 0x1p-9f;
    uint32_t words[8], scales = 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float scale[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* e = p + first + 32 * pair + 16 * k;
        float top = 6.0f * kSmallestScale;
#pragma unroll
        for (int i = 0; i < 16; i += 2) top = fmaxf(fmaxf(top, e[i]), e[i + 1]);
        scale[k] = top * (1.0f / 6.0f);
      }
      scales |= ptx::round_to_e4m3x2(scale[0], scale[1]) << 16 * pair;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* e = p + first + 32 * pair + 16 * k;
        const float inverse = ptx::rcp(scale[k]);
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
          const ptx::F32x2 y = ptx::mul_f32x2({e[i], e[i + 1]}, {inverse, inverse});
          x[i] = y.x;
          x[i + 1] = y.y;
        }
        words[4 * pair + 2 * k] = ptx::cvt_rn_satfinite_e2m1x8(x);
        words[4 * pair + 2 * k + 1] = ptx::cvt_rn_satfinite_e2m1x8(x + 8);
      }
    }
    ptx::tmem_st_x8(scores_ + C::kTmemPOffset + first * P::kBits / 32, words);
    ptx::st_shared_u32(ctx_.at(Layout::p_scale) + stage_ * C::kPvScaleBytes + first / 64 * 512 +
                           row_ % 32 * 16 + row_ / 32 * 4,
                       scales);
    // Read by tcgen05.cp. invariant: the copies of the block before are complete, s_full says so.
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ void publish_probabilities(int barrier) {
    ptx::tmem_wait_st();
    ptx::tmem_fence_before_sync();
    arrive(barrier);
  }

  __device__ __forceinline__ void publish_final(float l, float reference) {
    final_read_.wait(ctx_.bar(Layout::final_read, stage_), 0);
    ptx::st_shared_u32(row_address(Layout::row_sum), __float_as_uint(l));
    ptx::st_shared_u32(row_address(Layout::row_reference), __float_as_uint(reference));
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
  const uint32_t bars_;    // of this stage: its barrier of a kind is at bars_ + offset
  uint32_t s_parity_ = 0;
  PhaseCounters final_read_{1};
  uint32_t ring_ = 0;  // position of the tile's first K block, for element-wise Delta
};

#endif

}  // namespace mpfa::sm100::prefill
