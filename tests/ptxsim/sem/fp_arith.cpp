// SPDX-License-Identifier: Apache-2.0
// Arithmetic in all rounding modes against the host FPU under fesetround, min/max rules, and the
// error of the approximate functions against long double.
#include <cfenv>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "sem/fp.h"
#include "sem/narrow.h"

using namespace ptxsim::sem;

const Round kModes[] = {Round::kRn, Round::kRz, Round::kRm, Round::kRp};

int host_mode(Round r) {
  return r == Round::kRz   ? FE_TOWARDZERO
         : r == Round::kRm ? FE_DOWNWARD
         : r == Round::kRp ? FE_UPWARD
                           : FE_TONEAREST;
}

// Bit equality, NaNs compared as a class.
bool eq(float a, float b) { return f32_bits(a) == f32_bits(b) || (std::isnan(a) && std::isnan(b)); }
bool eq(double a, double b) {
  return f64_bits(a) == f64_bits(b) || (std::isnan(a) && std::isnan(b));
}

float random_f32(Rng& r) {
  uint32_t u = uint32_t(r.next());
  switch (r.below(8)) {
    case 0:
      u = (u & 0x80000000u) | (uint32_t(r.below(3)) << 22);  // zeros and subnormals
      break;
    case 1:
      u = (u & 0x80000000u) | 0x7f800000u | (r.below(2) ? 0 : u & 0x3fffff);
      break;
    case 2:
    case 3:
    case 4:
      u = (u & 0x807fffffu) | (uint32_t(110 + r.below(34)) << 23);
      break;
    case 5:
      u &= 0xfffff000u;
      break;
    default:
      break;
  }
  return bits_f32(u);
}

double random_f64(Rng& r) {
  uint64_t u = r.next();
  const uint64_t sign_man = u & 0x800fffffffffffffull;
  switch (r.below(8)) {
    case 0:
      u = sign_man;  // subnormals
      break;
    case 1:
      u = (u & (uint64_t{1} << 63)) | (uint64_t(r.below(2) * 0x7ff) << 52);
      break;
    case 2:
    case 3:
    case 4:
      u = sign_man | (uint64_t(1000 + r.below(60)) << 52);
      break;
    case 5:
      u = (u & 0xffffffff00000000ull & ~(uint64_t{0x7ff} << 52)) |
          (uint64_t(1010 + r.below(20)) << 52);
      break;
    case 6:
      u = sign_man | (uint64_t(r.below(140)) << 52);  // products underflow
      break;
    default:
      break;
  }
  return bits_f64(u);
}

void check_f32() {
  Rng rng(3);
  for (int i = 0; i < 600000; ++i) {
    const volatile float a = random_f32(rng), b = random_f32(rng);
    volatile float c = random_f32(rng);
    if (i % 5 == 0) c = -(a * b);
    for (Round r : kModes) {
      FpMode m;
      m.round = r;
      std::fesetround(host_mode(r));
      const volatile float f = std::fma(float(a), float(b), float(c)), s = a + c, p = a * b,
                           q = a / b, root = std::sqrt(float(a));
      std::fesetround(FE_TONEAREST);
      CHECK(eq(fma_f32(a, b, c, m), f), "fma f32 %a %a %a round %d: %a, want %a", a, b, c, int(r),
            fma_f32(a, b, c, m), f);
      CHECK(eq(add_f32(a, c, m), s), "add f32 %a %a round %d", a, c, int(r));
      CHECK(eq(mul_f32(a, b, m), p), "mul f32 %a %a round %d", a, b, int(r));
      CHECK(eq(div_f32(a, b, m), q), "div f32 %a %a round %d: %a, want %a", a, b, int(r),
            div_f32(a, b, m), q);
      CHECK(eq(sqrt_f32(a, m), root), "sqrt f32 %a round %d", a, int(r));
    }
  }
  FpMode m;
  CHECK(f32_bits(add_f32(INFINITY, -INFINITY)) == 0x7fffffffu, "f32 NaN is canonical");
  CHECK(f32_bits(mul_f32(bits_f32(0xffc01234u), 1.0f)) == 0x7fffffffu,
        "f32 NaN payload is dropped");
  m.ftz = true;
  CHECK(f32_bits(mul_f32(1e-30f, -1e-10f, m)) == 0x80000000u, "ftz result keeps its sign");
  CHECK(f32_bits(add_f32(bits_f32(0x80000001u), 0.0f, m)) == 0, "ftz input");
  CHECK(add_f32(bits_f32(1), 1e-38f, m) == 0.0f, "ftz: both subnormal inputs vanish");
  // Tiny after rounding with an unbounded exponent: 1 - 2^-24 stays below, 1 - 2^-34 rounds up
  // first.
  CHECK(f32_bits(mul_f32(bits_f32(0x3f7fffff), 0x1p-126f, m)) == 0,
        "ftz below the smallest normal");
  CHECK(f32_bits(fma_f32(-0x1p-100f, 0x1p-60f, 0x1p-126f, m)) == 0x00800000, "ftz rounds up to it");
  CHECK(f32_bits(f64_to_f32((1 - 0x1p-24) * 0x1p-126, Round::kRn, true)) == 0, "cvt ftz");
  CHECK(f32_bits(f64_to_f32((1 - 0x1p-25) * 0x1p-126, Round::kRn, true)) == 0x00800000,
        "cvt ftz tie");
  m = FpMode{};
  m.sat = true;
  CHECK(add_f32(2.0f, 3.0f, m) == 1.0f && add_f32(-2.0f, 1.0f, m) == 0.0f &&
            add_f32(NAN, 1.0f, m) == 0.0f,
        "sat");
}

