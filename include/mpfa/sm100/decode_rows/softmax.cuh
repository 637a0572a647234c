// SPDX-License-Identifier: Apache-2.0
// Softmax warps of the replicated-row scheme: a thread holds one row and, in warp w, keys
// 32 w .. 32 w + 31 of each block, with a running maximum and sum of its own. The four states of a
// row meet at the end of the item.
#pragma once

#include "mpfa/sm100/decode/softmax.cuh"
#include "mpfa/sm100/decode_rows/config.cuh"

namespace mpfa::sm100::decode_rows {

#if MPFA_HAS_TCGEN05

constexpr int kKeys = 32;  // per thread and block

// What a thread knows about its row.
struct Row {
  int32_t pair;      // of the tile
  int32_t head;      // query head of the batch
  int32_t in_group;  // head inside the head group
  int32_t token;     // of the batch
  KeyRange keys;
  float row_term;
};

__device__ __forceinline__ Row make_row(const Context& c, const WorkItem& item, const Tile& t,
                                        int32_t row) {
  const AttentionParams& a = c.p.a;
  Row r;
  r.pair = row % t.packing.rows;
  const int32_t i = t.packing.token(r.pair);
  r.head = decode::query_head(c, t.packing, r.pair);
  r.in_group = t.packing.head(r.pair) - t.packing.first_head;
  r.token = t.first_token + i;
  r.keys = visible_keys(t.mask, item.q_begin + i);
  r.row_term = a.row_term.data == nullptr
                   ? 0.0f
                   : __ldg(reinterpret_cast<const float*>(a.row_term.row(r.token, r.head)));
  return r;
}

// Row `thread` of the A operands: NVFP4 values, scales and channels of its pair.
__device__ __forceinline__ void write_query(const Context& c, const Row& r, int32_t thread) {
  const AttentionParams& a = c.p.a;
  const uint4* values = reinterpret_cast<const uint4*>(a.q.row(r.token, r.head));
#pragma unroll
  for (uint32_t piece = 0; piece < C::kRowQK / 16; ++piece) {
    const uint32_t at = kSmemQ + thread * C::kRowQK + piece * 16;
    ptx::st_shared_v4(c.smem + (at ^ ((at >> 7 & 3) << 4)), __ldg(values + piece));
  }
  const uint32_t* scales = reinterpret_cast<const uint32_t*>(a.q_scale.row(r.token, r.head));
#pragma unroll
  for (int i = 0; i < C::kAtoms; ++i) {
    ptx::st_shared_u32(c.smem + decode::Smem<kDim>::kScaleQ + i * C::kAtomBytes + thread % 32 * 16 +
                           thread / 32 * 4,
                       __ldg(scales + i));
  }
  if (a.channels == 0) return;
  const int32_t first_slot = c.p.delta_heads > 0 ? 1 : 0;
  const uint16_t* slots = reinterpret_cast<const uint16_t*>(a.a_comp.row(r.token, r.head));
  uint32_t word[8] = {};
#pragma unroll
  for (int i = 0; i < decode::kMaxChannels; ++i) {
    const uint32_t value = i < a.channels ? __ldg(slots + first_slot + i) : 0;
    word[i / 2] |= value << (i % 2 * 16);
  }
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t* w = word + 4 * half;
    ptx::st_shared_v4(c.smem + kSmemChannelsQ + decode::slots_offset(thread, half),
                      make_uint4(w[0], w[1], w[2], w[3]));
  }
}

struct SoftmaxLoop {
  const Context& c;
  const AttentionParams& a;
  const int32_t thread, warp, lane;
  const float exponent_scale;
  RingState<C::kStages> keys, values;
  RingState<2> scores;
  uint32_t out_phase = 0;
  float running = -INFINITY, total = 0.0f;

  __device__ explicit SoftmaxLoop(const Context& context)
      : c(context),
        a(context.p.a),
        thread(threadIdx.x),
        warp(ptx::uniform_warp_index()),
        lane(threadIdx.x & 31),
        exponent_scale(a.logits_soft_cap > 0.0f ? kLog2e : a.sm_scale_log2) {}

