// SPDX-License-Identifier: Apache-2.0
// A work item as the warps of the SM90 decode kernel walk it.
#pragma once

#include "mpfa/sm90/decode/config.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

struct Tile {
  WorkItem item;  // request -1: there is no more
  int32_t pass;
  RowPacking packing;
  MaskParams mask;
  int32_t first_token;  // of the batch
  int32_t first_page;   // of the request in kv_indices
  int32_t last_page;    // counted from first_page
  KeyRange inner;       // keys that every column sees
  KeyRange outer;       // keys that some column sees

  // Blocks [first_block, end_block) hold the visible keys.
  __device__ int32_t first_block() const { return outer.begin / kBlock; }
  __device__ int32_t end_block() const {
    return outer.begin < outer.end ? (outer.end + kBlock - 1) / kBlock : 0;
  }
  template <class C>
  __device__ int32_t passes() const {
    return (packing.rows + C::kColumns - 1) / C::kColumns;
  }
  // Heads whose Delta a pass reads: all, unless they are more than its columns (then a tile has one
  // query token and its columns are heads).
  template <class C>
  __device__ int32_t first_delta_head() const {
    return packing.heads > C::kColumns ? pass * C::kColumns : 0;
  }
  template <class C>
  __device__ int32_t delta_heads() const {
    const int32_t left = packing.heads - first_delta_head<C>();
    return left < C::kColumns ? left : C::kColumns;
  }
};

__device__ __forceinline__ Tile make_tile(const AttentionParams& a, const WorkItem& item,
                                          int32_t heads_per_group) {
  const int32_t q_begin = __ldg(a.plan.qo_indptr + item.request);
  const int32_t qo_len = __ldg(a.plan.qo_indptr + item.request + 1) - q_begin;
  Tile t;
  t.item = item;
  t.pass = 0;
  t.packing = row_packing(item, heads_per_group, a.group_size);
  t.mask = {__ldg(a.plan.kv_len + item.request) - qo_len, item.kv_begin, item.kv_end, a.window_left,
            a.causal != 0};
  t.first_token = q_begin + item.q_begin;
  t.first_page = __ldg(a.plan.kv_indptr + item.request);
  t.last_page = __ldg(a.plan.kv_indptr + item.request + 1) - 1 - t.first_page;
  const int32_t last = item.q_begin + item.q_len - 1;
  t.inner = keys_visible_to_all(t.mask, item.q_begin, last);
  t.outer = {visible_keys(t.mask, item.q_begin).begin, visible_keys(t.mask, last).end};
  return t;
}

template <class C>
struct Statistics {
  float peak[C::kColumns][C::kWarps];   // m
  float total[C::kColumns][C::kWarps];  // l of a warp's keys
};

// What the warps of a CTA tell each other, and the columns of the current pass.
template <class C>
struct Tables {
  Statistics<C> statistics[2];  // of passes in turn
  Tile tile[kTileSlots];
  float factor[C::kColumns];  // S = factor * accumulator
  float row_term[C::kColumns];
  int32_t token[C::kColumns];     // inside the tile
  int32_t head[C::kColumns];      // of the batch
  uint2 channels[C::kTiles][32];  // of Q, B fragments of bf16
};

template <class C>
struct Smem {
  static constexpr uint32_t kV = 0;
  static constexpr uint32_t kK = kV + C::kStages * C::kBytesV;
  static constexpr uint32_t kScale = kK + C::kStages * C::kBytesK;
  static constexpr uint32_t kBarriers = kScale + C::kStages * C::kBytesScale;
  static constexpr uint32_t kTables = align_up(kBarriers + 8 * Barriers<C>::kCount, 16);
  // B fragments of Q: [k step][column tile][lane] of two words.
  static constexpr uint32_t kQuery = align_up(kTables + sizeof(Tables<C>), 128);
  static constexpr uint32_t kMerge = kQuery + C::kColumns * C::kHeadDim * 2;
  static constexpr uint32_t kSide = kMerge + C::kWarps * C::kMergeColumns * C::kHeadDim * 4;
  static_assert(kK % 1024 == 0, "operands are aligned to their swizzle pattern");
  static constexpr uint32_t bytes(uint32_t side) { return kSide + C::kStages * side; }
};

// Calls body(tile) for each pass of each item of this worker that holds work.
template <class C, class Body>
__device__ __forceinline__ void for_each_pass(const AttentionParams& a, Body&& body) {
  const int32_t heads_per_group = __ldg(&a.plan.header->heads_per_group);
  const int32_t end = __ldg(a.plan.worker_indptr + blockIdx.x + 1);
  for (int32_t i = __ldg(a.plan.worker_indptr + blockIdx.x); i < end; ++i) {
    const WorkItem item = load_item(a.plan.items, i);
    if (item.request < 0) continue;
    Tile tile = make_tile(a, item, heads_per_group);
    const int32_t passes = tile.template passes<C>();
    for (; tile.pass < passes; ++tile.pass) body(tile);
  }
}

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
