// SPDX-License-Identifier: Apache-2.0
// Global loads with a cache policy, and stores. PTX ISA, "ld.global.nc", "st".
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

// Stores through pointers that the compiler does not know to be global.
__device__ __forceinline__ void st_global_u8(void* p, uint32_t x) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ void st_global_u16(void* p, uint16_t x) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(x) : "memory");
}

__device__ __forceinline__ void st_global_v2(void* p, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void st_global_v4(void* p, uint32_t x, uint32_t y, uint32_t z,
                                             uint32_t w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
