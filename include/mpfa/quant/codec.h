// SPDX-License-Identifier: Apache-2.0
// Codes of e2m1, e4m3 and ue8m0 from fp32: nearest even, saturating, finite input. Hardware
// converts where the target has them, else integer-free rounding: adding the right power of two
// makes the fp32 adder round at the format's own spacing, ties to even. Same bits as
// mpfa/reference/codecs.py.
#pragma once

#include "mpfa/ptx/cvt.cuh"
#include "mpfa/quant/fp32.h"

namespace mpfa::quant {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;

// ---- e4m3 ----

// e4m3 code of x without hardware support.
MPFA_INLINE uint32_t e4m3_code_soft(float x) {
  const float a = min_f(abs_f(x), kE4m3Max);
  // Spacing is binade/8, and 2^-9 below 2^-6.
  const float c = mul_rn(binade(a, 0.015625f), 1048576.0f);
  const uint32_t w = bits_of(add_rn(a, c));
  // w = (147 + exponent) << 23 | k with a = k * spacing. The code is k + 8 * (exponent + 6), and
  // 8 * 147 + 24 = 8 * 6 modulo 128.
  return ((w + (w >> 20) + 24u) & 0x7fu) | (bits_of(x) & kSignBit) >> 24;
}

// Four e4m3 codes, a in the low byte.
MPFA_INLINE uint32_t e4m3_x4(float a, float b, float c, float d) {
#if MPFA_HAS_CVT_E4M3
  return ptx::cvt_rn_satfinite_e4m3x2(a, b) | ptx::cvt_rn_satfinite_e4m3x2(c, d) << 16;
#else
  return e4m3_code_soft(a) | e4m3_code_soft(b) << 8 | e4m3_code_soft(c) << 16 |
         e4m3_code_soft(d) << 24;
#endif
}

MPFA_INLINE uint32_t e4m3_code(float x) {
#if MPFA_HAS_CVT_E4M3
  return ptx::cvt_rn_satfinite_e4m3x2(x, 0.0f) & 0xffu;
#else
  return e4m3_code_soft(x);
#endif
}

// ---- ue8m0 ----

// Byte of 2^e, e the smallest integer >= -127 with amax <= 448 * 2^e; 127 for an all-zero block.
// 448 = 1.75 * 2^8, so the comparison is one of mantissa bits.
MPFA_INLINE uint32_t ue8m0_byte(float amax) {
  const uint32_t u = bits_of(amax);
  const int byte = static_cast<int>(u >> 23) - 8 + ((u & 0x7fffffu) > 0x600000u ? 1 : 0);
  return u == 0 ? 127u : static_cast<uint32_t>(byte < 0 ? 0 : byte);
}

// 2^-e for the byte of 2^e: exact, and normal because no byte above 247 is ever written.
MPFA_INLINE float ue8m0_inverse(uint32_t byte) { return from_bits((254u - byte) << 23); }

// ---- e2m1 ----

// Values are scaled by kUnits before rounding. In software that is 8, which makes the biased
// exponent of the rounding constant a multiple of 4 (see e2m1_x8).
constexpr float kUnits = MPFA_HAS_CVT_E2M1 ? 1.0f : 8.0f;
constexpr float kE2m1Shift = 4194304.0f;  // 2^22: spacing is binade/2, and 1/2 below 1

// With a scale that is neither subnormal nor saturated the values of a block stay below 7 scales.
constexpr uint32_t kFirstSafeScale = 8;
constexpr uint32_t kLastSafeScale = 125;

// A scale s of a block, an e4m3 number, and kUnits/s in two parts: high + low = kUnits/s up to
// 2^-46, high is the nearest fp32 value. Below, q = high*x + low*x rounded once decides every e2m1
// boundary as the correctly rounded x/s does: s has 4 significant bits, so the boundary m*s is
// exact in fp32, and any other fp32 x is more than 0.53 ulp away from m after the division.
struct BlockScale {
  uint32_t code;
  float unit;  // s / kUnits
  float high;
  float low;
};

MPFA_INLINE BlockScale block_scale(uint32_t code) {
  BlockScale s;
  s.code = code;
  // As an fp32 pattern the exponent of the code is 120 too small, which for subnormal codes gives
  // an fp32 subnormal; the product is exact for both.
  s.unit = mul_rn(from_bits(code << 20), 1.329227995784916e36f / kUnits);
  s.high = reciprocal(s.unit);
  s.low = mul_rn(fma_rn(-s.high, s.unit, 1.0f), s.high);
  return s;
}

// x/s in units.
MPFA_INLINE float scaled(float x, const BlockScale& s) {
  return fma_rn(x, s.high, mul_rn(x, s.low));
}

// Rounding constant: 2^22 times the binade of a magnitude, at least that of 1. Added to the
// magnitude it leaves the multiple of the spacing in the low mantissa bits. Within an eighth of a
// power of two either binade will do: both round to it, and to the same code.
constexpr int kBinadeShift = 22 << 23;
constexpr uint32_t kExponentMask = 0x7f800000u;

// Of |q|, in units.
MPFA_INLINE float rounding_constant(float q) {
  return from_bits(add_max(bits_of(q) & kExponentMask, kBinadeShift, bits_of(kUnits * kE2m1Shift)));
}

// Of a/s, a >= 0. The difference of the bit patterns is a logarithm within 6 %.
MPFA_INLINE float rounding_constant(float a, const BlockScale& s) {
  const int offset = kBinadeShift + (127 << 23) - static_cast<int>(bits_of(s.unit));
  return from_bits(add_max(bits_of(a), offset, bits_of(kUnits * kE2m1Shift)) & kExponentMask);
}

// The e2m1 magnitude nearest to a/s in units, a >= 0, where a tie may go either way. Only the high
// part is needed: a*high is rounded once, with the rounding constant added, and stays on its side
// of every boundary. kCap: a/s may exceed 7, which must not become 8, and s may be 0.
template <bool kCap>
MPFA_INLINE float e2m1_nearest(float a, const BlockScale& s) {
  if (kCap && s.code == 0) return 0.0f;
  if (kCap) a = min_f(a, 8.0f * kUnits * s.unit);
  const float constant = rounding_constant(a, s);
  const float y = add_rn(fma_rn(a, s.high, constant), -constant);
  return kCap ? min_f(y, kUnits * kE2m1Max) : y;
}

// Eight e2m1 codes of x/s, x[0] in bits 0..3; kCap as above, but s > 0.
template <bool kCap>
MPFA_INLINE uint32_t e2m1_x8(const float* x, const BlockScale& s) {
#if MPFA_HAS_CVT_E2M1
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // why: x*high + x*low loses the sign of a zero, so it is put back.
    q[i] = from_bits((bits_of(scaled(x[i], s)) & ~kSignBit) | (bits_of(x[i]) & kSignBit));
  }
  return ptx::cvt_rn_satfinite_e2m1x8(q);
#else
  uint32_t packed = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    float q = scaled(x[i], s);
    if (kCap) q = min_f(abs_f(q), kUnits * kE2m1Max);
    // Exponent field 152 + e (e = 0, 1, 2) and, below it, the multiple k of the spacing.
    const uint32_t w = bits_of(add_rn(abs_f(q), rounding_constant(q)));
    // Code = k + 2e is (w + (w >> 22)) mod 16 as 2 * 152 is a multiple of 16; moved to bits 28..31.
    const uint32_t top = (w * 0x10000040u) | (bits_of(x[i]) & kSignBit);
#if defined(__CUDA_ARCH__)
    packed = __funnelshift_l(top, packed, 4);
#else
    packed = packed << 4 | top >> 28;
#endif
  }
  return packed;
