// SPDX-License-Identifier: Apache-2.0
// Channel warps: compensation channels of K from the page's order to the order of an MMA operand.
//
// why: rows of c <= 16 values are 2c bytes apart in the page, which no descriptor and, for odd c,
// no tensor map describes. Two warps move a block in about 60 instructions each; a dot product in
// the softmax would cost every softmax warp more than 500.
#pragma once

#include "mpfa/ptx/fence.cuh"
#include "mpfa/sm100/decode/context.cuh"

namespace mpfa::sm100::decode {

constexpr uint32_t kChannelBarrier = 2;  // named barrier of the two warps

template <int D>
__device__ __forceinline__ void channel_loop(const Context<D>& c) {
  const AttentionParams& a = c.p.a;
  if (a.channels == 0) return;
  constexpr int kRows = kBlock / kChannelThreads;
  const int32_t thread = threadIdx.x - 32 * kChannelWarp;
  RingState<Config<D>::kStages> ring;
  for_each_item(a.plan, [&](const WorkItem& item) {
    for (int32_t b = num_blocks(item); b > 0; --b) {
      ptx::mbarrier_wait(c.bar(kKeysFull + ring.index), ring.phase);
      const uint32_t stage = c.channels(ring.index);
      const uint16_t* values = reinterpret_cast<const uint16_t*>(c.base + stage);
      uint32_t word[kRows][8] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint16_t* row = values + (thread + r * kChannelThreads) * a.channels;
#pragma unroll
        for (int i = 0; i < kMaxChannels; ++i) {
          if (i < a.channels) word[r][i / 2] |= static_cast<uint32_t>(row[i]) << (i % 2 * 16);
        }
      }
      // In place: everything is read before anything is written.
      ptx::named_barrier_sync(kChannelBarrier, kChannelThreads);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t* w = word[r] + 4 * half;
          ptx::st_shared_v4(c.smem + stage + slots_offset(thread + r * kChannelThreads, half),
                            make_uint4(w[0], w[1], w[2], w[3]));
        }
      }
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(c.bar(Barriers<D>::kChannelsFull + ring.index));
      ring.advance();
    }
  });
}

}  // namespace mpfa::sm100::decode
