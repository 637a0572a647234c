// SPDX-License-Identifier: Apache-2.0
// Conversion instructions between fp32 and the narrow formats.
// PTX ISA, "Data Movement and Conversion Instructions: cvt".
#pragma once

#include <cstdint>

// cvt with e4m3x2 from fp32: sm_89 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MPFA_HAS_CVT_E4M3 1
#else
#define MPFA_HAS_CVT_E4M3 0
#endif

// cvt with e2m1x2: only the arch-specific (a) and family-specific (f) targets from sm_100 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define MPFA_HAS_CVT_E2M1 1
#else
#define MPFA_HAS_CVT_E2M1 0
#endif

namespace mpfa::ptx {

#if defined(__CUDACC__)

// fp32 -> bf16 bits, nearest even (sm_80).
__device__ __forceinline__ uint16_t cvt_rn_bf16(float x) {
  uint16_t r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ uint16_t cvt_rn_f16(float x) {
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}

// Four e4m3 codes, `a` in bits 0..7. Nearest even, saturating at 448.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  uint32_t r;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Two bf16 or fp16, `low` in bits 0..15.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

#if MPFA_HAS_CVT_E4M3
// Two e4m3 codes, `low` in bits 0..7. Nearest even, saturating at 448.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
#endif

#if MPFA_HAS_CVT_E2M1
// Eight e2m1 codes, x[0] in bits 0..3. Nearest even, saturating at 6; the sign of zero is kept.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e2m1x8(const float* x) {
  uint32_t r;
  asm("{\n\t"
      ".reg .b8 b0, b1, b2, b3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n\t"
      "mov.b32 %0, {b0, b1, b2, b3};\n\t"
      "}"
      : "=r"(r)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return r;
}
#endif

#endif  // __CUDACC__

}  // namespace mpfa::ptx
