// SPDX-License-Identifier: Apache-2.0
// e4m3 scale factors: codes and what they stand for. PTX ISA, "cvt".
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// Rounds two scales to e4m3 (nearest even, saturating at 448), gives back the numbers that the
// codes stand for and returns the codes, `low` in bits 0..7 (sm_89).
__device__ __forceinline__ uint32_t round_to_e4m3x2(float& low, float& high) {
  uint16_t codes;
  asm("{\n\t"
      ".reg .b32 halves;\n\t"
      ".reg .b16 h0, h1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, %0;\n\t"
      "mov.b32 {h0, h1}, halves;\n\t"
      "cvt.f32.f16 %1, h0;\n\t"
      "cvt.f32.f16 %2, h1;\n\t"
      "}"
      : "=h"(codes), "+f"(low), "+f"(high));
  return codes;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
