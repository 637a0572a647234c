// SPDX-License-Identifier: Apache-2.0
#include "fp.h"

#include <cmath>

#include "narrow.h"

namespace ptxsim::sem {
namespace {

using u128 = unsigned __int128;

constexpr uint32_t kNanF32 = 0x7fffffffu;
constexpr uint16_t kNanH = 0x7fff;

float flush(float x) {
  const uint32_t u = f32_bits(x);
  return (u & 0x7f800000u) == 0 ? bits_f32(u & 0x80000000u) : x;
}

float saturate(float x) {
  if (!(x > 0.0f)) return 0.0f;
  return x < 1.0f ? x : 1.0f;
}

// s + e exactly, where s = fl(a + b): rounded to odd, so that one more rounding to 51 bits or
// fewer, in any mode, equals the rounding of the exact sum (Boldo and Melquiond 2008).
double odd_sum(double a, double b) {
  const double s = a + b;
  const double bb = s - a;
  const double e = (a - (s - bb)) + (b - bb);
  if (e == 0.0) return s;
  const uint64_t u = f64_bits(s);
  if (u & 1) return s;
  return bits_f64((e > 0) == (s > 0) ? u + 1 : u - 1);
}

// Zero results of a sum take their sign from the rounding mode unless both terms agree.
double sum_with_zero_sign(double a, double b, Round r) {
  const double s = odd_sum(a, b);
  if (s != 0.0) return s;
  if (std::signbit(a) == std::signbit(b) && a == 0.0) return a;
  return r == Round::kRm ? -0.0 : 0.0;
}

float finish_f32(double odd, FpMode m) {
  float r = bits_f32(kNanF32);
  if (!std::isnan(odd)) {
    r = m.round == Round::kRn && !m.ftz ? static_cast<float>(odd) : f64_to_f32(odd, m.round, m.ftz);
  }
  return m.sat ? saturate(r) : r;
}

double finite_fma(double p, double c, Round r) {
  if (!std::isfinite(p) || !std::isfinite(c)) return p + c;
  return sum_with_zero_sign(p, c, r);
}

// A nonzero magnitude man * 2^exp; bit 0 of man is sticky (set when lower bits were dropped).
struct Ext {
  bool neg = false;
  int exp = 0;
  u128 man = 0;
};

int lead_bit(u128 v) {
  const uint64_t hi = static_cast<uint64_t>(v >> 64);
  return hi ? 127 - __builtin_clzll(hi) : 63 - __builtin_clzll(static_cast<uint64_t>(v));
}

u128 shift_right_sticky(u128 v, int n) {
  if (n <= 0) return v;
  if (n > 127) return v != 0;
  const u128 lost = v & ((u128{1} << n) - 1);
  return (v >> n) | (lost != 0);
}

Ext split(double x) {
  const uint64_t u = f64_bits(x);
  Ext e;
  e.neg = u >> 63;
  const int be = static_cast<int>((u >> 52) & 0x7ff);
  e.man = (u & ((uint64_t{1} << 52) - 1)) | (be ? uint64_t{1} << 52 : 0);
  e.exp = (be ? be : 1) - 1075;
  return e;
}

double pack_f64(const Ext& v, Round r) {
  const int lead = lead_bit(v.man);
  int ue = v.exp + lead;
  int drop = lead - 52;
  if (ue < -1022) drop += -1022 - ue;
  u128 q = v.man, rem = 0, half = 0;
  if (drop > 0) {
    const u128 m = drop > 126 ? shift_right_sticky(v.man, drop - 126) : v.man;
    const int d = drop > 126 ? 126 : drop;
    q = m >> d;
    rem = m & ((u128{1} << d) - 1);
    half = u128{1} << (d - 1);
  } else {
    q <<= -drop;
  }
  bool up = false;
  if (rem != 0) {
    up = r == Round::kRn   ? rem > half || (rem == half && (q & 1))
         : r == Round::kRm ? v.neg
         : r == Round::kRp ? !v.neg
                           : false;
  }
  q += up;
  const uint64_t sign = static_cast<uint64_t>(v.neg) << 63;
  if (ue < -1022)
    return bits_f64(sign | static_cast<uint64_t>(q));  // carries into the normal range
  if (q >> 53) {
    q >>= 1;
    ++ue;
  }
  if (ue > 1023) {
    const bool inf = r == Round::kRn || (r == Round::kRm && v.neg) || (r == Round::kRp && !v.neg);
    return bits_f64(sign | (inf ? uint64_t{0x7ff} << 52 : 0x7fefffffffffffffull));
  }
  const uint64_t frac = static_cast<uint64_t>(q) & ((uint64_t{1} << 52) - 1);
  return bits_f64(sign | (static_cast<uint64_t>(ue + 1023) << 52) | frac);
}

// Sum of two nonzero values; the window of 126 bits holds the larger one, the smaller keeps a
// sticky bit. Cancellation can only reach the sticky bit's neighbourhood when nothing was dropped.
double add_ext(Ext a, Ext b, Round r) {
  const int top_a = a.exp + lead_bit(a.man), top_b = b.exp + lead_bit(b.man);
  const int base = (top_a > top_b ? top_a : top_b) - 125;
  auto align = [base](const Ext& v) {
    const int sh = v.exp - base;
    return sh >= 0 ? v.man << sh : shift_right_sticky(v.man, -sh);
  };
  const u128 ma = align(a), mb = align(b);
  Ext s;
  s.exp = base;
  if (a.neg == b.neg) {
    s.neg = a.neg;
    s.man = ma + mb;
  } else if (ma == mb) {
    return r == Round::kRm ? -0.0 : 0.0;
  } else {
    s.neg = ma > mb ? a.neg : b.neg;
    s.man = ma > mb ? ma - mb : mb - ma;
  }
  return pack_f64(s, r);
}

double nan_f64(double a, double b, double c) {
  for (double v : {a, b, c}) {
    if (std::isnan(v)) return bits_f64(f64_bits(v) | (uint64_t{1} << 51));
  }
  return bits_f64(0xfff8000000000000ull);
}

u128 isqrt(u128 v) {
  u128 s = static_cast<u128>(std::sqrt(static_cast<long double>(v)));
  while (s * s > v) --s;
  while ((s + 1) * (s + 1) <= v) ++s;
  return s;
}

// f32 quotient and root rounded to odd in double.
double odd_from_residual(double q, double residual, bool toward) {
  if (residual == 0.0) return q;
  const uint64_t u = f64_bits(q);
  if (u & 1) return q;
  return bits_f64(toward ? u + 1 : u - 1);
}

double minmax_core(double a, double b, bool is_max) {
  if (a == 0.0 && b == 0.0) return std::signbit(a) == is_max ? b : a;
  return is_max ? (a > b ? a : b) : (a < b ? a : b);
}

float move_ulps(float r, int ulps) {
  const uint32_t u = f32_bits(r), mag = u & 0x7fffffffu;
  if (ulps == 0 || mag < 0x00800000u || mag >= 0x7f800000u) return r;
  int64_t moved = static_cast<int64_t>(mag) + ulps;
  if (moved > 0x7f7fffff) moved = 0x7f7fffff;
  if (moved < 0x00800000) moved = 0x00800000;
  return bits_f32((u & 0x80000000u) | static_cast<uint32_t>(moved));
}

double approx_exact(Approx op, double x) {
  switch (op) {
    case Approx::kEx2:
      return std::exp2(x);
    case Approx::kLg2:
      return std::log2(x);
    case Approx::kRcp:
      return 1.0 / x;
    case Approx::kRsqrt:
      return 1.0 / std::sqrt(x);
    case Approx::kSqrt:
      return std::sqrt(x);
    case Approx::kSin:
    case Approx::kCos: {
      // The hardware scales by 1 / (2 pi) in fp32 first, so large arguments lose their phase.
      if (std::isinf(x)) break;
      const double turns = static_cast<float>(static_cast<float>(x) * 0.15915494309189535f);
      const double phase = turns - std::trunc(turns);
      if (op == Approx::kCos) return std::cos(6.283185307179586 * phase);
      return phase == 0.0 ? std::copysign(0.0, turns) : std::sin(6.283185307179586 * phase);
    }
    case Approx::kTanh:
      return std::tanh(x);
    case Approx::kDiv:
      break;
  }
  return std::nan("");
}

uint16_t finish_h(Elem e, double odd, FpMode m) {
  if (std::isnan(odd)) return m.sat ? 0 : kNanH;
  CvtMode c;
  c.round = m.round;
  c.sat = m.sat;
  c.relu = m.relu;
  uint32_t h = encode(e, odd, c);
  if (m.ftz && e == Elem::kF16 && (h & 0x7c00) == 0) h &= 0x8000;
  return static_cast<uint16_t>(h);
}

double widen_h(Elem e, uint16_t h, bool ftz) {
  if (ftz && e == Elem::kF16 && (h & 0x7c00) == 0) h &= 0x8000;
  return decode(e, h);
}

}  // namespace

float fma_f32(float a, float b, float c, FpMode m) {
  if (m.ftz) {
    a = flush(a);
    b = flush(b);
    c = flush(c);
  }
  return finish_f32(finite_fma(static_cast<double>(a) * b, c, m.round), m);
}

float add_f32(float a, float b, FpMode m) {
  if (m.ftz) {
    a = flush(a);
    b = flush(b);
  }
  return finish_f32(finite_fma(a, b, m.round), m);
}

float mul_f32(float a, float b, FpMode m) {
  if (m.ftz) {
    a = flush(a);
    b = flush(b);
  }
  return finish_f32(static_cast<double>(a) * b, m);
}

float div_f32(float a, float b, FpMode m) {
  if (m.ftz) {
    a = flush(a);
    b = flush(b);
  }
  double q = static_cast<double>(a) / b;
  if (std::isfinite(q) && q != 0.0 && std::isfinite(b)) {
    const double res = std::fma(-q, static_cast<double>(b), static_cast<double>(a));
    q = odd_from_residual(q, res, std::signbit(res) == std::signbit(a));
  }
  return finish_f32(q, m);
}

float rcp_f32(float a, FpMode m) { return div_f32(1.0f, a, m); }

float sqrt_f32(float a, FpMode m) {
  if (m.ftz) a = flush(a);
  double s = std::sqrt(static_cast<double>(a));
  if (std::isfinite(s) && s != 0.0) {
    const double res = std::fma(-s, s, static_cast<double>(a));
    s = odd_from_residual(s, res, res > 0);
  }
  return finish_f32(s, m);
}

double fma_f64(double a, double b, double c, Round r) {
  const bool special = !std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c);
  if (special) {
    const double v = std::fma(a, b, c);
    return std::isnan(v) ? nan_f64(b, c, a) : v;
  }
  if (r == Round::kRn) return std::fma(a, b, c);
  const bool pneg = std::signbit(a) != std::signbit(b);
  if (a == 0.0 || b == 0.0) {
    if (c != 0.0) return c;
    if (pneg == std::signbit(c)) return c;
    return r == Round::kRm ? -0.0 : 0.0;
  }
  const Ext ea = split(a), eb = split(b);
  Ext p;
  p.neg = pneg;
  p.man = ea.man * eb.man;
  p.exp = ea.exp + eb.exp;
  return c == 0.0 ? pack_f64(p, r) : add_ext(p, split(c), r);
}

