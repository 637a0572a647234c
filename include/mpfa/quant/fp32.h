// SPDX-License-Identifier: Apache-2.0
// fp32 arithmetic with one stated rounding per call, on host and device. Kernels must give the bits
// of mpfa/reference, so no compiler may contract a multiply and an add into an FMA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "mpfa/base/math.h"
#include "mpfa/ptx/math.cuh"

namespace mpfa::quant {

#if defined(__CUDACC__)
#define MPFA_INLINE __host__ __device__ __forceinline__
#else
#define MPFA_INLINE inline
#endif

MPFA_INLINE uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
#endif
}

MPFA_INLINE float from_bits(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
#endif
}

MPFA_INLINE float and_bits(float a, float b) { return from_bits(bits_of(a) & bits_of(b)); }

MPFA_INLINE float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;  // compiled with -ffp-contract=off
#endif
}

MPFA_INLINE float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MPFA_INLINE float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// 1/x for x with few significant bits, far from the ends of the range: an estimate within an ulp or
// two and one Newton step, which is then the nearest fp32 value.
MPFA_INLINE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  const float estimate = ptx::rcp(x);
  return __fmaf_rn(__fmaf_rn(-x, estimate, 1.0f), estimate, estimate);
#else
  return 1.0f / x;
#endif
}

// Both arguments are numbers; a NaN loses.
MPFA_INLINE float max_f(float a, float b) { return fmaxf(a, b); }
MPFA_INLINE float min_f(float a, float b) { return fminf(a, b); }
MPFA_INLINE float abs_f(float a) { return fabsf(a); }

MPFA_INLINE float finite_or_zero(float x) {
  return (bits_of(x) & 0x7f800000u) == 0x7f800000u ? 0.0f : x;
}

// max(a + b, floor) as signed integers; one instruction from 9.0 on.
MPFA_INLINE uint32_t add_max(uint32_t a, int b, uint32_t floor) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__viaddmax_s32(static_cast<int>(a), b, static_cast<int>(floor)));
#else
  const int sum = static_cast<int>(a + static_cast<uint32_t>(b));
  return static_cast<uint32_t>(sum > static_cast<int>(floor) ? sum : static_cast<int>(floor));
#endif
}

// The larger of 2^exponent(x) and `floor`, a power of two: the binade in which x is rounded. x >=
// 0.
MPFA_INLINE float binade(float x, float floor) {
  return max_f(from_bits(bits_of(x) & 0x7f800000u), floor);
}

}  // namespace mpfa::quant
