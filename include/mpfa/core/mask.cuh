// SPDX-License-Identifier: Apache-2.0
// Which keys a query row sees. Causal masks are aligned bottom-right: query token i of a request
// stands at key position i + kv_len - qo_len.
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"

namespace mpfa {

// Keys [begin, end) of the request, clipped to the item's own range; begin >= end: none.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

struct MaskParams {
  int32_t shift;  // kv_len - qo_len
  int32_t kv_begin;
  int32_t kv_end;
  int32_t window_left;  // -1 = no window
  bool causal;
};

// `token` is counted inside the request.
MPFA_HOST_DEVICE inline KeyRange visible_keys(const MaskParams& m, int32_t token) {
  const int32_t position = token + m.shift;
  KeyRange r = {m.kv_begin, m.kv_end};
  if (m.causal && position + 1 < r.end) r.end = position + 1;
  // why not position - window_left > begin: it overflows for negative positions and large windows.
  if (m.window_left >= 0 && position - r.begin > m.window_left) r.begin = position - m.window_left;
  return r;
}

// Bounds over the tokens [first, last] of a tile: blocks inside [inner.begin, inner.end) need no
// mask for any of its rows.
MPFA_HOST_DEVICE inline KeyRange keys_visible_to_all(const MaskParams& m, int32_t first,
                                                     int32_t last) {
  return {visible_keys(m, last).begin, visible_keys(m, first).end};
}

}  // namespace mpfa