  __device__ uint32_t tmem(uint32_t column) const {
    return c.tmem + column + (static_cast<uint32_t>(warp) * 32u << 16);
  }

  __device__ void wait_out() {
    ptx::mbarrier_wait(c.bar(decode::kOutFull), out_phase);
    out_phase ^= 1;
    ptx::tmem_fence_after_sync();
  }

  __device__ void finish_scores(float (&x)[kKeys], const Row& r, int32_t first_key, bool masked) {
    if (c.p.delta_heads > 0) {
      const uint4* delta = reinterpret_cast<const uint4*>(c.base + c.delta(keys.index) +
                                                          (r.in_group * kBlock + warp * kKeys) * 2);
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        const uint4 d = delta[i];
        const uint32_t w[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[8 * i + 2 * k] += decode::bf16_to_float(w[k] & 0xffffu);
          x[8 * i + 2 * k + 1] += __uint_as_float(w[k] & 0xffff0000u);
        }
      }
    }
    if (a.logits_soft_cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        x[i] = soft_cap(x[i] + r.row_term, a.logits_soft_cap, a.soft_cap_ratio);
      }
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int32_t key = first_key + i;
        x[i] = key >= r.keys.begin && key < r.keys.end ? x[i] : -INFINITY;
      }
    }
  }

  __device__ void rescale_out(float alpha) {
    if (__ballot_sync(0xffffffffu, alpha != 1.0f) == 0) return;
#pragma unroll 1
    for (uint32_t first = 0; first < kDim; first += 32) {
      uint32_t o[32];
      ptx::tmem_ld_x32(o, tmem(kTmemOut + first));
      ptx::tmem_wait_ld();
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] = __float_as_uint(__uint_as_float(o[i]) * alpha);
      ptx::tmem_st_x32(tmem(kTmemOut + first), o);
    }
  }

  __device__ void run_block(const Tile& t, const Row& r, int32_t block_begin, bool first_block) {
    if (c.p.delta_heads > 0) ptx::mbarrier_wait(c.bar(decode::kKeysFull + keys.index), keys.phase);
    decode::clear_hidden_values<kDim>(c, t, values, block_begin, thread);
    ptx::mbarrier_wait(c.bar(decode::kScoresFull + scores.index), scores.phase);
    ptx::tmem_fence_after_sync();
    uint32_t raw[kKeys];
    ptx::tmem_ld_x32(raw, tmem(kTmemScores + kBlock * scores.index + kKeys * warp));
    ptx::tmem_wait_ld();
    float x[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) x[i] = __uint_as_float(raw[i]);
    const bool masked = block_begin < t.inner.begin || block_begin + kBlock > t.inner.end;
    finish_scores(x, r, block_begin + kKeys * warp, masked);

    float peak = running;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) peak = fmaxf(peak, x[i]);
    const float anchor = peak == -INFINITY ? 0.0f : peak;
    const float alpha = peak == running ? 1.0f : ptx::ex2(exponent_scale * (running - anchor));
    running = peak;
    float sum = 0.0f;
    uint32_t codes[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys; i += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        x[i + k] = ptx::ex2(exponent_scale * (x[i + k] - anchor));
        sum += x[i + k];
      }
      constexpr float kScaleP = decode::kScaleP;
      codes[i / 4] = ptx::cvt_e4m3x4(kScaleP * x[i], kScaleP * x[i + 1], kScaleP * x[i + 2],
                                     kScaleP * x[i + 3]);
    }
    total = alpha * total + sum;
    if (!first_block) {
      wait_out();
      rescale_out(alpha);
    }
    ptx::tmem_st_x8(tmem(kTmemProbs + kKeys / 4 * warp), codes);
    ptx::tmem_wait_st();
    ptx::tmem_fence_before_sync();
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive(c.bar(decode::kProbsFull));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(c.bar(B::kKeysEmpty + keys.index));
    keys.advance();
    values.advance();
    scores.advance();
  }
};

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode_rows
