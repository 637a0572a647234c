// SPDX-License-Identifier: Apache-2.0
// Softmax warps of the SM100 decode kernel. Of S^T a thread holds one key (its Tensor Memory lane)
// and 8 or 16 columns at a time; of O^T one channel.
#pragma once

#include "mpfa/core/soft_cap.cuh"
#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/sm100/decode/query.cuh"
#include "mpfa/sm100/decode/reduce.cuh"

namespace mpfa::sm100::decode {

#if MPFA_HAS_TCGEN05

constexpr uint32_t kSoftmaxBarrier = 1;  // named barrier of the four warps
__device__ __forceinline__ void softmax_sync() {
  ptx::named_barrier_sync(kSoftmaxBarrier, kSoftmaxThreads);
}

__device__ __forceinline__ float bf16_to_float(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

// N columns of this warp's lanes.
template <int N>
__device__ __forceinline__ void load_tmem(float (&x)[N], uint32_t taddr) {
  uint32_t raw[N];
  if constexpr (N == 8) {
    ptx::tmem_ld_x8(raw, taddr);
  } else {
    static_assert(N == 16, "widths of a chunk");
    ptx::tmem_ld_x16(raw, taddr);
  }
  ptx::tmem_wait_ld();
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = __uint_as_float(raw[i]);
}

template <int N>
__device__ __forceinline__ void store_tmem(uint32_t taddr, const float (&x)[N]) {
  uint32_t raw[N];
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = __float_as_uint(x[i]);
  if constexpr (N == 8) {
    ptx::tmem_st_x8(taddr, raw);
  } else {
    ptx::tmem_st_x16(taddr, raw);
  }
}

// Thread t zeroes the V row of its key if no row of the tile sees it.
// why: P is 0 there, but 0 * NaN is NaN, and V of a page's unwritten tail or of a page outside the
// window may hold anything.
template <int D>
__device__ __forceinline__ void clear_hidden_values(const Context<D>& c, const Tile& t,
                                                    const RingState<Config<D>::kStages>& values,
                                                    int32_t block_begin, int32_t thread) {
  using C = Config<D>;
  if (t.outer.begin <= block_begin && block_begin + kBlock <= t.outer.end) return;
  ptx::mbarrier_wait(c.bar(Barriers<D>::kValuesFull + values.index), values.phase);
  const int32_t key = block_begin + thread;
  if (key >= t.outer.begin && key < t.outer.end) return;
  const uint32_t row = c.smem + Smem<D>::kV + values.index * C::kBytesV + thread * C::kRowV;
#pragma unroll
  for (uint32_t i = 0; i < C::kRowV; i += 16) {
    ptx::st_shared_v4(row + i, make_uint4(0, 0, 0, 0));
  }
}

template <int D>
struct SoftmaxLoop {
  using C = Config<D>;
  using S = Smem<D>;
  using B = Barriers<D>;

  const Context<D>& c;
  const AttentionParams& a;
  const int32_t thread, warp, lane;
  float exponent_scale;  // P = 2^(exponent_scale (S - m))
  RingState<C::kStages> keys, values;
  RingState<2> scores;
  uint32_t out_phase = 0;
  uint32_t pass = 0;

  __device__ explicit SoftmaxLoop(const Context<D>& context)
      : c(context),
        a(context.p.a),
        thread(threadIdx.x),
        warp(ptx::uniform_warp_index()),
        lane(threadIdx.x & 31) {
    exponent_scale = a.logits_soft_cap > 0.0f ? kLog2e : a.sm_scale_log2;
  }

  // Tensor Memory address of this warp's lanes.
  __device__ uint32_t tmem(uint32_t column) const {
    return c.tmem + column + (static_cast<uint32_t>(warp) * 32u << 16);
  }

  __device__ void wait_out() {
    ptx::mbarrier_wait(c.bar(kOutFull), out_phase);
    out_phase ^= 1;
    ptx::tmem_fence_after_sync();
  }

  // What the tensor cores left out of S, the soft cap, and the mask.
  template <int N>
  __device__ void finish_scores(float (&x)[N], int32_t first, const Tile& t, int32_t key,
                                bool masked) {
    const SoftmaxState& s = c.state();
    const int32_t used = t.packing.rows - first;
    if (c.p.delta_heads > 0) {
      const uint8_t* delta = c.base + c.delta(keys.index) + thread * 2;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i < used) {
          x[i] += bf16_to_float(
              *reinterpret_cast<const uint16_t*>(delta + s.head[first + i] * kBlock * 2));
        }
      }
    }
    if (a.logits_soft_cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x[i] = soft_cap(x[i] + s.row_term[first + i], a.logits_soft_cap, a.soft_cap_ratio);
      }
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const KeyRange r = s.keys[first + i];
        x[i] = key >= r.begin && key < r.end ? x[i] : -INFINITY;
      }
    }
  }

  // P^T row n, byte = key, as a K-major SW128 operand.
  template <int N>
  __device__ void store_probs(const float (&p)[N], int32_t first) {
    uint8_t* base = c.base + S::kP + first * kBlock;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t codes = ptx::cvt_rn_satfinite_e4m3x2(kScaleP * p[i], kScaleP * p[i + 1]);
      base[i * kBlock + (thread ^ (i % 8 << 4))] = static_cast<uint8_t>(codes);
      base[(i + 1) * kBlock + (thread ^ ((i + 1) % 8 << 4))] = static_cast<uint8_t>(codes >> 8);
    }
  }

  template <int N>
  __device__ void rescale_out(float alpha, int32_t first) {
    if (__ballot_sync(0xffffffffu, alpha != 1.0f) == 0) return;
    float o[N];
    load_tmem(o, tmem(kTmemOut + first));
#pragma unroll
    for (int i = 0; i < N; ++i) o[i] *= __shfl_sync(0xffffffffu, alpha, kLanesPerColumn<N> * i);
    store_tmem(tmem(kTmemOut + first), o);
  }

  // P, O and the scores that were read are the MMA thread's now.
  __device__ void publish() {
    ptx::tmem_wait_st();
    ptx::tmem_fence_before_sync();
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(c.bar(kProbsFull));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(c.bar(B::kKeysEmpty + keys.index));
  }

  // N columns of one block.
  template <int N>
  __device__ void run_chunk(const Tile& t, int32_t first, int32_t key, bool masked,
                            bool first_block) {
    constexpr int kLanes = kLanesPerColumn<N>;
    SoftmaxState& s = c.state();
    float x[N];
    load_tmem(x, tmem(kTmemScores + kMaxColumns * scores.index + first));
    finish_scores(x, first, t, key, masked);

    // The lanes of column i of the chunk are kLanes * i .. kLanes * i + kLanes - 1.
    const int32_t mine = lane / kLanes;
    const float warp_peak = reduce_columns<Max>(x, lane);
    if (lane % kLanes == 0) s.peak[pass][mine][warp] = warp_peak;
    softmax_sync();
    const float4 peaks = *reinterpret_cast<const float4*>(s.peak[pass][mine]);
    pass ^= 1;
    const float before = s.running[warp][first + mine];
    const float block_peak = fmaxf(fmaxf(peaks.x, peaks.y), fmaxf(peaks.z, peaks.w));
    const float running = fmaxf(before, block_peak);
    // why: a column whose keys are all masked so far keeps m = -inf; -inf - -inf would be NaN.
    const float anchor = running == -INFINITY ? 0.0f : running;
    const float alpha = running == before ? 1.0f : ptx::ex2(exponent_scale * (before - anchor));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = ptx::ex2(exponent_scale * (x[i] - __shfl_sync(0xffffffffu, anchor, kLanes * i)));
    }
    if (!first_block) {
      if (first == 0) wait_out();
      rescale_out<N>(alpha, first);
    }
    store_probs(x, first);
    if (first + N >= t.packing.rows) publish();

    // why last: the PV product does not wait for the row sum.
    const float sum = reduce_columns<Sum>(x, lane);
    __syncwarp();  // the column's other lanes have read its statistics
    if (lane % kLanes == 0) {
      s.running[warp][first + mine] = running;
      s.total[warp][first + mine] = alpha * s.total[warp][first + mine] + sum;
    }
    __syncwarp();
  }

  __device__ void run_block(const Tile& t, int32_t block_begin, bool first_block) {
    const int32_t key = block_begin + thread;
    if (c.p.delta_heads > 0) ptx::mbarrier_wait(c.bar(kKeysFull + keys.index), keys.phase);
    clear_hidden_values(c, t, values, block_begin, thread);
    ptx::mbarrier_wait(c.bar(kScoresFull + scores.index), scores.phase);
    ptx::tmem_fence_after_sync();
    const bool masked = block_begin < t.inner.begin || block_begin + kBlock > t.inner.end;
    if (t.packing.rows <= 8) {
      run_chunk<8>(t, 0, key, masked, first_block);
    } else {
      for (int32_t first = 0; first < t.packing.rows; first += 16) {
        run_chunk<16>(t, first, key, masked, first_block);
      }
    }
    keys.advance();
    values.advance();
    scores.advance();
  }
};

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode
