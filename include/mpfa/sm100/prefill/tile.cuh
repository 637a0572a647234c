// SPDX-License-Identifier: Apache-2.0
// One work item as every role of the kernel sees it, and the walk over a worker's items.
#pragma once

#include <cstdint>

#include "mpfa/core/attention.h"
#include "mpfa/core/mask.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/sm100/prefill/config.h"

namespace mpfa::sm100::prefill {

// Kernel parameter. A box of a map holds one head's rows of a page, 128 rows when ragged.
struct PrefillParams {
  TensorMap k_map;
  TensorMap v_map;
  AttentionParams attention;
};

#if defined(__CUDACC__)

// invariant: all roles derive stages and blocks of a tile from the same words of the plan; a tile
// with blocks == 0 passes no barrier except those of the epilogue.
struct Tile {
  RowPacking pack;
  MaskParams mask;
  int32_t request;
  int32_t q_begin;  // inside the request
  int32_t q_len;
  int32_t q_first;  // row of q and out of the tile's first token
  int32_t kv_len;
  int32_t blocks;
  int32_t stages;  // 1 when all rows fit into the first
  int32_t partial_row;
  int32_t partial_stride;

  // First key of the block at step j: blocks are walked last to first.
  __device__ __forceinline__ int32_t block_begin(int32_t j) const {
    return mask.kv_begin + (blocks - 1 - j) * kKvBlock;
  }
};

class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const AttentionParams& p)
      : p_(p),
        heads_per_group_(__ldg(&p.plan.header->heads_per_group)),
        next_(__ldg(p.plan.worker_indptr + blockIdx.x)),
        end_(__ldg(p.plan.worker_indptr + blockIdx.x + 1)) {}

  __device__ __forceinline__ bool next(Tile* t) {
    while (next_ < end_) {
      const WorkItem item = load_item(p_.plan.items, next_++);
      if (item.request < 0) continue;
      const int32_t qo_begin = __ldg(p_.plan.qo_indptr + item.request);
      const int32_t qo_end = __ldg(p_.plan.qo_indptr + item.request + 1);
      t->kv_len = __ldg(p_.plan.kv_len + item.request);
      t->pack = row_packing(item, heads_per_group_, p_.group_size);
      t->request = item.request;
      t->q_begin = item.q_begin;
      t->q_len = item.q_len;
      t->q_first = qo_begin + item.q_begin;
      t->mask = {t->kv_len - (qo_end - qo_begin), item.kv_begin, item.kv_end, p_.window_left,
                 p_.causal != 0};
      t->blocks = ceil_div(item.kv_end - item.kv_begin, kKvBlock);
      t->stages = t->pack.rows > kStageRows ? kStages : 1;
      t->partial_row = item.partial_row;
      t->partial_stride = item.partial_stride;
      return true;
    }
    return false;
  }

 private:
  const AttentionParams& p_;
  int32_t heads_per_group_;
  int32_t next_;
  int32_t end_;
};

// The addresses that all roles share.
template <class C>
struct Context {
  using Layout = SharedLayout<C>;
  const AttentionParams& params;
  const TensorMap& k_map;
  const TensorMap& v_map;
  uint32_t shared;  // of SharedLayout offset 0
  uint32_t tmem;
  int32_t kv_head;

  __device__ __forceinline__ uint32_t at(int offset) const { return shared + offset; }
  __device__ __forceinline__ uint32_t bar(int offset, int index = 0) const {
    return shared + offset + 8 * index;
  }
};

// Parities of the next phases that a role waits for, bit i for barrier i of a kind. A role that
// waits for "free" starts with ones: a fresh barrier lets parity 1 pass.
struct PhaseCounters {
  uint32_t parities = 0;
  __device__ __forceinline__ void wait(uint32_t bar, int index) {
    ptx::mbarrier_wait(bar, parities >> index & 1);
    parities ^= 1u << index;
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm100::prefill