double add_f64(double a, double b, Round r) {
  if (!std::isfinite(a) || !std::isfinite(b)) {
    const double v = a + b;
    return std::isnan(v) ? nan_f64(b, a, 0) : v;
  }
  if (r == Round::kRn) return a + b;
  if (a == 0.0 && b == 0.0) {
    if (std::signbit(a) == std::signbit(b)) return a;
    return r == Round::kRm ? -0.0 : 0.0;
  }
  if (a == 0.0) return b;
  if (b == 0.0) return a;
  return add_ext(split(a), split(b), r);
}

double mul_f64(double a, double b, Round r) {
  const double v = a * b;
  if (std::isnan(v)) return nan_f64(b, a, 0);
  if (r == Round::kRn || !std::isfinite(a) || !std::isfinite(b) || a == 0.0 || b == 0.0) return v;
  const Ext ea = split(a), eb = split(b);
  Ext p;
  p.neg = ea.neg != eb.neg;
  p.man = ea.man * eb.man;
  p.exp = ea.exp + eb.exp;
  return pack_f64(p, r);
}

double div_f64(double a, double b, Round r) {
  const double v = a / b;
  if (std::isnan(v)) return nan_f64(a, b, 0);
  if (r == Round::kRn || !std::isfinite(a) || !std::isfinite(b) || a == 0.0 || b == 0.0) return v;
  Ext ea = split(a), eb = split(b);
  const int sa = 126 - lead_bit(ea.man), sb = 52 - lead_bit(eb.man);
  ea.man <<= sa;
  eb.man <<= sb;
  Ext q;
  q.neg = ea.neg != eb.neg;
  q.man = (ea.man / eb.man) << 1 | (ea.man % eb.man != 0);
  q.exp = (ea.exp - sa) - (eb.exp - sb) - 1;
  return pack_f64(q, r);
}

