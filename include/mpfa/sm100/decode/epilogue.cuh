// SPDX-License-Identifier: Apache-2.0
// End of an item: O / l to the output or the partial buffers, and the log-sum-exp.
#pragma once

#include "mpfa/core/sink.cuh"
#include "mpfa/sm100/decode/softmax.cuh"

namespace mpfa::sm100::decode {

#if MPFA_HAS_TCGEN05

// Writes the LSE of a row (pair `pair` of the tile, query head `head` of the batch); `keep` becomes
// what a sink leaves of its output.
__device__ __forceinline__ void finish_row(const AttentionParams& a, const WorkItem& item,
                                           const Tile& t, int32_t pair, int32_t head,
                                           float row_term, float lse, float* keep) {
  const int32_t i = t.packing.token(pair);
  if (item.partial_row >= 0) {
    const int64_t row = item.partial_row + static_cast<int64_t>(i) * item.partial_stride;
    a.partial_lse[row * a.num_qo_heads + head] = lse;
    return;
  }
  if (a.logits_soft_cap == 0.0f) lse += a.sm_scale_log2 * row_term;
  if (a.sinks != nullptr) {
    const SinkResult joined = join_sink(lse, __ldg(a.sinks + head));
    lse = joined.lse;
    *keep = joined.keep;
  }
  a.lse[(t.first_token + i) * a.lse_token + head * a.lse_head] = lse;
}

// Thread n finishes column n: its LSE goes out, the divisor of its outputs to the other threads.
template <int D>
__device__ __forceinline__ void finish_column(const SoftmaxLoop<D>& loop, const WorkItem& item,
                                              const Tile& t) {
  const int32_t column = loop.thread;
  if (column >= t.packing.rows) return;
  SoftmaxState& s = loop.c.state();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kSoftmaxWarps; ++w) total += s.total[w][column];
  // A NaN among the inputs is not an empty column: it must reach the output.
  const float lse =
      total == 0.0f ? -INFINITY : loop.exponent_scale * s.running[0][column] + log2f(total);
  float keep = 1.0f;
  finish_row(loop.a, item, t, column, query_head(loop.c, t.packing, column), s.row_term[column],
             lse, &keep);
  s.divisor[column] = kScaleP * total;
  s.keep[column] = keep;
}

template <int D>
__device__ __forceinline__ void store_value(const Context<D>& c, const WorkItem& item,
                                            const Tile& t, int32_t column, int32_t d, float y) {
  const AttentionParams& a = c.p.a;
  const int32_t head = query_head(c, t.packing, column);
  const int32_t i = t.packing.token(column);
  if (item.partial_row >= 0) {
    const int64_t row = item.partial_row + static_cast<int64_t>(i) * item.partial_stride;
    a.partial_o[(row * a.num_qo_heads + head) * D + d] = y;
    return;
  }
  uint8_t* out = a.out + (t.first_token + i) * a.out_token + head * a.out_head;
  if (a.out_type == OutType::kFp32) {
    reinterpret_cast<float*>(out)[d] = y;
  } else {
    reinterpret_cast<uint16_t*>(out)[d] =
        a.out_type == OutType::kBf16 ? ptx::cvt_rn_bf16(y) : ptx::cvt_rn_f16(y);
  }
}

// `empty`: no block was computed and O holds nothing.
template <int D>
__device__ __forceinline__ void finish_item(SoftmaxLoop<D>& loop, const WorkItem& item,
                                            const Tile& t, bool empty) {
  SoftmaxState& s = loop.c.state();
  softmax_sync();
  finish_column(loop, item, t);
  softmax_sync();
  if (!empty) loop.wait_out();
  // With M = 64 the accumulator takes the first 16 lanes of each warp.
  const int32_t d = D == 128 ? loop.thread : 16 * loop.warp + loop.lane;
  const bool stores = D == 128 || loop.lane < 16;
  constexpr int kStep = 8;
  for (int32_t first = 0; first < t.packing.rows; first += kStep) {
    float o[kStep] = {};
    if (!empty) load_tmem(o, loop.tmem(kTmemOut + first));
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int32_t column = first + i;
      if (column < t.packing.rows && stores) {
        // A column without keys has l = 0 and as O, a sum over garbage, anything.
        const float divisor = s.divisor[column];
        float y = divisor == 0.0f ? 0.0f : __fdiv_rn(o[i], divisor);
        if (loop.a.sinks != nullptr) y *= s.keep[column];
        store_value(loop.c, item, t, column, d, y);
      }
    }
  }
  ptx::tmem_fence_before_sync();
}

template <int D>
__device__ __forceinline__ void softmax_loop(const Context<D>& c) {
  const int32_t heads_per_group = __ldg(&c.p.a.plan.header->heads_per_group);
  SoftmaxLoop<D> loop(c);
  for_each_item(c.p.a.plan, [&](const WorkItem& item) {
    const Tile t = make_tile(c, item, heads_per_group);
    const int32_t blocks = num_blocks(item);
    // invariant: the tables of the item before were last read ahead of the barriers in finish_item,
    // and these are first read behind scores that all of kQueryFull's arrivals precede.
    write_tables(c, item, t, loop.thread);
    if (blocks > 0) {
      // Q of the item before is free: its last scores have been seen.
      write_query(c, t, loop.thread);
      if (c.p.a.channels > 0) write_query_channels(c, t, loop.thread);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(c.bar(kQueryFull));
    }
    for (int32_t j = 0; j < blocks; ++j) {
      loop.run_block(t, item.kv_begin + (blocks - 1 - j) * kBlock, j == 0);
    }
    finish_item(loop, item, t, blocks == 0);
  });
}

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode
