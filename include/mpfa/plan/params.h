// SPDX-License-Identifier: Apache-2.0
// Inputs of the planner.
#pragma once

#include <cstdint>
#include <limits>

#include "mpfa/plan/plan.h"

namespace mpfa {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

struct PlanParams {
  PlanMode mode = PlanMode::kPrefill;
  int64_t num_qo_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 128;
  int64_t page_size = 0;  // 0 = ragged: kv_indptr counts tokens
  bool causal = false;
  int64_t window_left = -1;
  int64_t q_tile_tokens = 128;
  int64_t heads_per_group = 1;
  int64_t kv_block = 128;
  int64_t partition_tokens = 0;  // 0 = never split
  int64_t num_sm = 1;
  bool graph = false;  // capacities from the three limits below instead of from the batch
  int64_t max_batch_size = 0;
  int64_t max_total_qo_len = 0;
  int64_t max_num_pages = 0;  // bounds kv_indptr[-1]: pages, or tokens when ragged

  bool paged() const { return page_size > 0; }
  // kv_indptr counts units of this many tokens.
  int64_t kv_unit() const { return paged() ? page_size : 1; }
  int64_t head_groups() const {
    const int64_t gqa = num_qo_heads / num_kv_heads;
    return (gqa + heads_per_group - 1) / heads_per_group;
  }
  // Every KV head is one grid row of this many workers.
  int64_t num_workers() const { return num_sm > num_kv_heads ? num_sm / num_kv_heads : 1; }
  // A decode graph serves requests of equal query length; prefill shares the total freely.
  int64_t max_qo_len() const {
    return mode == PlanMode::kDecode ? max_total_qo_len / max_batch_size : max_total_qo_len;
  }
};

struct PlanInput {
  PlanParams params;
  int64_t batch_size = 0;
  const int32_t* qo_indptr = nullptr;      // [batch_size + 1]
  const int32_t* kv_indptr = nullptr;      // [batch_size + 1]
  const int32_t* kv_indices = nullptr;     // [num_kv_indices], paged only
  const int32_t* last_page_len = nullptr;  // [batch_size], paged only
  int64_t num_kv_indices = 0;

  int64_t qo_len(int64_t request) const { return qo_indptr[request + 1] - qo_indptr[request]; }
  int64_t kv_units(int64_t request) const { return kv_indptr[request + 1] - kv_indptr[request]; }
};

}  // namespace mpfa