double sqrt_f64(double a, Round r) {
  const double v = std::sqrt(a);
  if (std::isnan(v)) return nan_f64(a, 0, 0);
  if (r == Round::kRn || !std::isfinite(v) || v == 0.0) return v;
  Ext e = split(a);
  int sh = 125 - lead_bit(e.man);
  if ((e.exp - sh) & 1) --sh;
  const u128 wide = e.man << sh;
  const u128 s = isqrt(wide);
  Ext q;
  q.man = s << 1 | (s * s != wide);
  q.exp = (e.exp - sh) / 2 - 1;
  return pack_f64(q, r);
}

uint16_t fma_h(Elem e, uint16_t a, uint16_t b, uint16_t c, FpMode m) {
  const double p = widen_h(e, a, m.ftz) * widen_h(e, b, m.ftz);
  return finish_h(e, finite_fma(p, widen_h(e, c, m.ftz), m.round), m);
}
uint16_t add_h(Elem e, uint16_t a, uint16_t b, FpMode m) {
  return finish_h(e, finite_fma(widen_h(e, a, m.ftz), widen_h(e, b, m.ftz), m.round), m);
}
uint16_t sub_h(Elem e, uint16_t a, uint16_t b, FpMode m) { return add_h(e, a, b ^ 0x8000, m); }
uint16_t mul_h(Elem e, uint16_t a, uint16_t b, FpMode m) {
  return finish_h(e, widen_h(e, a, m.ftz) * widen_h(e, b, m.ftz), m);
}

