// SPDX-License-Identifier: Apache-2.0
// Moves registers between warpgroups. PTX ISA, "setmaxnreg" (sm_90a, sm_100a, sm_120a and the
// families). Executed by all warps of a warpgroup; needs __launch_bounds__, else ptxas ignores it.
#pragma once

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Count is a multiple of 8 in 24..256. Blocks until the pool has the registers.
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
