// SPDX-License-Identifier: Apache-2.0
// Position in a ring of shared memory stages guarded by a full and an empty mbarrier each.
//
// Producer: wait(empty[index], phase ^ 1), fill, arrive on full[index], advance.
// Consumer: wait(full[index], phase), read, arrive on empty[index], advance.
// Both start with the same state; a fresh empty barrier lets the producer pass (parity 1).
#pragma once

#include <cstdint>

#include "mpfa/base/math.h"

namespace mpfa {

template <int Stages>
struct RingState {
  static_assert(Stages >= 1, "a ring has stages");
  uint32_t index = 0;
  uint32_t phase = 0;

  MPFA_HOST_DEVICE void advance() {
    if constexpr (Stages == 1) {
      phase ^= 1;
    } else if (++index == Stages) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace mpfa
