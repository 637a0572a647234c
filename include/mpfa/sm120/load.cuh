// SPDX-License-Identifier: Apache-2.0
// The producer warp: K and V by TMA, scales through registers, one ring stage per KV block.
#pragma once

#include "mpfa/core/mask.cuh"
#include "mpfa/core/ring.cuh"
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tma.cuh"
#include "mpfa/sm120/config.h"

namespace mpfa::sm120 {

#if defined(__CUDACC__)

// Where the keys of one request lie.
struct KvSource {
  const int32_t* pages;  // page ids of the request; ragged: null
  int32_t first_row;     // ragged: token of the batch at which the request starts
  int32_t first_block;   // ragged: row of v_scale
  int32_t kv_len;
  int32_t begin;  // first key that a row of the tile sees
};

// First key that the tile's first row sees; the rows below see none before it. Pages in front of it
// may have been given away.
__device__ __forceinline__ int32_t first_visible_key(const PlanView& plan, const WorkItem& item,
                                                     int32_t kv_len) {
  const int32_t qo_len =
      __ldg(plan.qo_indptr + item.request + 1) - __ldg(plan.qo_indptr + item.request);
  const MaskParams mask = {kv_len - qo_len, item.kv_begin, item.kv_end,
                           __ldg(&plan.header->window_left), false};
  return visible_keys(mask, item.q_begin).begin;
}

__device__ __forceinline__ KvSource kv_source(const Params& p, const WorkItem& item) {
  const PlanView& plan = p.attention.plan;
  const int32_t request = item.request;
  const int32_t start = __ldg(plan.kv_indptr + request);
  const int32_t kv_len = __ldg(plan.kv_len + request);
  const int32_t begin = first_visible_key(plan, item, kv_len);
  if (plan.kv_indices == nullptr) {
    return {nullptr, start, __ldg(plan.v_block_indptr + request), kv_len, begin};
  }
  return {plan.kv_indices + start, 0, 0, kv_len, begin};
}

// Page of a token. Tokens past the end take the last page: their rows are masked and cleared, but
// the copy must come from somewhere.
__device__ __forceinline__ int32_t page_of(const Params& p, const KvSource& kv, int32_t token) {
  if (kv.pages == nullptr) return 0;
  return __ldg(kv.pages + (min(token, kv.kv_len - 1) >> p.page_shift));
}

template <class C>
struct Producer {
  static constexpr int kTokenGroups = C::kKvBlock / 32;
  using KeyScale = typename C::KeyScale;

  const Params& p;
  SharedMemory<C>& shared;
  const int lane;
  const int kv_head;
  RingState<C::kStages> ring;
  uint32_t tail_phase = 0;

  KeyScale key_scale[kTokenGroups];       // token 32 i + lane
  uint32_t value_scale[C::kTokenBlocks];  // channels 4 lane .. 4 lane + 3 of token block i

  // why registers and not asynchronous copies: a K scale row of head_dim 64 has two bytes, V's
  // scales are transposed here, and blocks without a visible token get scale 1 whatever memory
  // holds.
  __device__ __forceinline__ void load_scales(const KvSource& kv, int32_t first) {
    const AttentionParams& a = p.attention;
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) {
      const int32_t block_token = first + 32 * i, token = block_token + lane;
      const int32_t page = page_of(p, kv, block_token);
      const bool readable = static_cast<uint32_t>(page) < static_cast<uint32_t>(p.num_pages);
      key_scale[i] = static_cast<KeyScale>(0x7f7f7f7f);
      if (token < kv.kv_len && readable) {
        const uint8_t* row = a.k_scale.at(page, kv_head, kv.first_row + (token & p.page_mask));
        key_scale[i] = __ldg(reinterpret_cast<const KeyScale*>(row));
      }
      value_scale[i] = 0x7f7f7f7f;
      if (block_token < kv.kv_len && block_token + 32 > kv.begin && readable &&
          4 * lane < C::kHeadDim) {
        const int32_t row = kv.first_block + ((block_token & p.page_mask) >> 5);
        value_scale[i] =
            __ldg(reinterpret_cast<const uint32_t*>(a.v_scale.at(page, kv_head, row)) + lane);
      }
    }
  }

