// SPDX-License-Identifier: Apache-2.0
#ifndef PTXSIM_WARP_SYNC_H_
#define PTXSIM_WARP_SYNC_H_

#include "machine.h"

namespace ptxsim {

// All live members have reached the running instruction.
inline bool converged(Warp& w, uint32_t members) {
  uint32_t need_lanes = members & w.live;
  return (w.split().mask & need_lanes) == need_lanes;
}

// .sync instructions: an executing lane must be a member.
inline void require_members(const Warp& w, uint32_t m, uint32_t members) {
  if (m & ~members) {
    trap(w, Err::kIllegalInstruction,
         format("lanes %08x execute the instruction but are not in the member mask %08x",
                m & ~members, members));
  }
}

}  // namespace ptxsim

#endif  // PTXSIM_WARP_SYNC_H_
