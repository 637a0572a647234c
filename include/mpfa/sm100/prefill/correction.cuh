// SPDX-License-Identifier: Apache-2.0
// The correction role rescales O between blocks and finishes rows; the epilogue role stores them.
#pragma once

#include <cstdint>

#include "mpfa/core/sink.cuh"
#include "mpfa/ptx/f32x2.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tcgen05.cuh"
#include "mpfa/ptx/tma.cuh"
#include "mpfa/sm100/prefill/softmax.cuh"
#include "mpfa/sm100/prefill/tile.cuh"

namespace mpfa::sm100::prefill {

#if defined(__CUDACC__) && MPFA_HAS_TCGEN05

// Split tiles always leave fp32 partials.
__device__ __forceinline__ OutType tile_type(const AttentionParams& p, const Tile& tile) {
  return tile.partial_row >= 0 ? OutType::kFp32 : p.out_type;
}

template <class C>
class CorrectionRole {
  using Layout = SharedLayout<C>;
  static constexpr int kChunk = 32;     // columns of O in registers at a time
  static constexpr int kOutChunk = 16;  // the same while a row is finished

 public:
  __device__ __forceinline__ explicit CorrectionRole(const Context<C>& ctx)
      : ctx_(ctx), lane_(threadIdx.x % 32), row_(threadIdx.x % kStageRows) {}

  __device__ __forceinline__ void run() {
    // O of both stages is free: the first block of the first tile.
    for (int r = 0; r < kStages; ++r) arrive(Layout::p_ready, r);
    TileWalk walk(ctx_.params);
    Tile tile;
    while (walk.next(&tile)) run_tile(tile);
  }

