// SPDX-License-Identifier: Apache-2.0
// Cuts a batch into q tiles and the visible KV range of each tile into partitions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mpfa/base/math.h"
#include "mpfa/plan/cost.h"
#include "mpfa/plan/params.h"

namespace mpfa {

struct KvRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Union of the keys visible to query tokens [q_begin, q_end) of one request, begin rounded down
// to kv_block; {0, 0} when there are none. Query token i stands at key position
// i + kv_len - qo_len (bottom-right alignment).
inline KvRange visible_range(const PlanParams& p, int64_t qo_len, int64_t kv_len, int64_t q_begin,
                             int64_t q_end) {
  const int64_t offset = kv_len - qo_len;
  const int64_t end = p.causal ? std::min(kv_len, q_end + offset) : kv_len;
  int64_t begin = p.window_left >= 0 ? std::max<int64_t>(0, q_begin + offset - p.window_left) : 0;
  if (begin >= end) return {};
  begin -= begin % p.kv_block;
  return {begin, end};
}

struct Tile {
  int32_t request;
  int32_t q_begin;
  int32_t q_len;
  int32_t kv_begin;
  int32_t kv_end;
  int32_t partial_row;  // -1 = one partition
  int32_t partitions;
};

// A run of partitions of one (tile, head group) with equal cost, consecutive in creation order.
// Scheduling works on runs, so its time does not grow with the number of equal partitions.
struct Run {
  WorkItem first;  // the first item, but kv_end is the end of the whole run
  int32_t grid;    // token where partition 0 of the run would begin if the range did not cut it
  int32_t size;    // tokens between partitions
  int32_t count;
  int64_t cost;

  // Item k of the run. Written field by field: measured, a local WorkItem that is edited and then
  // copied takes 1.7x as long, because the wide load waits for the narrow stores.
  void write_item(int32_t k, WorkItem* to) const {
    const int64_t begin = grid + static_cast<int64_t>(k) * size;
    to->request = first.request;
    to->q_begin = first.q_begin;
    to->q_len = first.q_len;
    to->head_group = first.head_group;
    to->kv_begin = static_cast<int32_t>(std::max<int64_t>(first.kv_begin, begin));
    to->kv_end = static_cast<int32_t>(std::min<int64_t>(first.kv_end, begin + size));
    to->partial_row = first.partial_row + k;  // k is 0 where partial_row is -1
    to->partial_stride = first.partial_stride;
  }
};

struct TileList {
  std::vector<Tile> tiles;
  std::vector<Run> runs;  // creation order: request, q tile, head group, partition
  int64_t num_items = 0;
  int64_t num_partial_rows = 0;
  int64_t total_cost = 0;

  void clear() {
    tiles.clear();
    runs.clear();
    num_items = num_partial_rows = total_cost = 0;
  }
};

// Appends the runs of one tile and returns their cost. Partitions start at multiples of
// partition_tokens from token 0, so that one request is cut the same way alone and in any batch.
inline int64_t append_runs(const PlanParams& p, const Tile& tile, int64_t head_groups,
                           std::vector<Run>* runs) {
  const size_t start = runs->size();
  const bool split = tile.partitions > 1;
  const int32_t size = split ? static_cast<int32_t>(p.partition_tokens) : tile.kv_end;
  const int32_t grid = split ? tile.kv_begin - tile.kv_begin % size : tile.kv_begin;
  const WorkItem item = {
      tile.request,  tile.q_begin, tile.q_len,       0,
      tile.kv_begin, tile.kv_end,  tile.partial_row, split ? tile.partitions : 0};
  // Partitions [index, index + count), which span keys [begin, end).
  const auto add = [&](int32_t index, int32_t count, int64_t begin, int64_t end) {
    const int64_t cost = item_cost(count == 1 ? end - begin : size, p.kv_block);
    if (runs->size() > start && runs->back().cost == cost) {
      runs->back().count += count;
      runs->back().first.kv_end = static_cast<int32_t>(end);
      return;
    }
    Run run = {item, grid + index * size, size, count, cost};
    run.first.kv_begin = static_cast<int32_t>(begin);
    run.first.kv_end = static_cast<int32_t>(end);
    run.first.partial_row += index;
    runs->push_back(run);
  };
  if (!split) {
    add(0, 1, tile.kv_begin, tile.kv_end);
  } else {
    const int32_t last = tile.partitions - 1;
    const int64_t second_begin = static_cast<int64_t>(grid) + size;
    const int64_t last_begin = grid + static_cast<int64_t>(last) * size;
    add(0, 1, tile.kv_begin, second_begin);
    if (last > 1) add(1, last - 1, second_begin, last_begin);
    add(last, 1, last_begin, tile.kv_end);
  }
  const size_t per_group = runs->size() - start;
  int64_t cost = 0;
  for (size_t i = start; i < runs->size(); ++i) cost += (*runs)[i].count * (*runs)[i].cost;
  for (int64_t group = 1; group < head_groups; ++group) {
    for (size_t i = 0; i < per_group; ++i) {
      Run run = (*runs)[start + i];
      run.first.head_group = static_cast<int32_t>(group);
      runs->push_back(run);
    }
  }
  return cost * head_groups;
}

inline void make_tiles(const PlanInput& in, const std::vector<int32_t>& kv_len, TileList* out) {
  const PlanParams& p = in.params;
  const int64_t head_groups = p.head_groups();
  out->clear();
  for (int64_t b = 0; b < in.batch_size; ++b) {
    const int64_t qo_len = in.qo_len(b);
    for (int64_t q_begin = 0; q_begin < qo_len; q_begin += p.q_tile_tokens) {
      const int64_t q_end = std::min(qo_len, q_begin + p.q_tile_tokens);
      const KvRange range = visible_range(p, qo_len, kv_len[b], q_begin, q_end);
      int64_t partitions = 1;
      if (p.partition_tokens > 0 && range.end > 0) {
        partitions = (range.end - 1) / p.partition_tokens - range.begin / p.partition_tokens + 1;
      }
      const bool split = partitions > 1;
      out->tiles.push_back({static_cast<int32_t>(b), static_cast<int32_t>(q_begin),
                            static_cast<int32_t>(q_end - q_begin),
                            static_cast<int32_t>(range.begin), static_cast<int32_t>(range.end),
                            split ? static_cast<int32_t>(out->num_partial_rows) : -1,
                            static_cast<int32_t>(partitions)});
      if (split) out->num_partial_rows += partitions * (q_end - q_begin);
      out->num_items += partitions * head_groups;
      out->total_cost += append_runs(p, out->tiles.back(), head_groups, &out->runs);
    }
  }
}

}  // namespace mpfa
