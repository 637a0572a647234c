// SPDX-License-Identifier: Apache-2.0
// cvt: every code of every narrow format, all rounding boundaries, directed modes and integer
// conversions, against a search over the sorted list of representable values and against the host's
// FPU.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "sem/narrow.h"

using namespace ptxsim::sem;

struct Format {
  Elem elem;
  int exp_bits, man_bits, bias;
  bool is_signed, has_inf, has_nan;
};

// Written from the format definitions, not from the code under test.
const Format kFormats[] = {
    {Elem::kE4m3, 4, 3, 7, true, false, true},   {Elem::kE5m2, 5, 2, 15, true, true, true},
    {Elem::kE2m3, 2, 3, 1, true, false, false},  {Elem::kE3m2, 3, 2, 3, true, false, false},
    {Elem::kE2m1, 2, 1, 1, true, false, false},  {Elem::kF16, 5, 10, 15, true, true, true},
    {Elem::kBf16, 8, 7, 127, true, true, true},  {Elem::kTf32, 8, 10, 127, true, true, true},
    {Elem::kUe4m3, 4, 3, 7, false, false, true},
};

double value_of(const Format& f, uint32_t code) {
  const uint32_t man = code & ((1u << f.man_bits) - 1);
  const uint32_t exp = (code >> f.man_bits) & ((1u << f.exp_bits) - 1);
  const bool neg = f.is_signed && ((code >> (f.man_bits + f.exp_bits)) & 1);
  const uint32_t top = (1u << f.exp_bits) - 1;
  double v;
  if (f.has_inf && exp == top) {
    v = man ? NAN : INFINITY;
  } else if (!f.has_inf && f.has_nan && exp == top && man == (1u << f.man_bits) - 1) {
    v = NAN;
  } else if (exp == 0) {
    v = std::ldexp(double(man), 1 - f.bias - f.man_bits);
  } else {
    v = std::ldexp(1.0 + double(man) / (1 << f.man_bits), int(exp) - f.bias);
  }
  return neg ? -v : v;
}