void check_f64() {
  Rng rng(4);
  for (int i = 0; i < 400000; ++i) {
    const volatile double a = random_f64(rng), b = random_f64(rng);
    volatile double c = random_f64(rng);
    if (i % 5 == 0) c = -(a * b);
    if (i % 5 == 1) c = std::nextafter(-(a * b), double(c));
    for (Round r : kModes) {
      std::fesetround(host_mode(r));
      const volatile double f = std::fma(double(a), double(b), double(c)), s = a + c, p = a * b,
                            q = a / b, root = std::sqrt(double(a));
      std::fesetround(FE_TONEAREST);
      CHECK(eq(fma_f64(a, b, c, r), f), "fma f64 %a %a %a round %d: %a, want %a", a, b, c, int(r),
            fma_f64(a, b, c, r), f);
      CHECK(eq(add_f64(a, c, r), s), "add f64 %a %a round %d", a, c, int(r));
      CHECK(eq(mul_f64(a, b, r), p), "mul f64 %a %a round %d: %a, want %a", a, b, int(r),
            mul_f64(a, b, r), p);
      CHECK(eq(div_f64(a, b, r), q), "div f64 %a %a round %d: %a, want %a", a, b, int(r),
            div_f64(a, b, r), q);
      CHECK(eq(sqrt_f64(a, r), root), "sqrt f64 %a round %d: %a, want %a", a, int(r),
            sqrt_f64(a, r), root);
    }
  }
}

void check_half() {
  Rng rng(5);
  for (Elem e : {Elem::kF16, Elem::kBf16}) {
    for (int i = 0; i < 300000; ++i) {
      const uint16_t a = uint16_t(rng.next()), b = uint16_t(rng.next()), c = uint16_t(rng.next());
      // long double holds the exact product and, for f16, the exact sum; its rounding is safe for
      // bf16 too unless bits beyond 64 decide, which the sticky comparison below excludes.
      const long double p = (long double)decode(e, a) * decode(e, b), s = p + decode(e, c);
      const long double back = s - p;
      const bool exact =
          std::isfinite((double)s) && back == (long double)decode(e, c) && s - back == p;
      if (!exact && std::isfinite((double)s)) continue;
      const double d = double(s);
      if (std::isfinite(d) && (long double)d != s) continue;
      CHECK(fma_h(e, a, b, c) == encode(e, d), "fma %s 0x%x 0x%x 0x%x", elem_name(e), a, b, c);
      CHECK(mul_h(e, a, b) == encode(e, double(p)), "mul %s 0x%x 0x%x", elem_name(e), a, b);
      const double sum = decode(e, a) + decode(e, c), diff = decode(e, a) - decode(e, c);
      if (sum - decode(e, a) == decode(e, c))
        CHECK(add_h(e, a, c) == encode(e, sum), "add %s", elem_name(e));
      if (decode(e, a) - diff == decode(e, c))
        CHECK(sub_h(e, a, c) == encode(e, diff), "sub %s", elem_name(e));
    }
  }
  FpMode m;
  m.relu = true;
  CHECK(fma_h(Elem::kF16, 0x3c00, 0xbc00, 0, m) == 0, "relu");
  CHECK(fma_h(Elem::kBf16, 0x7fc0, 0x3f80, 0, m) == 0x7fff, "relu NaN");
  // Double rounding trap: 1 + 2^-11 + 2^-30 in f16.
  CHECK(fma_h(Elem::kF16, 0x0201, 0x0001, 0x3c00) == 0x3c00, "tiny product");
}

