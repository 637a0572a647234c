// SPDX-License-Identifier: Apache-2.0
// The planner: index arrays in, work list and workspace layout out. Pure host code; the number of
// SMs is an argument, so plans for any GPU can be made and tested anywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mpfa/base/math.h"
#include "mpfa/plan/layout.h"
#include "mpfa/plan/params.h"
#include "mpfa/plan/schedule.h"
#include "mpfa/plan/tiles.h"
#include "mpfa/plan/validate.h"

namespace mpfa {

// Memory that calls reuse. Holds no state between calls.
struct PlanScratch {
  std::vector<int32_t> kv_len;
  TileList list;
  Schedule schedule;
};

struct PlanResult {
  Layout layout;
  int64_t num_items = 0;
  int64_t num_workers = 0;
  int64_t num_partial_rows = 0;
  int64_t nnz_qo = 0;
  int64_t nnz_kv = 0;
  PageScan pages;
  Balance balance;  // empty in count-only mode
};

inline PlanHeader make_header(const PlanInput& in, const PlanResult& r) {
  const PlanParams& p = in.params;
  const auto i32 = [](int64_t v) { return static_cast<int32_t>(v); };
  PlanHeader h = {};
  h.version = kPlanVersion;
  h.mode = static_cast<int32_t>(p.mode);
  h.batch_size = i32(in.batch_size);
  h.nnz_qo = i32(r.nnz_qo);
  h.num_items = i32(r.num_items);
  h.num_workers = i32(r.num_workers);
  h.num_partial_rows = i32(r.num_partial_rows);
  h.num_qo_heads = i32(p.num_qo_heads);
  h.num_kv_heads = i32(p.num_kv_heads);
  h.head_dim = i32(p.head_dim);
  h.page_size = i32(p.page_size);
  h.causal = p.causal ? 1 : 0;
  h.window_left = i32(p.window_left);
  h.q_tile_tokens = i32(p.q_tile_tokens);
  h.heads_per_group = i32(p.heads_per_group);
  h.num_head_groups = i32(p.head_groups());
  h.kv_block = i32(p.kv_block);
  h.partition_tokens = i32(p.partition_tokens);
  h.max_page_id = i32(r.pages.max_id);
  return h;
}

// Writes `count` values at `to` and fills the section up to its size with `padding`, so that the
// uploaded bytes depend on the request alone.
inline void write_padded(int32_t* to, const int32_t* from, int64_t count, int64_t section_bytes,
                         int32_t padding) {
  if (from != nullptr && count > 0) std::memcpy(to, from, count * sizeof(int32_t));
  std::fill(to + count, to + section_bytes / static_cast<int64_t>(sizeof(int32_t)), padding);
}

// merge_indptr[t + 1] - merge_indptr[t] = partial rows of query token t, 0 where the tile wrote the
// final output. Tiles are in token order and rows were handed out in tile order.
inline void write_merge_indptr(const TileList& list, int32_t* indptr, int64_t section_bytes) {
  int32_t* out = indptr;
  int32_t row = 0;
  *out++ = 0;
  for (const Tile& tile : list.tiles) {
    const int32_t step = tile.partitions > 1 ? tile.partitions : 0;
    for (int32_t i = 0; i < tile.q_len; ++i) *out++ = row += step;
  }
  std::fill(out, indptr + section_bytes / static_cast<int64_t>(sizeof(int32_t)), row);
}

// First row of every ragged request when each has ceil(kv_len / 32) of them, and the total. Paged
// caches keep these rows in their pages: all 0, and no sum that could leave int32.
inline void write_v_block_indptr(const PlanInput& in, const std::vector<int32_t>& kv_len,
                                 int32_t* indptr, int64_t section_bytes) {
  int32_t* out = indptr;
  int32_t row = 0;
  *out++ = 0;
  for (const int32_t length : kv_len) {
    if (!in.params.paged()) row += static_cast<int32_t>(ceil_div<int64_t>(length, kVBlockTokens));
    *out++ = row;
  }
  std::fill(out, indptr + section_bytes / static_cast<int64_t>(sizeof(int32_t)), row);
}

inline void write_block(const PlanInput& in, PlanScratch* scratch, PlanResult* result,
                        uint8_t* block) {
  const Layout& layout = result->layout;
  const auto section = [&](Section s) {
    return reinterpret_cast<int32_t*>(block + layout.offset[s]);
  };
  const int64_t batch = in.batch_size;
  write_padded(section(kQoIndptr), in.qo_indptr, batch + 1, layout.size[kQoIndptr],
               in.qo_indptr[batch]);
  write_padded(section(kKvIndptr), in.kv_indptr, batch + 1, layout.size[kKvIndptr],
               in.kv_indptr[batch]);
  write_padded(section(kKvLen), scratch->kv_len.data(), batch, layout.size[kKvLen], 0);
  write_v_block_indptr(in, scratch->kv_len, section(kVBlockIndptr), layout.size[kVBlockIndptr]);
  // check_page_ids has copied the ids.
  write_padded(section(kKvIndices), nullptr, in.params.paged() ? in.kv_indptr[batch] : 0,
               layout.size[kKvIndices], 0);
  result->balance = schedule(scratch->list, result->num_workers, &scratch->schedule);
  WorkItem* items = reinterpret_cast<WorkItem*>(section(kItems));
  write_items(result->num_workers, &scratch->schedule, items, section(kWorkerIndptr));
  const int64_t capacity = layout.size[kItems] / static_cast<int64_t>(sizeof(WorkItem));
  std::fill(items + result->num_items, items + capacity, WorkItem{-1, 0, 0, 0, 0, 0, -1, 0});
  write_merge_indptr(scratch->list, section(kMergeIndptr), layout.size[kMergeIndptr]);
  // Gaps between sections are zeroed, so that equal requests give equal bytes.
  for (int s = 0; s < kPartialO; ++s) {
    uint8_t* end = block + layout.offset[s] + layout.size[s];
    std::memset(end, 0, block + layout.offset[s + 1] - end);
  }
  const PlanHeader header = make_header(in, *result);
  std::memcpy(block, &header, sizeof(header));
}

// Checks and plans. `allocate(bytes)` returns the memory for the integer block (256-byte multiples,
// aligned for int32), or nullptr to only count: then the result has every size and nothing is
// scheduled. Sizes come from the same statements either way.
template <typename Allocate>
PlanError make_plan(const PlanInput& in, Allocate&& allocate, PlanScratch* scratch,
                    PlanResult* result) {
  const PlanParams& p = in.params;
  *result = {};
  if (auto e = check_params(p)) return e;
  if (auto e = check_indptr("qo_indptr", in.qo_indptr, in.batch_size)) return e;
  if (auto e = check_indptr("kv_indptr", in.kv_indptr, in.batch_size)) return e;
  if (auto e = check_lengths(in, &scratch->kv_len, &result->nnz_kv)) return e;
  if (auto e = check_index_count(in)) return e;
  if (auto e = check_graph_limits(in)) return e;

  make_tiles(in, scratch->kv_len, &scratch->list);
  result->num_items = scratch->list.num_items;
  result->num_partial_rows = scratch->list.num_partial_rows;
  result->num_workers = p.num_workers();
  result->nnz_qo = in.qo_indptr[in.batch_size];
  const Capacity capacity = p.graph ? graph_capacity(p) : batch_capacity(in, scratch->list);
  const auto too_large = [](const char* what, int64_t count, int64_t limit) {
    return PlanError{PlanErrorCode::kCountTooLarge, what, -1, -1, count, limit};
  };
  if (capacity.items > kInt32Max) return too_large("work items", capacity.items, kInt32Max);
  if (capacity.partial_rows > kInt32Max) {
    return too_large("partial rows", capacity.partial_rows, kInt32Max);
  }
  if (scratch->list.total_cost > kMaxTotalCost) {
    return too_large("KV blocks in all items", scratch->list.total_cost, kMaxTotalCost);
  }
  // invariant: graph_capacity bounds every batch within the limits.
  if (result->num_items > capacity.items) {
    return too_large("work items (planner bug)", result->num_items, capacity.items);
  }
  if (result->num_partial_rows > capacity.partial_rows) {
    return too_large("partial rows (planner bug)", result->num_partial_rows, capacity.partial_rows);
  }
  result->layout = make_layout(p, capacity);
  uint8_t* block = allocate(result->layout.int_bytes);
  int32_t* page_ids =
      block ? reinterpret_cast<int32_t*>(block + result->layout.offset[kKvIndices]) : nullptr;
  if (auto e = check_page_ids(in, page_ids, &result->pages)) return e;
  if (block != nullptr) write_block(in, scratch, result, block);
  return {};
}

}  // namespace mpfa
