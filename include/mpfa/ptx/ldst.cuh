// SPDX-License-Identifier: Apache-2.0
// Global loads with a cache policy. PTX ISA, "ld.global.nc".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Read-only data that is read once: the lines should not displace others from L1.
__device__ __forceinline__ uint4 ld_nc_stream_v4(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

// Read-only data of which a part is read again soon.
__device__ __forceinline__ uint4 ld_nc_v4(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
