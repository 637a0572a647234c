// SPDX-License-Identifier: Apache-2.0
// Plain data that the host planner writes and kernels read. No CUDA and no torch in here.
#pragma once

#include <cstdint>

namespace mpfa {

enum class PlanMode : int32_t { kPrefill = 0, kDecode = 1 };

// One unit of work of one KV head: a q tile of one head group over one KV partition.
// KV heads are a grid dimension and do not appear here.
struct WorkItem {
  int32_t request;     // row of the indptr arrays; -1 = padding, nothing to do
  int32_t q_begin;     // first query token of the tile, counted inside the request
  int32_t q_len;       // query tokens in the tile, 1..q_tile_tokens
  int32_t head_group;  // query heads [head_group, head_group + 1) * heads_per_group of the KV head
  int32_t kv_begin;    // first KV token, from the request's token 0; a multiple of kv_block
  int32_t kv_end;  // one past the last KV token, not rounded; 0 with kv_begin 0 = no visible key
  int32_t partial_row;     // row of query token 0 of the tile in the partial buffers; -1 = final
  int32_t partial_stride;  // rows between query tokens = partitions of the tile; 0 = final
};
static_assert(sizeof(WorkItem) == 32, "kernels load a work item as two 16-byte vectors");

// First section of the metadata. A kernel captured in a graph reads these, because a later plan
// may change them while the launch parameters stay.
struct PlanHeader {
  int32_t version;  // kPlanVersion
  int32_t mode;     // PlanMode
  int32_t batch_size;
  int32_t nnz_qo;  // query tokens
  int32_t num_items;
  int32_t num_workers;  // per KV head
  int32_t num_partial_rows;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;  // 0 = ragged
  int32_t causal;
  int32_t window_left;  // -1 = no window
  int32_t q_tile_tokens;
  int32_t heads_per_group;
  int32_t num_head_groups;  // per KV head
  int32_t kv_block;
  int32_t partition_tokens;  // 0 = never split
  int32_t max_page_id;       // -1 = no pages
  int32_t reserved[45];
};
static_assert(sizeof(PlanHeader) == 256, "the header fills exactly one aligned section");

constexpr int32_t kPlanVersion = 2;
constexpr int64_t kSectionAlignment = 256;
// Tokens of one MXFP8 block of V, of which kVBlockIndptr counts the rows.
constexpr int64_t kVBlockTokens = 32;

// Sections in memory order. Everything before kPartialO is the metadata, which is
// uploaded with one copy.
enum Section : int {
  kHeader = 0,
  kQoIndptr,
  kKvIndptr,
  kKvLen,
  kVBlockIndptr,  // ragged: running sum of ceil(kv_len / 32), the v_scale rows of MXFP8
  kKvIndices,
  kItems,
  kWorkerIndptr,
  kMergeIndptr,
  kPartialO,    // float [rows, num_qo_heads, head_dim]
  kPartialLse,  // float [rows, num_qo_heads]
  kNumSections,
};

}  // namespace mpfa
