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

// Squared error of the block for a scale, summed in channel order with FMAs. A tie between two
// codes gives the same square either way; a - code*s has an exact product, so the FMA rounds once
// as the reference does. `a` are the magnitudes.
template <bool kCap>
MPFA_INLINE float nvfp4_error(const float* a, const BlockScale& s) {
  float err = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float d = fma_rn(-e2m1_nearest<kCap>(a[i], s), s.unit, a[i]);
    err = i == 0 ? mul_rn(d, d) : fma_rn(d, d, err);
  }
  return err;
}

// Is amax/4's scale better than amax/6's?
MPFA_INLINE bool prefer_amax4(const float* x, const BlockScale& s6, const BlockScale& s4) {
  float a[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) a[i] = abs_f(x[i]);
  if (s6.code >= kFirstSafeScale && s4.code <= kLastSafeScale) {
    return nvfp4_error<false>(a, s4) < nvfp4_error<false>(a, s6);
  }
  return nvfp4_error<true>(a, s4) < nvfp4_error<true>(a, s6);
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
MPFA_INLINE Nvfp4Block quantize_nvfp4(const float* x, float amax) {
  BlockScale s = block_scale(e4m3_code(sixth(amax)));
  if (kFourOverSix) {
    const BlockScale s4 = block_scale(e4m3_code(mul_rn(amax, 0.25f)));
    if (prefer_amax4(x, s, s4)) s = s4;
  }
  Nvfp4Block out;
  out.scale = s.code;
  if (s.code >= kFirstSafeScale && s.code <= kLastSafeScale) {
    out.codes[0] = e2m1_x8<false>(x, s);
    out.codes[1] = e2m1_x8<false>(x + 8, s);
  } else {
    out.codes[0] = s.code == 0 ? 0u : e2m1_x8<true>(x, s);
    out.codes[1] = s.code == 0 ? 0u : e2m1_x8<true>(x + 8, s);
  }
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

// Continues the dot product of a 16-channel block by four channels: a rounded product, then FMAs.
// `first` marks channels 0..3 of the block.
MPFA_INLINE float dot4(float acc, const float* x, const float* m, bool first) {
  acc = first ? mul_rn(x[0], m[0]) : fma_rn(x[0], m[0], acc);
  acc = fma_rn(x[1], m[1], acc);
  acc = fma_rn(x[2], m[2], acc);
  return fma_rn(x[3], m[3], acc);
}

}  // namespace mpfa::quant