uint32_t shifted(const Format& f, uint32_t code) {
  return f.elem == Elem::kTf32 ? code << 13 : code;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

void check_decode() {
  for (const Format& f : kFormats) {
    const int bits = f.man_bits + f.exp_bits + (f.is_signed ? 1 : 0);
    for (uint32_t c = 0; c < (1u << bits); ++c) {
      CHECK(same(decode(f.elem, shifted(f, c)), value_of(f, c)), "decode %s code 0x%x",
            elem_name(f.elem), c);
      if (bits <= 8)
        CHECK(same(decode_table(f.elem)[c], value_of(f, c)), "decode table %s code 0x%x",
              elem_name(f.elem), c);
    }
  }
  for (int c = 0; c < 255; ++c)
    CHECK(decode(Elem::kUe8m0, c) == std::ldexp(1.0, c - 127), "decode ue8m0 %d", c);
  CHECK(std::isnan(decode(Elem::kUe8m0, 255)), "decode ue8m0 255");
  for (int c = 0; c < 256; ++c) {
    CHECK(decode(Elem::kS8, c) == int8_t(c) && decode(Elem::kU8, c) == c, "decode s8 u8 %d", c);
    CHECK(decode(Elem::kS4, c) == ((c & 15) ^ 8) - 8 && decode(Elem::kU4, c) == (c & 15),
          "decode s4 u4 %d", c);
  }
}

// Rounds a finite |x| between two neighbouring codes lo, lo + 1 with values vlo <= x <= vhi.
uint32_t pick(Round r, bool neg, uint32_t lo, double vlo, double vhi, double x) {
  if (x == vlo) return lo;
  if (x == vhi) return lo + 1;
  const double mid = vlo + (vhi - vlo) / 2;
  switch (r) {
    case Round::kRn:
      return x < mid ? lo : x > mid ? lo + 1 : lo + (lo & 1);
    case Round::kRna:
      return x < mid ? lo : lo + 1;
    case Round::kRz:
      return lo;
    case Round::kRm:
      return neg ? lo + 1 : lo;
    case Round::kRp:
      return neg ? lo : lo + 1;
    default:
      return lo;
  }
}

const Round kDirected[] = {Round::kRn, Round::kRz, Round::kRm, Round::kRp, Round::kRna};

void check_encode() {
  for (const Format& f : kFormats) {
    // Magnitude codes in order; the value list ends with what would follow MAX_NORM.
    std::vector<double> v;
    for (uint32_t c = 0;; ++c) {
      const double x = value_of(f, c);
      if (std::isnan(x) || std::isinf(x) || (c > 0 && x <= v.back()) ||
          c >= (1u << (f.man_bits + f.exp_bits)))
        break;
      v.push_back(x);
    }
    const uint32_t max = uint32_t(v.size()) - 1;
    const double next = v[max] + (v[max] - v[max - 1]);
    const uint32_t sign = f.is_signed ? 1u << (f.man_bits + f.exp_bits) : 0;
    const bool wide = f.elem == Elem::kF16 || f.elem == Elem::kBf16 || f.elem == Elem::kTf32;
    for (uint32_t c = 0; c <= max; ++c) {
      const double hi = c == max ? next : v[c + 1];
      const double mid = v[c] + (hi - v[c]) / 2;
      for (double x :
           {v[c], std::nextafter(v[c], INFINITY), double(std::nextafterf(float(v[c]), INFINITY)),
            std::nextafter(mid, 0.0), mid, std::nextafter(mid, INFINITY),
            double(std::nextafterf(float(mid), 0.0f)),
            double(std::nextafterf(float(mid), INFINITY)), std::nextafter(hi, 0.0),
            double(std::nextafterf(float(hi), 0.0f))}) {
        if (!(x >= v[c] && x < hi)) continue;  // a float neighbour may skip a tiny interval
        for (Round r : kDirected) {
          for (int neg = 0; neg < 2; ++neg) {
            for (int sat = wide ? 0 : 1; sat < 2; ++sat) {
              for (int relu = 0; relu < 2; ++relu) {
                CvtMode m;
                m.round = r;
                m.satfinite = sat;
                m.relu = relu;
                uint32_t want = pick(r, neg, c, v[c], hi, x);
                if (want > max && sat) want = max;
                if (neg && relu) {
                  want = 0;
                } else if (neg) {
                  want |= sign;
                }
                if (relu && neg && !f.is_signed) continue;
                const uint32_t got = encode(f.elem, neg ? -x : x, m);
                CHECK(got == shifted(f, want),
                      "encode %s x %.17g round %d sat %d relu %d: 0x%x, want 0x%x",
                      elem_name(f.elem), neg ? -x : x, int(r), sat, relu, got, shifted(f, want));
              }
            }
          }
        }
      }
    }
    // Far out of range, infinities, NaN.
    CvtMode satm;
    satm.satfinite = true;
    for (double x : {next, next * 1e6, double(INFINITY)}) {
      CHECK(encode(f.elem, x, satm) == shifted(f, max), "%s satfinite %g", elem_name(f.elem), x);
      CHECK(encode(f.elem, -x, satm) == shifted(f, max | sign), "%s satfinite %g",
            elem_name(f.elem), -x);
      if (wide) {
        CvtMode m;
        CHECK(encode(f.elem, x, m) == shifted(f, max + 1), "%s overflow %g", elem_name(f.elem), x);
        m.round = Round::kRz;
        CHECK(encode(f.elem, x, m) == shifted(f, std::isinf(x) ? max + 1 : max),
              "%s rz overflow %g", elem_name(f.elem), x);
      }
    }
    const uint32_t nan = encode(f.elem, NAN, satm);
    const uint32_t want_nan = f.elem == Elem::kTf32 ? 0x7fffe000u
                              : wide                ? 0x7fffu
                              : f.has_nan           ? 0x7fu
                                                    : max;
    CHECK(nan == want_nan, "%s NaN 0x%x", elem_name(f.elem), nan);
    satm.relu = true;
    CHECK(encode(f.elem, -NAN, satm) == want_nan, "%s relu NaN", elem_name(f.elem));
    CHECK(encode(f.elem, -0.0, CvtMode{}) == shifted(f, sign), "%s -0", elem_name(f.elem));
  }
}

void check_ue8m0() {
  CvtMode up, down;
  up.round = Round::kRp;
  down.round = Round::kRz;
  up.satfinite = down.satfinite = true;
  for (int c = 0; c < 255; ++c) {
    const float x = std::ldexp(1.0f, c - 127);
    CHECK(
        encode(Elem::kUe8m0, x, up) == uint32_t(c) && encode(Elem::kUe8m0, x, down) == uint32_t(c),
        "ue8m0 2^%d", c - 127);
    const float more = std::nextafterf(x, INFINITY);
    if (c > 0 && c < 254) {
      CHECK(encode(Elem::kUe8m0, more, up) == uint32_t(c + 1), "ue8m0 rp above 2^%d", c - 127);
      CHECK(encode(Elem::kUe8m0, -more, up) == uint32_t(c + 1), "ue8m0 rp sign is dropped, 2^%d",
            c - 127);
      CHECK(encode(Elem::kUe8m0, more, down) == uint32_t(c), "ue8m0 rz above 2^%d", c - 127);
    }
  }
  CHECK(encode(Elem::kUe8m0, 0.0, up) == 0 && encode(Elem::kUe8m0, 1e-45, up) == 0,
        "ue8m0 zero and below");
  CHECK(encode(Elem::kUe8m0, INFINITY, up) == 254 && encode(Elem::kUe8m0, 3e38, up) == 254,
        "ue8m0 satfinite");
  CHECK(encode(Elem::kUe8m0, NAN, up) == 255, "ue8m0 NaN");
}

int host_mode(Round r) {
  return r == Round::kRz   ? FE_TOWARDZERO
         : r == Round::kRm ? FE_DOWNWARD
         : r == Round::kRp ? FE_UPWARD
                           : FE_TONEAREST;
}

void check_host_fpu() {
  Rng rng(1);
  for (int i = 0; i < 400000; ++i) {
    uint64_t bits = rng.next();
    if (i % 3 == 0)
      bits = (bits & 0x800fffffffffffffull) | (uint64_t(1023 - 160 + rng.below(300)) << 52);
    if (i % 7 == 0) bits &= 0xffffffffe0000000ull;
    if (i % 11 == 0) bits = (bits & ~uint64_t{0x1fffffff}) | 0x10000000;  // f32 midpoints
    const volatile double x = bits_f64(bits);
    for (Round r : {Round::kRn, Round::kRz, Round::kRm, Round::kRp}) {
      std::fesetround(host_mode(r));
      const volatile float want = float(x);
      const volatile double integral = std::nearbyint(x);
      std::fesetround(FE_TONEAREST);
      const float got = f64_to_f32(x, r);
      if (std::isnan(x)) {
        CHECK(std::isnan(got), "f64 -> f32 NaN");
        continue;
      }
      CHECK(f32_bits(got) == f32_bits(want), "f64 -> f32 %.17g round %d", double(x), int(r));
      CHECK(same(round_integral(x, r), integral), "integral %.17g round %d", double(x), int(r));
      for (int w : {8, 16, 32, 64}) {
        for (int s = 0; s < 2; ++s) {
          const double lo = s ? -std::ldexp(1.0, w - 1) : 0, hi = std::ldexp(1.0, s ? w - 1 : w);
          uint64_t ref;
          if (integral >= hi) {
            ref = s         ? (uint64_t{1} << (w - 1)) - 1
                  : w == 64 ? ~uint64_t{0}
                            : (uint64_t{1} << w) - 1;
          } else if (integral < lo) {
            ref = s ? 0 - (uint64_t{1} << (w - 1)) : 0;
          } else {
            ref = s ? uint64_t(int64_t(integral)) : uint64_t(integral);
          }
          CHECK(float_to_int(x, true, w, s, r) == ref, "f64 %.17g -> %c%d round %d", double(x),
                s ? 's' : 'u', w, int(r));
        }
      }
      const volatile int64_t iv = int64_t(rng.next() >> rng.below(64));
      const volatile uint64_t uv = uint64_t(iv);
      std::fesetround(host_mode(r));
      const volatile float fs = float(iv), fu = float(uv);
      const volatile double ds = double(iv), du = double(uv);
      std::fesetround(FE_TONEAREST);
      CHECK(int_to_float(Elem::kF32, uv, true, r) == f32_bits(fs), "s64 %lld -> f32 round %d",
            (long long)iv, int(r));
      CHECK(int_to_float(Elem::kF64, uv, true, r) == f64_bits(ds), "s64 %lld -> f64 round %d",
            (long long)iv, int(r));
      if (r == Round::kRn ||
          r == Round::kRz) {  // libgcc's unsigned path honours only these modes reliably
        CHECK(int_to_float(Elem::kF32, uv, false, Round::kRn) == f32_bits(float(uint64_t(uv))),
              "u64 -> f32");
      }
      (void)fu;
      (void)du;
    }
  }
  for (int i = 0; i < 65536; ++i) {  // f16/bf16 helpers, every code
    const uint16_t h = uint16_t(i);
    const float a = f16_to_f32(h), b = bf16_to_f32(h);
    if (!std::isnan(a)) CHECK(f32_to_f16(a) == h, "f16 round trip 0x%x", i);
    if (!std::isnan(b)) CHECK(f32_to_bf16(b) == h, "bf16 round trip 0x%x", i);
  }
  for (int i = 0; i < 2000000; ++i) {
    const float x = bits_f32(uint32_t(rng.next()));
    CHECK(f32_to_bf16(x) == encode(Elem::kBf16, x), "bf16 fast path 0x%x", f32_bits(x));
    CHECK(f32_to_f16(x) == encode(Elem::kF16, x), "f16 fast path 0x%x", f32_bits(x));
  }
}

void check_ints() {
  CHECK(float_to_int(NAN, false, 32, true, Round::kRz) == 0, "NaN f32 -> s32");
  CHECK(float_to_int(NAN, true, 32, true, Round::kRz) == 0xffffffff80000000ull, "NaN f64 -> s32");
  CHECK(float_to_int(NAN, true, 32, false, Round::kRz) == 0x80000000ull, "NaN f64 -> u32");
  CHECK(float_to_int(NAN, false, 64, false, Round::kRz) == 0x8000000000000000ull, "NaN f32 -> u64");
  const int64_t values[] = {0,         1,         -1,       127,       128,
                            -128,      -129,      255,      256,       32767,
                            32768,     65535,     65536,    INT32_MAX, int64_t(INT32_MAX) + 1,
                            INT32_MIN, INT64_MAX, INT64_MIN};
  for (int64_t v : values) {
    for (int w : {8, 16, 32}) {
      const int64_t hi = (int64_t{1} << (w - 1)) - 1, lo = -hi - 1, uhi = (int64_t{1} << w) - 1;
      CHECK(int64_t(int_to_int(uint64_t(v), true, w, true, true)) == (v > hi   ? hi
                                                                      : v < lo ? lo
                                                                               : v),
            "sat s%d %lld", w, (long long)v);
      CHECK(int64_t(int_to_int(uint64_t(v), true, w, false, true)) == (v > uhi ? uhi
                                                                       : v < 0 ? 0
                                                                               : v),
            "sat u%d %lld", w, (long long)v);
      CHECK(int_to_int(uint64_t(v), true, w, false, false) == (uint64_t(v) & uint64_t(uhi)),
            "wrap u%d %lld", w, (long long)v);
      CHECK(int64_t(int_to_int(uint64_t(v), true, w, true, false)) ==
                int64_t(uint64_t(v) << (64 - w)) >> (64 - w),
            "wrap s%d", w);
    }
  }
}

void check_modes_and_packing() {
  CvtMode m;
  m.satfinite = true;
  CHECK(pack2(Elem::kE4m3, 1.0, 2.0, m) == 0x3840, "e4m3x2: a is the high byte");
  CHECK(pack2(Elem::kE2m1, 6.0, 0.5, m) == 0x71, "e2m1x2");
  CHECK(pack2(Elem::kE3m2, 1.0, -1.0, m) == 0x0c2c, "e3m2x2");
  CHECK(pack2(Elem::kF16, 1.0, 2.0, CvtMode{}) == 0x3c004000u, "f16x2");
  double hi, lo;
  unpack2(Elem::kE5m2, 0x3cc0, &hi, &lo);
  CHECK(hi == 1.0 && lo == -2.0, "unpack e5m2x2");
  m = CvtMode{};
  m.sat = true;
  CHECK(encode(Elem::kF16, 3.0, m) == 0x3c00 && encode(Elem::kF16, -3.0, m) == 0 &&
            encode(Elem::kF16, NAN, m) == 0,
        "sat");
  // Stochastic rounding: 1 + 3/4 ulp of f16 rounds up exactly when the 13 bits carry.
  m = CvtMode{};
  m.round = Round::kRs;
  const double x = 1.0 + 0.75 / 1024;
  for (uint32_t r : {0u, 0x7ffu, 0x800u, 0x1fffu}) {
    m.rbits = r;
    CHECK(encode(Elem::kF16, x, m) == (r >= 0x800 ? 0x3c01u : 0x3c00u), "rs with bits 0x%x", r);
  }
  auto refused = [](Elem d, Elem s, Round r, bool sat) {
    CvtMode c;
    c.round = r;
    c.satfinite = sat;
    return !check_cvt(d, s, c).empty();
  };
  CHECK(refused(Elem::kE4m3, Elem::kF32, Round::kRz, true), "e4m3 .rz");
  CHECK(refused(Elem::kE4m3, Elem::kF32, Round::kRn, false), "e4m3 without satfinite");
  CHECK(refused(Elem::kUe8m0, Elem::kF32, Round::kRn, true), "ue8m0 .rn");
  CHECK(refused(Elem::kF16, Elem::kF32, Round::kRna, false), "f16 .rna");
  CHECK(refused(Elem::kTf32, Elem::kF32, Round::kRp, false), "tf32 .rp");
  CHECK(!refused(Elem::kTf32, Elem::kF32, Round::kRna, false), "tf32 .rna");
  CHECK(!refused(Elem::kUe8m0, Elem::kF32, Round::kRp, true), "ue8m0 .rp");
  CHECK(!refused(Elem::kE2m1, Elem::kF32, Round::kRs, true), "e2m1 .rs");
}

int main() {
  check_decode();
  check_encode();
  check_ue8m0();
  check_host_fpu();
  check_ints();
  check_modes_and_packing();
  return check_report("narrow_tables");
}
