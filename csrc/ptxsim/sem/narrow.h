// SPDX-License-Identifier: Apache-2.0
// cvt: exact conversions between f64/f32/f16/bf16/tf32, the 8/6/4-bit formats, the scale formats
// and integers (PTX ISA 9.7.9.21). All sources are exact doubles, so one rounding engine serves
// them all.
#pragma once

#include <cstdint>

#include "types.h"

namespace ptxsim::sem {

// Modifiers of a float -> float cvt. `rbits` (kRs only) holds the random bits right-aligned for the
// number of discarded bits PTX uses for the destination (see narrow_rs_bits).
struct CvtMode {
  Round round = Round::kRn;
  bool satfinite =
      false;          // |x| > MAX_NORM -> MAX_NORM; NaN -> NaN or +MAX_NORM where no NaN exists
  bool relu = false;  // negative -> +0; NaN -> canonical NaN
  bool sat = false;   // clamp to [0, 1], NaN -> +0 (f16, f32, f64)
  bool ftz = false;   // flush f32 subnormal inputs and results to a zero of the same sign
  uint32_t rbits = 0;
};

// Rounding modes that PTX allows when `dst` is written from f32; the empty string if allowed.
Error check_cvt(Elem dst, Elem src, const CvtMode& mode);

// Encodes the exact value x. The result occupies the low elem_bits(dst) bits. NaN inputs give the
// canonical NaN of dst (f16/bf16 0x7fff, tf32 0x7fffe000, e4m3/e5m2 0x7f, ue8m0 0xff, ue4m3 0x7f;
// .rna.tf32 keeps the payload); e2m1/e2m3/e3m2 have no NaN and give +MAX_NORM. Without satfinite
// the 8/6/4-bit formats overflow as PTX defines for their mandatory satfinite, i.e. they saturate
// all the same. f64 destinations are not handled here (use the value itself).
uint32_t encode(Elem dst, double x, const CvtMode& mode = {});

// Exact value of an encoding; padding bits above elem_bits are ignored. kS*/kU* are sign/zero
// extended.
double decode(Elem src, uint32_t code);

// decode() of all codes of an element of at most 8 bits: 256 entries (padding bits ignored).
const float* decode_table(Elem src);

// Number of random bits .rs consumes for one element: f16 13, bf16 16, e4m3/e5m2/e2m3/e3m2 16, e2m1
// 8 of the bits just below the destination's last kept bit.
int rs_bits(Elem dst);

// Hot paths of encode/decode with the meaning above.
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float x);  // rn
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float x);  // rn
float bits_f32(uint32_t u);
uint32_t f32_bits(float x);
double bits_f64(uint64_t u);
uint64_t f64_bits(double x);

// f64 -> f32 in any mode, NaN payload preserved in its top bits and quieted.
float f64_to_f32(double x, Round round, bool ftz = false);

// cvt.tf32.f32 on the bits of the source: as encode(kTf32), but .rna keeps signalling NaNs too.
uint32_t f32_to_tf32(uint32_t bits, const CvtMode& mode);
// cvt.f64.f16 / cvt.f64.bf16: NaNs keep sign and payload (f16_to_f32 gives the canonical NaN).
double half_to_f64(Elem src, uint16_t h);
// cvt.<irnd>{.ftz}.f32.f32: NaN becomes 0x7fffffff.
float round_integral_f32(float x, Round round, bool ftz);
// Rounds to an integral value in the same format (cvt.rni/rzi/rmi/rpi.f64.f64); NaN is quieted.
// kRna/kRs are errors of the caller and behave as kRn.
double round_integral(double x, Round round);

// Float -> integer of `bits` (8, 16, 32, 64): rounds as the integer rounding modifier says and
// clamps to the destination range. NaN: 0, except (source f64 or 64-bit destination) 1 << (bits -
// 1). The result is sign- or zero-extended to 64 bits.
uint64_t float_to_int(double x, bool src_is_f64, int bits, bool is_signed, Round round);

// Integer -> float. `v` is the 64-bit extended source; dst is kF16, kBf16, kF32 or kF64 (bits in
// the low part).
uint64_t int_to_float(Elem dst, uint64_t v, bool is_signed, Round round);

// Integer -> integer with .sat; both widths 8..64, value extended to 64 bits in and out.
uint64_t int_to_int(uint64_t v, bool src_signed, int dst_bits, bool dst_signed, bool sat);

// Packed forms. hi is PTX operand `a`, lo is operand `b`: result = (code(hi) << w) | code(lo),
// where w = 16 for f16x2/bf16x2, 8 for 8/6-bit and ue8m0, 4 for e2m1x2.
uint32_t pack2(Elem dst, double hi, double lo, const CvtMode& mode);
// Four values {a, b, e, f} -> x4 types (.rs only); a is the most significant element.
uint32_t pack4_rs(Elem dst, const double v[4], bool relu, uint32_t rbits);
// Halves of a packed source (f16x2, bf16x2, e4m3x2, e5m2x2, e2m3x2, e3m2x2, e2m1x2, ue8m0x2).
void unpack2(Elem src, uint32_t v, double* hi, double* lo);

}  // namespace ptxsim::sem
