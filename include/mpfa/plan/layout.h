// SPDX-License-Identifier: Apache-2.0
// Sizes and offsets of the plan's sections, metadata then scratch, for one batch or, for graph
// capture, for every batch within three limits. docs/planner.md derives the bounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "mpfa/base/math.h"
#include "mpfa/plan/params.h"
#include "mpfa/plan/tiles.h"

namespace mpfa {

struct Capacity {
  int64_t batch_size = 0;
  int64_t nnz_qo = 0;
  int64_t kv_indices = 0;
  int64_t items = 0;
  int64_t partial_rows = 0;
};

// Most partitions that one tile of `q_len` rows can touch because of the window: an interval of
// W tokens at any position meets at most floor((W - 2) / size) + 2 partitions.
inline int64_t max_window_partitions(const PlanParams& p, int64_t max_qo_len) {
  if (p.window_left < 0) return kInt32Max;
  const int64_t rows = p.causal ? std::min(p.q_tile_tokens, max_qo_len) : max_qo_len;
  const int64_t width = p.window_left + rows;
  return (width + p.partition_tokens - 2) / p.partition_tokens + 1;
}

// Most q tiles, and most items, of a batch that shares max_total_qo_len freely.
//
// One token makes a tile, but a further tile of the same request takes q_tile_tokens. Pages count
// most in one request (splitting a context never makes more partitions), and further tiles
// count most in that request. With e further tiles there, min(B, Q - e T) requests fit; the total
// is concave in e, so its maximum is at the kink or at the end.
inline int64_t max_prefill_items(const PlanParams& p, int64_t max_partitions, int64_t window) {
  const int64_t q = p.max_total_qo_len, t = p.q_tile_tokens;
  const int64_t requests = std::min(p.max_batch_size, q);
  const int64_t kink = (q - requests) / t, end = (q - 1) / t;
  const int64_t tiles = requests + kink;
  const auto total = [&](int64_t e) {
    return (1 + e) * max_partitions + std::min(requests, q - e * t) - 1;
  };
  const int64_t unlimited = std::max({total(kink), total(std::min(kink + 1, end)), total(end)});
  return std::min(unlimited, tiles * window);
}

// Most partial rows per query token of a decode batch: k requests with at least two partitions
// each share the pages, and a request of n pages makes ceil(n * page_size / partition_tokens).
inline int64_t max_decode_rows(const PlanParams& p, int64_t window) {
  if (window < 2) return 0;
  const int64_t common = std::gcd(p.kv_unit(), p.partition_tokens);
  const int64_t unit = p.kv_unit() / common, part = p.partition_tokens / common;
  const int64_t pages_for_two = p.partition_tokens / p.kv_unit() + 1;
  const int64_t split = std::min(p.max_batch_size, p.max_num_pages / pages_for_two);
  const int64_t shared = split > 0 ? (p.max_num_pages * unit + split * (part - 1)) / part : 0;
  return std::min(shared, split * window);
}

inline Capacity graph_capacity(const PlanParams& p) {
  Capacity c;
  c.batch_size = p.max_batch_size;
  c.nnz_qo = p.max_total_qo_len;
  c.kv_indices = p.paged() ? p.max_num_pages : 0;
  const int64_t max_qo_len = p.max_qo_len();
  // Partitions of one request that holds every page.
  int64_t partitions = 1, window = 1;
  if (p.partition_tokens > 0) {
    const int64_t tokens = std::min(p.max_num_pages * p.kv_unit(), kInt32Max);
    partitions = ceil_div(tokens, p.partition_tokens);
    window = max_window_partitions(p, max_qo_len);
  }
  const bool split = std::min(partitions, window) > 1;
  if (p.mode == PlanMode::kDecode) {
    const int64_t tiles = ceil_div(max_qo_len, p.q_tile_tokens);
    c.items = tiles * std::min(p.max_batch_size + partitions - 1, p.max_batch_size * window);
    c.partial_rows = split ? max_qo_len * max_decode_rows(p, window) : 0;
  } else {
    c.items = max_prefill_items(p, partitions, window);
    c.partial_rows = split ? p.max_total_qo_len * std::min(partitions, window) : 0;
  }
  // Beyond int32 the count is only reported as too large; not multiplied further, so that it
  // stays below 2^63.
  if (c.items <= kInt32Max) c.items *= p.head_groups();
  return c;
}

inline Capacity batch_capacity(const PlanInput& in, const TileList& list) {
  return {in.batch_size, in.qo_indptr[in.batch_size],
          in.params.paged() ? in.kv_indptr[in.batch_size] : 0, list.num_items,
          list.num_partial_rows};
}

struct Layout {
  int64_t offset[kNumSections] = {};
  int64_t size[kNumSections] = {};
  int64_t int_bytes = 0;    // the block that is uploaded
  int64_t total_bytes = 0;  // of the plan's own sections
};

inline Layout make_layout(const PlanParams& p, const Capacity& c) {
  constexpr int64_t kInt = sizeof(int32_t);
  Layout layout;
  layout.size[kHeader] = sizeof(PlanHeader);
  layout.size[kQoIndptr] = (c.batch_size + 1) * kInt;
  layout.size[kKvIndptr] = (c.batch_size + 1) * kInt;
  layout.size[kKvLen] = c.batch_size * kInt;
  layout.size[kVBlockIndptr] = (c.batch_size + 1) * kInt;
  layout.size[kKvIndices] = c.kv_indices * kInt;
  layout.size[kItems] = c.items * static_cast<int64_t>(sizeof(WorkItem));
  layout.size[kWorkerIndptr] = (p.num_workers() + 1) * kInt;
  layout.size[kMergeIndptr] = (c.nnz_qo + 1) * kInt;
  layout.size[kPartialLse] = c.partial_rows * p.num_qo_heads * kInt;
  layout.size[kPartialO] = layout.size[kPartialLse] * p.head_dim;
  int64_t offset = 0;
  for (int s = 0; s < kNumSections; ++s) {
    if (s == kPartialO) layout.int_bytes = offset;
    layout.offset[s] = offset;
    offset = round_up(offset + layout.size[s], kSectionAlignment);
  }
  layout.total_bytes = offset;
  return layout;
}

}  // namespace mpfa