void check_minmax() {
  const float qnan = NAN;
  MinMaxMode mn, mx, nn;
  mx.is_max = true;
  nn.nan = true;
  CHECK(minmax_f32(1, 2, mn) == 1 && minmax_f32(1, 2, mx) == 2, "order");
  CHECK(minmax_f32(qnan, 2, mn) == 2 && minmax_f32(1, qnan, mx) == 1, "one NaN is dropped");
  CHECK(f32_bits(minmax_f32(qnan, -qnan, mn)) == 0x7fffffffu, "two NaN");
  CHECK(f32_bits(minmax_f32(qnan, 2, nn)) == 0x7fffffffu, ".NaN");
  CHECK(f32_bits(minmax_f32(0.0f, -0.0f, mn)) == 0x80000000u &&
            f32_bits(minmax_f32(-0.0f, 0.0f, mn)) == 0x80000000u,
        "-0 < +0");
  CHECK(f32_bits(minmax_f32(0.0f, -0.0f, mx)) == 0 && f32_bits(minmax_f32(-0.0f, 0.0f, mx)) == 0,
        "max of zeros");
  MinMaxMode x = mx;
  x.xorsign = true;
  CHECK(minmax_f32(-3, 2, x) == -3 && minmax_f32(-3, -4, x) == 4 && minmax_f32(3, 2, x) == 3,
        "xorsign.abs");
  CHECK(minmax3_f32(1, 5, 3, mx) == 5 && minmax3_f32(4, 2, 3, mn) == 2, "three inputs");
  MinMaxMode ab = mx;
  ab.abs = true;
  CHECK(minmax3_f32(1, -5, 3, ab) == 5, "three inputs .abs");
  CHECK(f32_bits(minmax3_f32(1, qnan, 3, nn)) == 0x7fffffffu, "three inputs .NaN");
  MinMaxMode fz;
  fz.ftz = true;
  CHECK(f32_bits(minmax_f32(bits_f32(0x80000001u), 1.0f, fz)) == 0x80000000u, "ftz");
  for (int a = 0; a < 65536; a += 7) {
    for (int b = 3; b < 65536; b += 4999) {
      for (Elem e : {Elem::kF16, Elem::kBf16}) {
        const double va = decode(e, uint32_t(a)), vb = decode(e, uint32_t(b));
        const double got = decode(e, minmax_h(e, uint16_t(a), uint16_t(b), mx));
        const double want = std::isnan(va) ? vb : std::isnan(vb) ? va : va > vb ? va : vb;
        CHECK(got == want || (std::isnan(got) && std::isnan(want)), "max %s 0x%x 0x%x",
              elem_name(e), a, b);
      }
    }
  }
  CHECK(minmax_f64(NAN, 2.0, true) == 2.0 && std::signbit(minmax_f64(0.0, -0.0, false)), "f64");
}

long double exact_of(Approx op, long double x) {
  switch (op) {
    case Approx::kEx2:
      return exp2l(x);
    case Approx::kLg2:
      return log2l(x);
    case Approx::kRcp:
      return 1 / x;
    case Approx::kRsqrt:
      return 1 / sqrtl(x);
    case Approx::kSqrt:
      return sqrtl(x);
    case Approx::kSin:
      return sinl(x);
    case Approx::kCos:
      return cosl(x);
    case Approx::kTanh:
      return tanhl(x);
    default:
      return 0;
  }
}