float minmax_f32(float a, float b, MinMaxMode m) {
  if (m.ftz) {
    a = flush(a);
    b = flush(b);
  }
  const bool na = std::isnan(a), nb = std::isnan(b);
  if ((na && nb) || (m.nan && (na || nb))) return bits_f32(kNanF32);
  float r;
  if (m.xorsign || m.abs) {
    const uint32_t sign = m.xorsign ? (f32_bits(a) ^ f32_bits(b)) & 0x80000000u : 0;
    const float fa = std::fabs(a), fb = std::fabs(b);
    r = na ? fb : nb ? fa : static_cast<float>(minmax_core(fa, fb, m.is_max));
    return bits_f32(f32_bits(r) | sign);
  }
  r = na ? b : nb ? a : static_cast<float>(minmax_core(a, b, m.is_max));
  return r;
}

float minmax3_f32(float a, float b, float c, MinMaxMode m) {
  m.xorsign = false;
  return minmax_f32(minmax_f32(a, b, m), c, m);
}

double minmax_f64(double a, double b, bool is_max) {
  if (std::isnan(a) && std::isnan(b)) return nan_f64(b, a, 0);
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return minmax_core(a, b, is_max);
}

uint16_t minmax_h(Elem e, uint16_t a, uint16_t b, MinMaxMode m) {
  const double x = widen_h(e, a, m.ftz), y = widen_h(e, b, m.ftz);
  if (m.ftz && e == Elem::kF16) {
    a = (a & 0x7c00) == 0 ? a & 0x8000 : a;
    b = (b & 0x7c00) == 0 ? b & 0x8000 : b;
  }
  const bool na = std::isnan(x), nb = std::isnan(y);
  if ((na && nb) || (m.nan && (na || nb))) return kNanH;
  if (m.xorsign || m.abs) {
    const uint16_t sign = m.xorsign ? (a ^ b) & 0x8000 : 0;
    const double fx = std::fabs(x), fy = std::fabs(y);
    const bool take_b = na || (!nb && minmax_core(fx, fy, m.is_max) == fy);
    return static_cast<uint16_t>(((take_b ? b : a) & 0x7fff) | sign);
  }
  if (na) return b;
  if (nb) return a;
  const double r = minmax_core(x, y, m.is_max);
  return r == x && std::signbit(r) == std::signbit(x) ? a : b;
}

