// SPDX-License-Identifier: Apache-2.0
// One block of 16 channels, the unit of work of a thread: NVFP4 codes and scale, e4m3 codes,
// partial dot products. Host and device; same bits as mpfa/reference/{nvfp4,mxfp8,smoothing}.py.
#pragma once

#include "mpfa/quant/codec.h"

namespace mpfa::quant {

constexpr int kBlock = 16;

struct Nvfp4Block {
  uint32_t codes[2];  // channel 0 in bits 0..3 of codes[0]
  uint32_t scale;     // e4m3
};

MPFA_INLINE float amax16(const float* x) {
  float m = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) m = max_f(m, abs_f(x[i]));
  return m;
}

// Squared error of the block for scale s, summed in channel order, multiply and add rounded
// separately. A tie between two codes gives the same square either way; x - code*s has an exact
// product, so the FMA rounds once as the reference does.
template <bool kCap>
MPFA_INLINE float nvfp4_error(const float* x, float s, Reciprocal r) {
  const float eighth = mul_rn(s, 0.125f);
  float err = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float a = abs_f(x[i]);
    const float d = fma_rn(-e2m1_nearest8<kCap>(a, r.high), eighth, a);
    const float square = mul_rn(d, d);
    err = i == 0 ? square : add_rn(err, square);
  }
  return err;
}

// Is amax/4's scale better than amax/6's? Values stay below 7 scales when neither scale is
// subnormal or saturated.
MPFA_INLINE bool prefer_amax4(const float* x, uint32_t scale6, float s6, Reciprocal r6,
                              uint32_t scale4, float s4, Reciprocal r4) {
  if (scale6 >= 8 && scale4 <= 125) {
    return nvfp4_error<false>(x, s4, r4) < nvfp4_error<false>(x, s6, r6);
  }
  return nvfp4_error<true>(x, s4, r4) < nvfp4_error<true>(x, s6, r6);
}

// a/6 rounded to fp32, or one fp32 value beside it; never on the other side of an e4m3 boundary.
// high + low = 1/6 up to 2^-50, and as in codec.h the boundary 6*m is exact and its neighbours are
// 0.66 ulp away.
MPFA_INLINE float sixth(float a) {
  constexpr float kHigh = 0x1.555556p-3f;
  constexpr float kLow = -0x1.555556p-28f;
  return fma_rn(a, kHigh, mul_rn(a, kLow));
}

// s = e4m3(amax/6), codes e2m1(x/s); with kFourOverSix also s = e4m3(amax/4), the smaller error
// wins and amax/6 wins a draw. A block whose scale rounds to zero has codes 0 without signs.
template <bool kFourOverSix>
MPFA_INLINE Nvfp4Block quantize_nvfp4(const float* x) {
  const float amax = amax16(x);
  Nvfp4Block out;
  out.scale = e4m3_code(sixth(amax));
  float s = e4m3_value(out.scale);
  Reciprocal r = reciprocal8(s);
  if (kFourOverSix) {
    const uint32_t scale4 = e4m3_code(mul_rn(amax, 0.25f));
    const float s4 = e4m3_value(scale4);
    const Reciprocal r4 = reciprocal8(s4);
    if (prefer_amax4(x, out.scale, s, r, scale4, s4, r4)) {
      out.scale = scale4;
      s = s4;
      r = r4;
    }
  }
  const uint32_t sign_mask = s == 0.0f ? 0u : kSignBit;
  out.codes[0] = e2m1_x8(x, r, sign_mask);
  out.codes[1] = e2m1_x8(x + 8, r, sign_mask);
  return out;
}

// e4m3 codes of 16 values times a power of two.
MPFA_INLINE void encode_e4m3_16(const float* x, float factor, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* y = x + 4 * i;
    words[i] = e4m3_x4(mul_rn(y[0], factor), mul_rn(y[1], factor), mul_rn(y[2], factor),
                       mul_rn(y[3], factor));
  }
}

// Continues the dot product of a 16-channel block: products added one after another, each rounded.
// `first` marks channels 0..3 of the block.
MPFA_INLINE float dot4(float acc, const float* x, const float* m, bool first) {
  acc = first ? mul_rn(x[0], m[0]) : add_rn(acc, mul_rn(x[0], m[0]));
  acc = add_rn(acc, mul_rn(x[1], m[1]));
  acc = add_rn(acc, mul_rn(x[2], m[2]));
  return add_rn(acc, mul_rn(x[3], m[3]));
}

// Sets the channels of `mask` (bit i = channel i) to +0.
MPFA_INLINE void drop_channels(float* x, uint32_t mask) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) x[i] = mask >> i & 1u ? 0.0f : x[i];
}

}  // namespace mpfa::quant
