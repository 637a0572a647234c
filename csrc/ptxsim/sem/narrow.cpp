// SPDX-License-Identifier: Apache-2.0
#include "narrow.h"

#include <cmath>
#include <cstring>

namespace ptxsim::sem {

const char* elem_name(Elem e) {
  static const char* const kNames[] = {"f64",  "f32",  "tf32", "f16",  "bf16",  "e4m3",
                                       "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0", "ue4m3",
                                       "s8",   "u8",   "s4",   "u4",   "s32"};
  return kNames[static_cast<int>(e)];
}

int elem_bits(Elem e) {
  static const int kBits[] = {64, 32, 32, 16, 16, 8, 8, 6, 6, 4, 8, 8, 8, 8, 4, 4, 32};
  return kBits[static_cast<int>(e)];
}

float bits_f32(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint32_t f32_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
double bits_f64(uint64_t u) {
  double d;
  std::memcpy(&d, &u, 8);
  return d;
}
uint64_t f64_bits(double x) {
  uint64_t u;
  std::memcpy(&u, &x, 8);
  return u;
}

namespace {

constexpr uint64_t kFracMask = (uint64_t{1} << 52) - 1;

// A binary format: mantissa bits, exponent bias, largest finite code, and whether an infinity
// follows it.
template <int kManBits, int kExpBias, int64_t kMaxCode, bool kHasInf>
struct Format {
  static constexpr int kMan = kManBits, kBias = kExpBias;
  static constexpr int64_t kMax = kMaxCode;
  static constexpr bool kInf = kHasInf;
};
using F32Fmt = Format<23, 127, 0x7f7fffff, true>;
using F16Fmt = Format<10, 15, 0x7bff, true>;
using Bf16Fmt = Format<7, 127, 0x7f7f, true>;
using Tf32Fmt = Format<10, 127, 0x3fbff, true>;  // codes without the 13 low bits of the register
using E4m3Fmt = Format<3, 7, 0x7e, false>;
using E5m2Fmt = Format<2, 15, 0x7b, false>;  // cvt to e5m2 always saturates
using E2m3Fmt = Format<3, 1, 0x1f, false>;
using E3m2Fmt = Format<2, 3, 0x1f, false>;
using E2m1Fmt = Format<1, 1, 0x7, false>;

// Splits |x| (finite, not zero) into the truncated code of the format and the discarded bits `rem`
// out of `drop` bits. Discarded distances beyond 63 bits collapse into a nonzero remainder far
// below half.
template <class Fmt>
inline int64_t truncate(uint64_t mag, uint64_t* rem, int* drop) {
  constexpr int kEmin = 1 - Fmt::kBias;
  int exp = static_cast<int>(mag >> 52);
  uint64_t frac = mag & kFracMask;
  if (exp == 0) {
    exp = 1;
  } else {
    frac |= uint64_t{1} << 52;
  }
  const int ue = exp - 1023;
  int d = 52 - Fmt::kMan;
  int64_t base = 0;
  if (ue >= kEmin) {
    base = static_cast<int64_t>(ue - kEmin) << Fmt::kMan;
  } else {
    d += kEmin - ue;
  }
  if (d > 62) {
    *rem = 1;
    *drop = 62;
    return 0;
  }
  *rem = frac & ((uint64_t{1} << d) - 1);
  *drop = d;
  return base + static_cast<int64_t>(frac >> d);
}

inline bool round_up(Round r, bool neg, int64_t code, uint64_t rem, int drop, uint32_t rbits,
                     int nb) {
  if (rem == 0) return false;
  const uint64_t half = uint64_t{1} << (drop - 1);
  switch (r) {
    case Round::kRn:
      return rem > half || (rem == half && (code & 1));
    case Round::kRna:
      return rem >= half;
    case Round::kRz:
      return false;
    case Round::kRm:
      return neg;
    case Round::kRp:
      return !neg;
    case Round::kRs: {
      const uint64_t top = drop >= nb ? rem >> (drop - nb) : rem << (nb - drop);
      return ((top + rbits) >> nb) != 0;
    }
  }
  return false;
}

// Magnitude code of a finite, nonzero value, overflow resolved.
template <class Fmt>
inline int64_t encode_mag(uint64_t mag, bool neg, Round r, bool satfinite, uint32_t rbits, int nb) {
  uint64_t rem;
  int drop;
  int64_t code = truncate<Fmt>(mag, &rem, &drop);
  code += round_up(r, neg, code, rem, drop, rbits, nb);
  if (code <= Fmt::kMax) return code;
  if (!Fmt::kInf || satfinite) return Fmt::kMax;
  const bool to_inf = r == Round::kRn || r == Round::kRna || r == Round::kRs ||
                      (r == Round::kRm && neg) || (r == Round::kRp && !neg);
  return to_inf ? Fmt::kMax + 1 : Fmt::kMax;
}

// Signed code; `sign_bit` is the position of the sign, `nan` the code of NaN inputs.
template <class Fmt>
inline uint32_t encode_fmt(double x, const CvtMode& m, int sign_bit, uint32_t nan, int nb) {
  const uint64_t u = f64_bits(x);
  const bool neg = u >> 63;
  const uint64_t mag = u & ~(uint64_t{1} << 63);
  constexpr uint64_t kInfBits = uint64_t{0x7ff} << 52;
  if (mag > kInfBits) return nan;
  if (m.relu && neg) return 0;
  int64_t code;
  if (mag == kInfBits) {
    code = Fmt::kInf && !m.satfinite ? Fmt::kMax + 1 : Fmt::kMax;
  } else if (mag == 0) {
    code = 0;
  } else {
    code = encode_mag<Fmt>(mag, neg, m.round, m.satfinite, m.rbits, nb);
  }
  return static_cast<uint32_t>(code) | (static_cast<uint32_t>(neg) << sign_bit);
}

// |x| as a power of two, rounded up (rp) or down; 0xff is NaN. Zero and everything below 2^-127 is
// 0x00.
uint32_t encode_ue8m0(double x, const CvtMode& m) {
  const uint64_t mag = f64_bits(x) & ~(uint64_t{1} << 63);
  constexpr uint64_t kInfBits = uint64_t{0x7ff} << 52;
  if (mag > kInfBits) return 0xff;
  if (mag == 0) return 0;
  int code;
  if (mag == kInfBits) {
    code = 255;
  } else {
    int exp = 0;
    const double f = std::frexp(bits_f64(mag), &exp);  // f in [0.5, 1)
    code = exp - 1 + 127;
    if (m.round == Round::kRp && f != 0.5) ++code;
    if (code < 0) code = 0;
  }
  if (code > 254) return m.satfinite || m.round == Round::kRz ? 254 : 255;
  return static_cast<uint32_t>(code);
}

// .rna truncates the bits of a NaN, .satfinite steps down first (measured on an H200).
uint32_t tf32_nan(uint32_t u, const CvtMode& m) {
  if (m.round != Round::kRna) return 0x7fffe000u;
  return (m.satfinite ? u - 0x2000u : u) & 0xffffe000u;
}

double apply_sat(double x) {
  if (!(x > 0)) return 0.0;  // NaN, negative and both zeros
  return x < 1.0 ? x : 1.0;
}

double decode_bits(uint32_t code, int man, int exp_bits, int bias) {
  const uint32_t frac = code & ((1u << man) - 1);
  const int exp = static_cast<int>((code >> man) & ((1u << exp_bits) - 1));
  const bool neg = (code >> (man + exp_bits)) & 1;
  const double v = exp == 0 ? std::ldexp(frac, 1 - bias - man)
                            : std::ldexp((1u << man) + frac, exp - bias - man);
  return neg ? -v : v;
}

struct DecodeTables {
  float t[17][256];
  DecodeTables() {
    for (int e = 0; e < 17; ++e) {
      for (int c = 0; c < 256; ++c) {
        t[e][c] = elem_bits(static_cast<Elem>(e)) <= 8
                      ? static_cast<float>(decode(static_cast<Elem>(e), static_cast<uint32_t>(c)))
                      : 0.0f;
      }
    }
  }
};

}  // namespace

int rs_bits(Elem dst) { return dst == Elem::kF16 ? 13 : dst == Elem::kE2m1 ? 8 : 16; }

Error check_cvt(Elem dst, Elem src, const CvtMode& m) {
  auto bad = [&](const char* what) {
    return std::string("cvt to ") + elem_name(dst) + " from " + elem_name(src) + ": " + what;
  };
  const bool small = elem_bits(dst) <= 8 && dst != Elem::kUe8m0;
  switch (dst) {
    case Elem::kF16:
    case Elem::kBf16:
      if (m.round == Round::kRna) return bad(".rna does not exist");
      break;
    case Elem::kTf32:
      if (src != Elem::kF32) return bad("the source must be f32");
      if (m.round != Round::kRn && m.round != Round::kRz && m.round != Round::kRna)
        return bad("rounding must be .rn, .rz or .rna");
      if (m.relu && m.round == Round::kRna) return bad(".relu needs .rn or .rz");
      break;
    case Elem::kUe8m0:
      if (m.round != Round::kRz && m.round != Round::kRp) return bad("rounding must be .rz or .rp");
      if (m.relu) return bad(".relu does not exist");
      break;
    case Elem::kE4m3:
    case Elem::kE5m2:
    case Elem::kE2m3:
    case Elem::kE3m2:
    case Elem::kE2m1:
      if (m.round != Round::kRn && m.round != Round::kRs) return bad("rounding must be .rn or .rs");
      if (!m.satfinite) return bad(".satfinite is mandatory");
      break;
    case Elem::kF32:
    case Elem::kF64:
      if (m.round == Round::kRna || m.round == Round::kRs)
        return bad("rounding must be .rn .rz .rm .rp");
      break;
    default:
      return bad("not a cvt destination");
  }
  if (m.round == Round::kRs &&
      (src != Elem::kF32 || !(small || dst == Elem::kF16 || dst == Elem::kBf16)))
    return bad(".rs needs an f32 source and a 16-, 8-, 6- or 4-bit destination");
  if (m.sat && dst != Elem::kF16 && dst != Elem::kF32 && dst != Elem::kF64)
    return bad(".sat exists for f16, f32 and f64 only");
  return {};
}

uint32_t encode(Elem dst, double x, const CvtMode& m) {
  if (m.sat) x = apply_sat(x);
  switch (dst) {
    case Elem::kF32:
      return f32_bits(f64_to_f32(x, m.round, m.ftz));
    case Elem::kF16:
      return encode_fmt<F16Fmt>(x, m, 15, 0x7fff, 13);
    case Elem::kBf16:
      return encode_fmt<Bf16Fmt>(x, m, 15, 0x7fff, 16);
    case Elem::kTf32: {
      if (std::isnan(x)) return tf32_nan(f32_bits(f64_to_f32(x, Round::kRn)), m);
      return encode_fmt<Tf32Fmt>(x, m, 18, 0x3ffff, 13) << 13;
    }
    case Elem::kE4m3:
      return encode_fmt<E4m3Fmt>(x, m, 7, 0x7f, 16);
    case Elem::kE5m2:
      return encode_fmt<E5m2Fmt>(x, m, 7, 0x7f, 16);
    case Elem::kE2m3:
      return encode_fmt<E2m3Fmt>(x, m, 5, 0x1f, 16);
    case Elem::kE3m2:
      return encode_fmt<E3m2Fmt>(x, m, 5, 0x1f, 16);
    case Elem::kE2m1:
      return encode_fmt<E2m1Fmt>(x, m, 3, 0x7, 8);
    case Elem::kUe4m3:
      return encode_fmt<E4m3Fmt>(x, m, 7, 0x7f, 16) & 0x7f;
    case Elem::kUe8m0:
      return encode_ue8m0(x, m);
    default:
      return 0;
  }
}

double decode(Elem src, uint32_t code) {
  switch (src) {
    case Elem::kF32:
      return bits_f32(code);
    case Elem::kTf32:
      return bits_f32(code & 0xffffe000u);
    case Elem::kF16:
      return f16_to_f32(static_cast<uint16_t>(code));
    case Elem::kBf16:
      return bf16_to_f32(static_cast<uint16_t>(code));
    case Elem::kE4m3:
      if ((code & 0x7f) == 0x7f) return std::nan("");
      return decode_bits(code & 0xff, 3, 4, 7);
    case Elem::kUe4m3:
      if ((code & 0x7f) == 0x7f) return std::nan("");
      return decode_bits(code & 0x7f, 3, 4, 7);
    case Elem::kE5m2:
      if ((code & 0x7c) == 0x7c) {
        if (code & 3) return std::nan("");
        return code & 0x80 ? -INFINITY : INFINITY;
      }
      return decode_bits(code & 0xff, 2, 5, 15);
    case Elem::kE2m3:
      return decode_bits(code & 0x3f, 3, 2, 1);
    case Elem::kE3m2:
      return decode_bits(code & 0x3f, 2, 3, 3);
    case Elem::kE2m1:
      return decode_bits(code & 0xf, 1, 2, 1);
    case Elem::kUe8m0:
      return (code & 0xff) == 0xff ? std::nan("")
                                   : std::ldexp(1.0, static_cast<int>(code & 0xff) - 127);
    case Elem::kS8:
      return static_cast<int8_t>(code);
    case Elem::kU8:
      return static_cast<uint8_t>(code);
    case Elem::kS4:
      return static_cast<int32_t>(code << 28) >> 28;
    case Elem::kU4:
      return code & 0xf;
    case Elem::kS32:
      return static_cast<int32_t>(code);
    case Elem::kF64:
      return 0.0;
  }
  return 0.0;
}

const float* decode_table(Elem src) {
  static const DecodeTables tables;
  return tables.t[static_cast<int>(src)];
}

float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t mag = h & 0x7fff;
  if (mag >= 0x7c00) return bits_f32(mag == 0x7c00 ? sign | 0x7f800000u : 0x7fffffffu);
  if (mag >= 0x0400) return bits_f32(sign | ((mag << 13) + (uint32_t{112} << 23)));
  const float v = static_cast<float>(mag) * 5.9604644775390625e-08f;  // 2^-24
  return bits_f32(sign | f32_bits(v));
}
uint16_t f32_to_f16(float x) {
  return static_cast<uint16_t>(encode_fmt<F16Fmt>(x, CvtMode{}, 15, 0x7fff, 13));
}
float bf16_to_f32(uint16_t h) { return bits_f32(static_cast<uint32_t>(h) << 16); }
uint16_t f32_to_bf16(float x) {
  const uint32_t u = f32_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

float f64_to_f32(double x, Round r, bool ftz) {
  const uint64_t u = f64_bits(x);
  const uint32_t sign = static_cast<uint32_t>(u >> 32) & 0x80000000u;
  const uint64_t mag = u & ~(uint64_t{1} << 63);
  constexpr uint64_t kInfBits = uint64_t{0x7ff} << 52;
  if (mag > kInfBits)
    return bits_f32(sign | 0x7fc00000u | static_cast<uint32_t>((mag >> 29) & 0x3fffff));
  if (mag == kInfBits) return bits_f32(sign | 0x7f800000u);
  if (mag == 0) return bits_f32(sign);
  const int64_t code = encode_mag<F32Fmt>(mag, sign != 0, r, false, 0, 0);
  if (ftz && mag < f64_bits(0x1p-126)) {
    // Tiny is judged after rounding to 24 bits with an unbounded exponent (measured on an H200): a
    // value that only the coarser subnormal grid rounds up to 2^-126 is flushed.
    const float unbounded = f64_to_f32(x * 0x1p64, r);
    if (std::fabs(unbounded) < 0x1p-62f) return bits_f32(sign);
  }
  return bits_f32(sign | static_cast<uint32_t>(code));
}

uint32_t f32_to_tf32(uint32_t bits, const CvtMode& m) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return tf32_nan(bits, m);
  return encode(Elem::kTf32, bits_f32(bits), m);
}

double half_to_f64(Elem src, uint16_t h) {
  const bool f16 = src == Elem::kF16;
  const uint32_t mag = h & 0x7fffu;
  if (mag <= (f16 ? 0x7c00u : 0x7f80u)) return decode(src, h);
  const int man = f16 ? 10 : 7;
  const uint64_t frac = static_cast<uint64_t>(mag & ((1u << man) - 1)) << (52 - man);
  return bits_f64(static_cast<uint64_t>(h & 0x8000u) << 48 | uint64_t{0x7ff8} << 48 | frac);
}

float round_integral_f32(float x, Round r, bool ftz) {
  const uint32_t u = f32_bits(x);
  if (std::isnan(x)) return bits_f32(0x7fffffffu);
  if (ftz && (u & 0x7f800000u) == 0) return bits_f32(u & 0x80000000u);
  return static_cast<float>(round_integral(x, r));
}

double round_integral(double x, Round r) {
  if (std::isnan(x)) return bits_f64(f64_bits(x) | uint64_t{1} << 51);
  if (std::isinf(x)) return x;
  switch (r) {
    case Round::kRz:
      return std::trunc(x);
    case Round::kRm:
      return std::floor(x);
    case Round::kRp:
      return std::ceil(x);
    default: {
      const double f = std::floor(x);
      const double d = x - f;  // exact: both share the exponent range below 2^53
      double v = f;
      if (d > 0.5 || (d == 0.5 && std::fmod(f, 2.0) != 0.0)) v = f + 1.0;
      return std::copysign(v, x);
    }
  }
}

uint64_t float_to_int(double x, bool src_is_f64, int bits, bool is_signed, Round r) {
  if (std::isnan(x)) {
    if (!src_is_f64 && bits != 64) return 0;
    const uint64_t v = uint64_t{1} << (bits - 1);
    return is_signed && bits < 64 ? ~(v - 1) : v;
  }
  const double v = round_integral(x, r);
  if (is_signed) {
    const double lim = std::ldexp(1.0, bits - 1);
    if (v >= lim) return (uint64_t{1} << (bits - 1)) - 1;
    if (v < -lim) return ~((uint64_t{1} << (bits - 1)) - 1);
    return static_cast<uint64_t>(static_cast<int64_t>(v));
  }
  if (v >= std::ldexp(1.0, bits)) return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  if (v <= 0) return 0;
  return static_cast<uint64_t>(v);
}

uint64_t int_to_float(Elem dst, uint64_t v, bool is_signed, Round r) {
  const bool neg = is_signed && static_cast<int64_t>(v) < 0;
  const uint64_t mag = neg ? 0 - v : v;
  if (mag == 0) return 0;
  // Reduce to 53 bits with the lost bits kept as a sticky last bit: enough for every destination
  // but f64 itself, which is rounded here.
  int lead = 63;
  while (!(mag >> lead & 1)) --lead;
  double x;
  if (lead <= 52) {
    x = static_cast<double>(mag);
  } else {
    const int drop = lead - 52;
    uint64_t q = mag >> drop;
    const uint64_t rem = mag & ((uint64_t{1} << drop) - 1);
    if (dst == Elem::kF64) {
      q += round_up(r, neg, static_cast<int64_t>(q), rem, drop, 0, 0);
    } else if (rem != 0) {
      q |= 1;
    }
    x = std::ldexp(static_cast<double>(q), drop);
  }
  if (neg) x = -x;
  if (dst == Elem::kF64) return f64_bits(x);
  CvtMode m;
  m.round = r;
  return encode(dst, x, m);
}

uint64_t int_to_int(uint64_t v, bool src_signed, int bits, bool dst_signed, bool sat) {
  if (sat) {
    const int64_t s = static_cast<int64_t>(v);
    if (dst_signed) {
      const int64_t hi = bits == 64 ? INT64_MAX : (int64_t{1} << (bits - 1)) - 1;
      const int64_t lo = bits == 64 ? INT64_MIN : -(int64_t{1} << (bits - 1));
      if (src_signed) {
        v = static_cast<uint64_t>(s > hi ? hi : s < lo ? lo : s);
      } else {
        v = v > static_cast<uint64_t>(hi) ? static_cast<uint64_t>(hi) : v;
      }
    } else {
      const uint64_t hi = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
      if (src_signed && s < 0) {
        v = 0;
      } else if (v > hi) {
        v = hi;
      }
    }
  }
  if (bits == 64) return v;
  v &= (uint64_t{1} << bits) - 1;
  if (dst_signed && (v >> (bits - 1))) v |= ~((uint64_t{1} << bits) - 1);
  return v;
}

namespace {
int packed_width(Elem e) {
  const int b = elem_bits(e);
  return b == 6 ? 8 : b;
}
}  // namespace

uint32_t pack2(Elem dst, double hi, double lo, const CvtMode& m) {
  const int w = packed_width(dst);
  if (w > 16) return 0;
  if (m.round != Round::kRs) return (encode(dst, hi, m) << w) | encode(dst, lo, m);
  CvtMode mh = m, ml = m;
  const uint32_t mask = (1u << rs_bits(dst)) - 1;
  mh.rbits = (m.rbits >> 16) & mask;
  ml.rbits = m.rbits & mask;
  return (encode(dst, hi, mh) << w) | encode(dst, lo, ml);
}

uint32_t pack4_rs(Elem dst, const double v[4], bool relu, uint32_t rbits) {
  const int w = packed_width(dst);
  if (w > 8) return 0;
  CvtMode m;
  m.round = Round::kRs;
  m.satfinite = true;
  m.relu = relu;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    if (dst == Elem::kE2m1) {
      // The high bytes of both halves serve {a, b}, the low bytes {e, f}; a and e take the upper
      // half.
      const int byte = (i < 2 ? 1 : 0) + (i % 2 == 0 ? 2 : 0);
      m.rbits = (rbits >> (8 * byte)) & 0xff;
    } else {
      m.rbits = (i < 2 ? rbits >> 16 : rbits) & 0xffff;
    }
    out = (out << w) | encode(dst, v[i], m);
  }
  return out;
}

void unpack2(Elem src, uint32_t v, double* hi, double* lo) {
  const int w = packed_width(src);
  if (w > 16) {
    *hi = *lo = 0;
    return;
  }
  *lo = decode(src, v & ((1u << w) - 1));
  *hi = decode(src, (v >> w) & ((1u << w) - 1));
}

}  // namespace ptxsim::sem
