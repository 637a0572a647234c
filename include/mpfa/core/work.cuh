// SPDX-License-Identifier: Apache-2.0
// Work items of the plan as kernels read them, and the packing of query tokens and heads into rows.
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"
#include "mpfa/plan/plan.h"

namespace mpfa {

// Views of the plan's metadata (include/mpfa/plan/plan.h). Sizes that a later plan() may change
// under a captured graph are read from here, never from launch parameters.
struct PlanView {
  const PlanHeader* header;
  const int32_t* qo_indptr;   // [B+1] tokens
  const int32_t* kv_indptr;   // [B+1] pages, or tokens when ragged
  const int32_t* kv_len;      // [B] tokens
  const int32_t* kv_indices;  // page ids; null when ragged
  const WorkItem* items;
  const int32_t* worker_indptr;   // [num_workers+1]
  const int32_t* v_block_indptr;  // [B+1] running sum of ceil(kv_len/32); ragged MXFP8 only
};

#if defined(__CUDACC__)

__device__ __forceinline__ WorkItem load_item(const WorkItem* items, int32_t index) {
  const int4* p = reinterpret_cast<const int4*>(items + index);
  const int4 a = __ldg(p), b = __ldg(p + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

#endif  // __CUDACC__

// Rows of a tile: row r = i * heads + h, i the query token inside the tile, h the head inside the
// head group. `heads` is the number of heads that the group really has.
struct RowPacking {
  int32_t heads;       // 1..heads_per_group
  int32_t first_head;  // of the group, inside the KV head's query heads
  int32_t rows;        // q_len * heads

  MPFA_HOST_DEVICE int32_t token(int32_t row) const { return heads == 1 ? row : row / heads; }
  MPFA_HOST_DEVICE int32_t head(int32_t row) const {
    return first_head + (heads == 1 ? 0 : row % heads);
  }
};

MPFA_HOST_DEVICE inline RowPacking row_packing(const WorkItem& item, int32_t heads_per_group,
                                               int32_t gqa) {
  const int32_t first = item.head_group * heads_per_group;
  const int32_t heads = heads_per_group < gqa - first ? heads_per_group : gqa - first;
  return {heads, first, item.q_len * heads};
}

}  // namespace mpfa