#endif
}

// ---- bf16 and fp16 ----

// bf16 bits of x, nearest even.
MPFA_INLINE uint32_t bf16_bits(float x) {
#if defined(__CUDA_ARCH__)
  return ptx::cvt_rn_bf16(x);
#else
  const uint32_t u = bits_of(x);
  return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
#endif
}

MPFA_INLINE float bf16_value(uint32_t bits) { return from_bits(bits << 16); }

// The two 16-bit input types; unpack() takes a pair as it lies in memory.
struct Bf16 {
  static MPFA_INLINE void unpack(uint32_t pair, float& low, float& high) {
    low = from_bits(pair << 16);
    high = from_bits(pair & 0xffff0000u);
  }
  static MPFA_INLINE float value(uint16_t bits) { return bf16_value(bits); }
};

struct Fp16 {
  static MPFA_INLINE float value(uint16_t bits) {
#if defined(__CUDA_ARCH__)
    return ptx::cvt_f32_f16(bits);
#else
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // The exponent is 112 too small as an fp32 pattern; exact for subnormals too.
    return from_bits(sign | bits_of(mul_rn(from_bits(magnitude << 13), 5.192296858534828e33f)));
#endif
  }
  static MPFA_INLINE void unpack(uint32_t pair, float& low, float& high) {
    low = value(static_cast<uint16_t>(pair & 0xffffu));
    high = value(static_cast<uint16_t>(pair >> 16));
  }
};

}  // namespace mpfa::quant
