// SPDX-License-Identifier: Apache-2.0
// Pairs of fp16. PTX ISA, "cvt" from e4m3x2 (sm_89) and "mul" with .f16x2.
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// The e4m3 codes in bits 0..7 and 8..15 of `codes` (or, with High, 16..23 and 24..31), exactly.
template <bool High = false>
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint32_t codes) {
  uint32_t r;
  if constexpr (High) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, high;\n\t}"
        : "=r"(r)
        : "r"(codes));
  } else {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\t}"
        : "=r"(r)
        : "r"(codes));
  }
  return r;
}

// Subnormals are kept.
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
