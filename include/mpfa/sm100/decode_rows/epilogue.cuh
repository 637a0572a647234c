// SPDX-License-Identifier: Apache-2.0
// End of an item: the four states of each row become one, which goes to the output or the partials.
#pragma once

#include "mpfa/sm100/decode/epilogue.cuh"
#include "mpfa/sm100/decode_rows/softmax.cuh"

namespace mpfa::sm100::decode_rows {

#if MPFA_HAS_TCGEN05

__device__ __forceinline__ State& state(const Context& c) {
  return *reinterpret_cast<State*>(c.base + decode::Smem<kDim>::kState);
}

// Lane l of warp 0 merges the statistics of pair l.
__device__ __forceinline__ void merge_statistics(const SoftmaxLoop& loop, const WorkItem& item,
                                                 const Tile& t, const Row& r) {
  State& s = state(loop.c);
  if (loop.warp != 0 || loop.lane >= t.packing.rows) return;
  const int32_t pair = loop.lane;
  float running = s.running[0][pair];
#pragma unroll
  for (int w = 1; w < kSoftmaxWarps; ++w) running = fmaxf(running, s.running[w][pair]);
  const float anchor = running == -INFINITY ? 0.0f : running;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kSoftmaxWarps; ++w) {
    const float weight = ptx::ex2(loop.exponent_scale * (s.running[w][pair] - anchor));
    s.weight[w][pair] = weight;
    total += weight * s.total[w][pair];
  }
  float keep = 1.0f;
  decode::finish_row(loop.a, item, t, pair, r.head, r.row_term,
                     total == 0.0f ? -INFINITY : loop.exponent_scale * running + log2f(total),
                     &keep);
  s.divisor[pair] = decode::kScaleP * total;
  s.keep[pair] = keep;
}

__device__ __forceinline__ void finish_item(SoftmaxLoop& loop, const WorkItem& item, const Tile& t,
                                            const Row& r, bool empty) {
  State& s = state(loop.c);
  s.running[loop.warp][loop.lane] = loop.running;
  s.total[loop.warp][loop.lane] = loop.total;
  decode::softmax_sync();
  merge_statistics(loop, item, t, r);
  decode::softmax_sync();
  if (!empty) loop.wait_out();
  float* buffer = reinterpret_cast<float*>(loop.c.base + kSmemQ);  // [warp][row][16]
  for (int32_t first = 0; first < kDim; first += kMergeColumns) {
    float o[kMergeColumns] = {};
    if (!empty) decode::load_tmem(o, loop.tmem(kTmemOut + first));
    // Replicas of a pair hold the same values; the first of them counts.
    const float weight = loop.lane < t.packing.rows ? s.weight[loop.warp][loop.lane] : 0.0f;
    float* mine = buffer + (loop.warp * kMaxRows + loop.lane) * kMergeColumns;
#pragma unroll
    for (int i = 0; i < kMergeColumns; ++i) mine[i] = weight == 0.0f ? 0.0f : weight * o[i];
    decode::softmax_sync();
    for (int32_t i = loop.thread; i < t.packing.rows * kMergeColumns; i += kSoftmaxThreads) {
      const int32_t pair = i / kMergeColumns;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kSoftmaxWarps; ++w) sum += buffer[w * kMaxRows * kMergeColumns + i];
      const float divisor = s.divisor[pair];
      float y = divisor == 0.0f ? 0.0f : __fdiv_rn(sum, divisor);
      if (loop.a.sinks != nullptr) y *= s.keep[pair];
      decode::store_value<kDim>(loop.c, item, t, pair, first + i % kMergeColumns, y);
    }
    decode::softmax_sync();
  }
  ptx::tmem_fence_before_sync();
}

__device__ __forceinline__ void softmax_loop(const Context& c) {
  const int32_t heads_per_group = __ldg(&c.p.a.plan.header->heads_per_group);
  SoftmaxLoop loop(c);
  decode::for_each_item(c.p.a.plan, [&](const WorkItem& item) {
    const Tile t = decode::make_tile(c, item, heads_per_group);
    if (t.packing.rows > kMaxRows) __trap();  // a plan made for another kernel
    const Row r = make_row(c, item, t, loop.lane);
    const int32_t blocks = decode::num_blocks(item);
    loop.running = -INFINITY;
    loop.total = 0.0f;
    if (blocks > 0) {
      write_query(c, r, loop.thread);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(c.bar(decode::kQueryFull));
    }
    for (int32_t j = 0; j < blocks; ++j) {
      loop.run_block(t, r, item.kv_begin + (blocks - 1 - j) * kBlock, j == 0);
    }
    finish_item(loop, item, t, r, blocks == 0);
  });
}

#endif  // MPFA_HAS_TCGEN05

}  // namespace mpfa::sm100::decode_rows
