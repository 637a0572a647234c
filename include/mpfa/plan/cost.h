// SPDX-License-Identifier: Apache-2.0
// Cost model of the scheduler.
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"

namespace mpfa {

// An item costs the KV blocks that it walks plus a constant. A block costs the same whatever the
// number of live rows in the tile, since the tensor cores always multiply whole tiles, so q_len
// does not enter. The constant stands for what an item pays once: loading Q and filling the
// pipeline (about one block) and writing O (about one more). It is an estimate, not a
// measurement; it also makes items without any visible key cost something.
constexpr int64_t kItemOverheadBlocks = 2;

constexpr int64_t item_cost(int64_t kv_tokens, int64_t kv_block) {
  return ceil_div(kv_tokens, kv_block) + kItemOverheadBlocks;
}

}  // namespace mpfa