  __device__ __forceinline__ void store_scales() {
    KeyScale* k = reinterpret_cast<KeyScale*>(shared.k_scale[ring.index]);
#pragma unroll
    for (int i = 0; i < kTokenGroups; ++i) k[32 * i + lane] = key_scale[i];
    if (4 * lane >= C::kHeadDim) return;
    // Bytes [block][channel] to [channel][block].
    const uint32_t low = __byte_perm(value_scale[0], value_scale[1], 0x5140);
    const uint32_t high = __byte_perm(value_scale[0], value_scale[1], 0x7362);
    uint8_t* v = shared.v_scale[ring.index] + 4 * lane * C::kTokenBlocks;
    if constexpr (C::kTokenBlocks == 2) {
      *reinterpret_cast<uint2*>(v) = make_uint2(low, high);
    } else {
      const uint32_t low2 = __byte_perm(value_scale[2], value_scale[3], 0x5140);
      const uint32_t high2 = __byte_perm(value_scale[2], value_scale[3], 0x7362);
      *reinterpret_cast<uint4*>(v) =
          make_uint4(__byte_perm(low, low2, 0x5410), __byte_perm(low, low2, 0x7632),
                     __byte_perm(high, high2, 0x5410), __byte_perm(high, high2, 0x7632));
    }
  }

  // One lane: K and V of the block, completing on `bar`.
  __device__ __forceinline__ void copy_operands(const KvSource& kv, int32_t first, uint32_t bar) {
    const uint32_t k = ptx::smem_address(shared.k[ring.index]);
    const uint32_t v = ptx::smem_address(shared.v[ring.index]);
    ptx::mbarrier_arrive_expect_tx(bar, 2 * C::kOperandBytes);
    for (int32_t done = 0; done < C::kKvBlock; done += p.box_rows) {
      const int32_t page = page_of(p, kv, first + done);
      const int32_t row = kv.first_row + ((first + done) & p.page_mask);
      const uint32_t offset = done * C::kHeadDim;
      ptx::tensor_load_4d(k + offset, &p.k_map, bar, 0, row, kv_head, page);
      ptx::tensor_load_4d(v + offset, &p.v_map, bar, 0, row, kv_head, page);
    }
  }

  // Rows of V outside [begin, end) of the block, past the end of the sequence or left by the
  // window, hold anything, and 0 * NaN is NaN: they become 0. K needs nothing, its scores are
  // replaced before they are used.
  __device__ __forceinline__ void clear_hidden(int32_t begin, int32_t end) {
    const uint32_t v = ptx::smem_address(shared.v[ring.index]);
    for (int32_t at = 16 * lane; at < C::kOperandBytes; at += 16 * 32) {
      const int32_t row = at / C::kHeadDim;
      if (row < begin || row >= end) ptx::st_shared_v4(v + at, make_uint4(0, 0, 0, 0));
    }
    // The next copy into this stage comes from the async proxy.
    ptx::fence_proxy_async_shared();
  }

  __device__ __forceinline__ void load_block(const KvSource& kv, int32_t first) {
    load_scales(kv, first);
    const uint32_t full = ptx::smem_address(&shared.full[ring.index]);
    ptx::mbarrier_wait(ptx::smem_address(&shared.empty[ring.index]), ring.phase ^ 1);
    store_scales();
    const bool partial = first + C::kKvBlock > kv.kv_len || first < kv.begin;
    if (partial) {
      const uint32_t bar = ptx::smem_address(&shared.tail);
      if (ptx::elect_one()) copy_operands(kv, first, bar);
      ptx::mbarrier_wait(bar, tail_phase);
      tail_phase ^= 1;
      clear_hidden(kv.begin - first, kv.kv_len - first);
    }
    __syncwarp();  // the scales (and zeros) of all lanes are before the arrival
    if (ptx::elect_one()) {
      if (partial) {
        ptx::mbarrier_arrive(full);
      } else {
        copy_operands(kv, first, full);
      }
    }
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const PlanView& plan = p.attention.plan;
    const int32_t end = __ldg(plan.worker_indptr + blockIdx.x + 1);
    for (int32_t i = __ldg(plan.worker_indptr + blockIdx.x); i < end; ++i) {
      const WorkItem item = load_item(plan.items, i);
      if (item.request < 0) continue;
      const KvSource kv = kv_source(p, item);
      for (int32_t b = ceil_div(max(item.kv_end - item.kv_begin, 0), C::kKvBlock); b-- > 0;) {
        load_block(kv, item.kv_begin + b * C::kKvBlock);
      }
    }
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm120