void check_approx() {
  Rng rng(6);
  const Approx ops[] = {Approx::kEx2,   Approx::kLg2,  Approx::kRcp,
                        Approx::kRsqrt, Approx::kSqrt, Approx::kTanh};
  for (Approx op : ops) {
    const int bound = approx_bound_ulps(op);
    for (int i = 0; i < 100000; ++i) {
      float x = random_f32(rng);
      if (op == Approx::kEx2 || op == Approx::kTanh) x = std::fmod(x, 140.0f);
      if (op == Approx::kLg2 || op == Approx::kRsqrt || op == Approx::kSqrt) x = std::fabs(x);
      if (!std::isfinite(x) || x == 0) continue;
      const long double want = exact_of(op, x);
      for (int move : {0, bound, -bound}) {
        const float got = approx_f32(op, x, false, move);
        if (!(std::fabs((double)want) >= 1.2e-38) || !(std::fabs((double)want) < 3.4e38)) continue;
        // Next to a power of two the ulp of the larger side counts.
        const double ulp =
            std::ldexp(1.0, std::ilogb(std::fmax(std::fabs(got), std::fabs((double)want))) - 23);
        const double err = std::fabs(double((long double)got - want)) / ulp;
        CHECK(err <= std::abs(move) + 0.5001, "approx %d x %a moved %d: error %.3f ulp", int(op), x,
              move, err);
        // Moved, unless the result in double is a float already.
        const bool is_float = (double)(float)want == (double)want;
        if (move != 0 && !is_float && err < 0.25 && std::fabs(x) > 1e-4)
          CHECK(false, "approx %d x %a was not moved", int(op), x);
      }
    }
  }
  for (int i = 0; i < 100000; ++i) {
    const float x = float(rng.below(200001) - 100000) / 100000.0f * 3.14159f;
    CHECK(std::fabs(approx_f32(Approx::kSin, x, false) - std::sin(double(x))) <=
              approx_abs_bound(Approx::kSin),
          "sin %a", x);
    CHECK(std::fabs(approx_f32(Approx::kCos, x, false) - std::cos(double(x))) <=
              approx_abs_bound(Approx::kCos),
          "cos %a", x);
  }
  const float inf = INFINITY;
  auto is_nan = [](float v) { return f32_bits(v) == 0x7fffffffu; };
  CHECK(approx_f32(Approx::kEx2, -inf, false) == 0 && approx_f32(Approx::kEx2, inf, false) == inf,
        "ex2 infinities");
  CHECK(approx_f32(Approx::kEx2, 3.0f, true, 2) == 8.0f, "ex2 of an integer is exact");
  CHECK(approx_f32(Approx::kEx2, -130.0f, true) == 0.0f &&
            approx_f32(Approx::kEx2, -130.0f, false) > 0,
        "ex2 ftz");
  CHECK(approx_f32(Approx::kLg2, -0.0f, false) == -inf &&
            is_nan(approx_f32(Approx::kLg2, -1.0f, false)),
        "lg2 corners");
  CHECK(f32_bits(approx_f32(Approx::kRcp, -inf, false)) == 0x80000000u &&
            approx_f32(Approx::kRcp, -0.0f, false) == -inf,
        "rcp corners");
  CHECK(approx_f32(Approx::kRsqrt, -0.0f, false) == -inf &&
            approx_f32(Approx::kRsqrt, inf, false) == 0,
        "rsqrt corners");
  CHECK(f32_bits(approx_f32(Approx::kSqrt, -0.0f, false)) == 0x80000000u &&
            is_nan(approx_f32(Approx::kSqrt, -1, false)),
        "sqrt corners");
  CHECK(is_nan(approx_f32(Approx::kSin, inf, false)) && approx_f32(Approx::kCos, 0, false) == 1,
        "sin cos corners");
  CHECK(approx_f32(Approx::kTanh, inf, false) == 1 && approx_f32(Approx::kTanh, -inf, false) == -1,
        "tanh corners");
  CHECK(div_approx_f32(1.0f, 0x1p127f, false, false) == 0.0f &&
            div_approx_f32(1.0f, 0x1p127f, false, true) == 0x1p-127f,
        "div range");
  CHECK(is_nan(div_approx_f32(inf, 0x1p127f, false, false)) &&
            div_approx_f32(7, 2, false, true) == 3.5f,
        "div");
  CHECK(approx_h(Approx::kEx2, Elem::kBf16, 0x3f80, true) == 0x4000 &&
            approx_h(Approx::kTanh, Elem::kF16, 0x7c00, false) == 0x3c00,
        "half");
  CHECK(approx_ftz_f64(Approx::kRcp, 4.0) == 0.25 && approx_ftz_f64(Approx::kRsqrt, 16.0) == 0.25,
        "f64 approximations");
}

int main() {
  check_f32();
  check_f64();
  check_half();
  check_minmax();
  check_approx();
  return check_report("fp_arith");
}