 private:
  __device__ __forceinline__ void arrive(int offset, int index) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ctx_.bar(offset, index));
  }

  __device__ __forceinline__ uint32_t o_address(int stage) const {
    return ctx_.tmem + C::tmem_o(0) + stage * C::kHeadDim +
           (static_cast<uint32_t>(row_ / 32 * 32) << 16);
  }

  __device__ __forceinline__ void run_tile(const Tile& tile) {
#pragma unroll 1
    for (int32_t step = tile.stages; step < tile.blocks * tile.stages; ++step) {
      rescale(tile.stages > 1 ? step & 1 : 0);
    }
#pragma unroll 1
    for (int r = 0; r < tile.stages; ++r) finish(tile, r);
  }

  // O_r *= 2^(lambda (m_old - m_new)), skipped when no row of the warp has a new maximum.
  __device__ __forceinline__ void rescale(int r) {
    rescale_.wait(ctx_.bar(Layout::rescale_full, r), r);
    const float alpha =
        __uint_as_float(ptx::ld_shared_u32(ctx_.at(Layout::rescale) + 4 * (r * kStageRows + row_)));
    if (__any_sync(0xffffffffu, alpha != 1.0f)) {
      ptx::tmem_fence_after_sync();
      const uint32_t at = o_address(r);
#pragma unroll
      for (int c = 0; c < C::kHeadDim; c += kChunk) {
        uint32_t o[kChunk];
        ptx::tmem_ld_x32(o, at + c);
        ptx::tmem_wait_ld(o);
        scale(o, alpha);
        ptx::tmem_st_x32(at + c, o);
      }
      ptx::tmem_wait_st();
      ptx::tmem_fence_before_sync();
    }
    arrive(Layout::p_ready, r);
  }

  template <int N>
  __device__ __forceinline__ static void scale(uint32_t (&o)[N], float factor) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const ptx::F32x2 x =
          ptx::mul_f32x2({__uint_as_float(o[i]), __uint_as_float(o[i + 1])}, {factor, factor});
      o[i] = __float_as_uint(x.x);
      o[i + 1] = __float_as_uint(x.y);
    }
  }

  __device__ __forceinline__ void finish(const Tile& tile, int r) {
    float sum = 0.0f, reference = 0.0f;
    if (tile.blocks > 0) {
      final_.wait(ctx_.bar(Layout::final_full, r), r);
      const uint32_t at = 4 * (r * kStageRows + row_);
      sum = __uint_as_float(ptx::ld_shared_u32(ctx_.at(Layout::row_sum) + at));
      reference = __uint_as_float(ptx::ld_shared_u32(ctx_.at(Layout::row_reference) + at));
      arrive(Layout::final_read, r);
    }
    const float factor = finish_row(tile, r, sum, reference);
    const OutType type = tile_type(ctx_.params, tile);
    out_empty_.wait(ctx_.bar(Layout::out_empty), 0);
    if (tile.blocks > 0) {
      o_full_.wait(ctx_.bar(Layout::o_full, r), r);
      ptx::tmem_fence_after_sync();
    }
#pragma unroll 1
    for (int c = 0; c < C::kHeadDim; c += kOutChunk) {
      uint32_t o[kOutChunk] = {};
      if (tile.blocks > 0) {
        ptx::tmem_ld_x16(o, o_address(r) + c);
        ptx::tmem_wait_ld(o);
        scale(o, factor);
      }
      stage_row(o, c, type);
    }
    if (tile.blocks > 0) {
      // O may be overwritten by the next tile's first block.
      ptx::tmem_fence_before_sync();
      arrive(Layout::p_ready, r);
    }
    ptx::fence_proxy_async_shared();
    arrive(Layout::out_full, 0);
  }

  __device__ __forceinline__ void stage_row(const uint32_t (&o)[kOutChunk], int column,
                                            OutType type) {
    const uint32_t row = ctx_.at(Layout::out) + row_ * C::kOutRowBytes;
    if (type == OutType::kFp32) {
#pragma unroll
      for (int i = 0; i < kOutChunk; i += 4) {
        ptx::st_shared_v4(row + 4 * (column + i), {o[i], o[i + 1], o[i + 2], o[i + 3]});
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutChunk; i += 8) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float a = __uint_as_float(o[i + 2 * k]), b = __uint_as_float(o[i + 2 * k + 1]);
        w[k] = type == OutType::kBf16 ? ptx::cvt_bf16x2(a, b) : ptx::cvt_f16x2(a, b);
      }
      ptx::st_shared_v4(row + 2 * (column + i), {w[0], w[1], w[2], w[3]});
    }
  }

  // Stores the row's LSE, reference + log2 of the sum, and returns the factor of O: 1 / sum, times
  // the sink's share.
  __device__ __forceinline__ float finish_row(const Tile& tile, int r, float sum, float reference) {
    const AttentionParams& p = ctx_.params;
    const int32_t tile_row = r * kStageRows + row_;
    if (tile_row >= tile.pack.rows) return 1.0f;
    const int32_t token = tile.pack.token(tile_row);
    const int32_t head = ctx_.kv_head * p.group_size + tile.pack.head(tile_row);
    float lse = sum == 0.0f ? kNegInf : reference + log2f(sum);
    // A row without a visible key is 0; its O is 0 too. NaN sums are not empty and go through.
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (!(fabsf(reference) < kLargestExponent)) {
      factor = kNaN;
      // why a number: beside another partition's higher scores this one weighs 0, and combine does
      // not read its rows; alone, its NaN rows are the result. A NaN sum is a NaN operand.
      const bool below = tile.partial_row >= 0 && reference < 0.0f && sum == sum;
      lse = below ? reference : kNaN;
    }
    if (tile.partial_row >= 0) {
      const int64_t row = tile.partial_row + static_cast<int64_t>(token) * tile.partial_stride;
      p.partial_lse[row * p.num_qo_heads + head] = lse;
      return factor;
    }
    const int32_t q_row = tile.q_first + token;
    // The row term cancels in the softmax; under a soft cap it entered the scores instead.
    if (p.row_term.data != nullptr && !(p.logits_soft_cap > 0.0f)) {
      lse += p.sm_scale_log2 * __ldg(reinterpret_cast<const float*>(p.row_term.row(q_row, head)));
    }
    if (p.sinks != nullptr) {
      const SinkResult joined = join_sink(lse, __ldg(p.sinks + head));
      factor *= joined.keep;
      lse = joined.lse;
    }
    p.lse[q_row * p.lse_token + head * p.lse_head] = lse;
    return factor;
  }

  const Context<C>& ctx_;
  const int lane_;
  const int row_;
  PhaseCounters rescale_, final_, o_full_, out_empty_{1};
};

// One warp: a bulk copy for every row of the tile, so rows may lie anywhere.
template <class C>
__device__ __forceinline__ void epilogue_role(const Context<C>& ctx) {
  using Layout = SharedLayout<C>;
  const AttentionParams& p = ctx.params;
  const int lane = threadIdx.x % 32;
  PhaseCounters full;
  TileWalk walk(p);
  Tile tile;
  while (walk.next(&tile)) {
    const uint32_t row_bytes = C::kHeadDim * (tile_type(p, tile) == OutType::kFp32 ? 4u : 2u);
#pragma unroll 1
    for (int r = 0; r < tile.stages; ++r) {
      full.wait(ctx.bar(Layout::out_full), 0);
      for (int row = lane; row < kStageRows; row += 32) {
        const int32_t tile_row = r * kStageRows + row;
        if (tile_row >= tile.pack.rows) break;
        const int32_t token = tile.pack.token(tile_row);
        const int32_t head = ctx.kv_head * p.group_size + tile.pack.head(tile_row);
        void* to;
        if (tile.partial_row >= 0) {
          const int64_t at = tile.partial_row + static_cast<int64_t>(token) * tile.partial_stride;
          to = p.partial_o + (at * p.num_qo_heads + head) * C::kHeadDim;
        } else {
          to = p.out + (tile.q_first + token) * p.out_token + head * p.out_head;
        }
        ptx::bulk_store(to, ctx.at(Layout::out) + row * C::kOutRowBytes, row_bytes);
      }
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ctx.bar(Layout::out_empty));
    }
  }
}

#endif

}  // namespace mpfa::sm100::prefill