int approx_bound_ulps(Approx op) {
  switch (op) {
    case Approx::kEx2:
    case Approx::kDiv:
      return 2;
    case Approx::kTanh:
      return 2048;  // relative 2^-11 of the weakest mantissa
    case Approx::kSin:
    case Approx::kCos:
      return 0;
    default:
      return 1;
  }
}

double approx_abs_bound(Approx op) {
  switch (op) {
    case Approx::kSin:
    case Approx::kCos:
      return std::exp2(-20.5);  // for arguments in [-pi, pi]
    case Approx::kLg2:
      return std::exp2(-22.0);  // for arguments in (0.5, 2)
    default:
      return 0.0;
  }
}

float approx_f32(Approx op, float x, bool ftz, int ulps) {
  if (ftz) x = flush(x);
  if (std::isnan(x)) return bits_f32(kNanF32);
  const double exact = approx_exact(op, x);
  if (std::isnan(exact)) return bits_f32(kNanF32);
  float r = f64_to_f32(exact, Round::kRn);
  if (std::isfinite(r) && static_cast<double>(r) != exact) r = move_ulps(r, ulps);
  return ftz ? flush(r) : r;
}

float div_approx_f32(float a, float b, bool ftz, bool full_range, int ulps) {
  if (ftz) {
    a = flush(a);
    b = flush(b);
  }
  const double q = static_cast<double>(a) / b;
  if (std::isnan(q)) return bits_f32(kNanF32);
  const float mag = std::fabs(b);
  if (!full_range && mag > 0x1p126f && std::isfinite(b)) {
    // The reciprocal underflows: the manual documents NaN for an infinite dividend, else zero.
    if (std::isinf(a)) return bits_f32(kNanF32);
    return std::signbit(a) != std::signbit(b) ? -0.0f : 0.0f;
  }
  float r = f64_to_f32(q, Round::kRn);
  if (std::isfinite(r) && static_cast<double>(r) != q) r = move_ulps(r, ulps);
  return ftz ? flush(r) : r;
}

uint16_t approx_h(Approx op, Elem e, uint16_t x, bool ftz, int ulps) {
  if (ftz && (x & (e == Elem::kF16 ? 0x7c00 : 0x7f80)) == 0) x &= 0x8000;
  const double v = decode(e, x);
  if (std::isnan(v)) return kNanH;
  const double exact = approx_exact(op, v);
  if (std::isnan(exact)) return kNanH;
  uint32_t h = encode(e, exact);
  const uint32_t min_normal = e == Elem::kF16 ? 0x0400 : 0x0080,
                 max = e == Elem::kF16 ? 0x7bff : 0x7f7f;
  const uint32_t mag = h & 0x7fff;
  if (ulps != 0 && mag >= min_normal && mag <= max && decode(e, h) != exact) {
    int64_t moved = static_cast<int64_t>(mag) + ulps;
    if (moved > max) moved = max;
    if (moved < min_normal) moved = min_normal;
    h = (h & 0x8000) | static_cast<uint32_t>(moved);
  }
  if (ftz && (h & 0x7fff) < min_normal) h &= 0x8000;
  return static_cast<uint16_t>(h);
}

double approx_ftz_f64(Approx op, double x) {
  uint64_t u = f64_bits(x) & 0xffffffff00000000ull;  // only the upper word is read
  if ((u & (uint64_t{0x7ff} << 52)) == 0) u &= uint64_t{1} << 63;
  const double v = bits_f64(u);
  if (std::isnan(v)) return bits_f64(0x7fffffff00000000ull);
  const double exact = approx_exact(op, v);
  if (std::isnan(exact)) return bits_f64(0x7fffffff00000000ull);
  uint64_t r = f64_bits(exact) & 0xffffffff00000000ull;
  if ((r & (uint64_t{0x7ff} << 52)) == 0) r &= uint64_t{1} << 63;
  return bits_f64(r);
}

}  // namespace ptxsim::sem
