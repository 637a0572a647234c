// SPDX-License-Identifier: Apache-2.0
// Floating point (PTX ISA 9.7.3-9.7.5). Round-to-nearest f32/f64 uses the host's IEEE arithmetic
// (the build forbids contraction); everything else goes through sem/fp.h.
#include <cmath>

#include "lanes.h"
#include "lower.h"
#include "sem/fp.h"
#include "sem/narrow.h"

namespace ptxsim {
namespace {

using sem::Approx;
using sem::Elem;
using sem::FpMode;
using sem::Round;

const Type kF32{'f', 32, 1};
const Type kF64{'f', 64, 1};
const Type kB64{'b', 64, 1};

inline float canon(float r) { return r == r ? r : bit_cast<float>(0x7fffffffu); }
inline float flush(float x) {
  uint32_t u = bit_cast<uint32_t>(x);
  return (u & 0x7f800000u) ? x : bit_cast<float>(u & 0x80000000u);
}
inline float clamp01(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN -> +0

template <bool kFtz>
struct In {
  static float f(float x) { return kFtz ? flush(x) : x; }
};
template <bool kFtz, bool kSat>
struct Out {
  static float f(float r) {
    r = canon(r);
    if (kFtz) r = flush(r);
    return kSat ? clamp01(r) : r;
  }
};
enum Arith { kAdd, kSub, kMul };
struct FpExtra : Extra {
  FpMode mode;
  Arith op = kAdd;
  Elem elem = Elem::kF16;
  sem::MinMaxMode minmax;
  Approx approx = Approx::kEx2;
  bool negate_b = false;
};

const FpExtra& extra_of(const Insn& i) { return *static_cast<const FpExtra*>(i.x); }

template <Arith kOp, bool kFtz, bool kSat>
struct F32Op {
  static float f(float a, float b) {
    a = In<kFtz>::f(a);
    b = In<kFtz>::f(b);
    return Out<kFtz, kSat>::f(kOp == kAdd ? a + b : kOp == kSub ? a - b : a * b);
  }
};
// Flushing tests the value before rounding (sem::fma_f32): the only results that differ from a
// flush of the rounded value are those that round up to the smallest normal number, which are
// redone.
template <class Op, int kSources>
Status op_ftz(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  float* d = w.cell<float>(i.d);
  const float* a = w.cell<float>(i.a);
  const float* b = w.cell<float>(i.b);
  const float* c = w.cell<float>(kSources == 3 ? i.c : i.b);
  float r[kLanes];
  uint32_t edge = 0;
  lanes(m, [&](int l) {
    r[l] = Op::f(a[l], b[l], c[l]);
    edge |= static_cast<uint32_t>((bit_cast<uint32_t>(r[l]) & 0x7fffffffu) == 0x00800000u);
  });
  if (__builtin_expect(edge != 0, 0)) {
    lanes(m, [&](int l) {
      r[l] =
          kSources == 3 ? sem::fma_f32(a[l], b[l], c[l], x.mode) : sem::mul_f32(a[l], b[l], x.mode);
    });
  }
  lanes(m, [&](int l) { d[l] = r[l]; });
  return Status::kNext;
}
template <bool kSat>
struct FtzMul {
  static float f(float a, float b, float) { return F32Op<kMul, true, kSat>::f(a, b); }
};

template <bool kFtz, bool kSat>
struct F32Fma {
  static float f(float a, float b, float c) {
    return Out<kFtz, kSat>::f(std::fma(In<kFtz>::f(a), In<kFtz>::f(b), In<kFtz>::f(c)));
  }
};

FpMode mode_of(Lower& L) {
  FpMode m;
  m.round = L.has("rz")   ? Round::kRz
            : L.has("rm") ? Round::kRm
            : L.has("rp") ? Round::kRp
                          : Round::kRn;
  m.ftz = L.has("ftz");
  m.sat = L.has("sat");
  m.relu = L.has("relu");
  return m;
}

float apply_f32(Arith op, float a, float b, FpMode m) {
  if (op == kMul) return sem::mul_f32(a, b, m);
  return sem::add_f32(a, op == kSub ? -b : b, m);
}

Status op_f32_slow(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  return each2<float, float>(w, i, m,
                             [&x](float a, float b) { return apply_f32(x.op, a, b, x.mode); });
}

Status op_fma_f32_slow(Warp& w, const Insn& i, uint32_t m) {
  const FpMode& mode = extra_of(i).mode;
  return each3<float, float>(
      w, i, m, [&mode](float a, float b, float c) { return sem::fma_f32(a, b, c, mode); });
}

// f32x2: two floats per lane, so a cell is 64 consecutive floats. `f` gets the index of one.
template <class F>
inline __attribute__((always_inline)) Status each_f32x2(uint32_t m, F f) {
  lanes(m, [=](int l) {
    f(2 * l);
    f(2 * l + 1);
  });
  return Status::kNext;
}

template <class Op>
Status op_f32x2(Warp& w, const Insn& i, uint32_t m) {
  float* d = w.cell<float>(i.d);
  const float* a = w.cell<float>(i.a);
  const float* b = w.cell<float>(i.b);
  return each_f32x2(m, [=](int k) { d[k] = Op::f(a[k], b[k]); });
}

template <class Op>
Status op_fma_f32x2(Warp& w, const Insn& i, uint32_t m) {
  float* d = w.cell<float>(i.d);
  const float* a = w.cell<float>(i.a);
  const float* b = w.cell<float>(i.b);
  const float* c = w.cell<float>(i.c);
  return each_f32x2(m, [=](int k) { d[k] = Op::f(a[k], b[k], c[k]); });
}

Status op_f32x2_slow(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  float* d = w.cell<float>(i.d);
  const float* a = w.cell<float>(i.a);
  const float* b = w.cell<float>(i.b);
  const float* c = i.c ? w.cell<float>(i.c) : nullptr;
  return each_f32x2(m, [=, &x](int k) {
    d[k] = c ? sem::fma_f32(a[k], b[k], c[k], x.mode) : apply_f32(x.op, a[k], b[k], x.mode);
  });
}

// measured (H200): of several NaN operands b survives before c before a, quieted and with its sign;
// an invalid operation yields the host's default NaN 0xfff8000000000000.
inline double quiet(double x) { return bit_cast<double>(bit_cast<uint64_t>(x) | 1ull << 51); }
inline double nan_of(double r, double a, double b) {
  return r == r ? r : b != b ? quiet(b) : a != a ? quiet(a) : r;
}
template <Arith kOp>
struct F64Op {
  static double f(double a, double b) {
    return nan_of(kOp == kAdd ? a + b : kOp == kSub ? a - b : a * b, a, b);
  }
};
inline double nan_of(double r, double a, double b, double c) {
  return r == r ? r : b != b ? quiet(b) : c != c ? quiet(c) : nan_of(r, a, b);
}
struct F64Fma {
  static double f(double a, double b, double c) { return nan_of(std::fma(a, b, c), a, b, c); }
};

Status op_f64_slow(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  return each2<double, double>(w, i, m, [&x](double a, double b) {
    double r = x.op == kMul ? sem::mul_f64(a, b, x.mode.round)
                            : sem::add_f64(a, x.op == kSub ? -b : b, x.mode.round);
    return nan_of(r, a, b);
  });
}

Status op_fma_f64_slow(Warp& w, const Insn& i, uint32_t m) {
  const Round round = extra_of(i).mode.round;
  return each3<double, double>(w, i, m, [round](double a, double b, double c) {
    return nan_of(sem::fma_f64(a, b, c, round), a, b, c);
  });
}

Status op_div_f32(Warp& w, const Insn& i, uint32_t m) {
  const FpMode& mode = extra_of(i).mode;
  return each2<float, float>(w, i, m, [&mode, &i](float a, float b) {
    return i.aux ? sem::div_approx_f32(a, b, mode.ftz, i.aux == 2) : sem::div_f32(a, b, mode);
  });
}

Status op_div_f64(Warp& w, const Insn& i, uint32_t m) {
  const Round round = extra_of(i).mode.round;
  return each2<double, double>(w, i, m,
                               [round](double a, double b) { return sem::div_f64(a, b, round); });
}

// aux: 1 negate, 2 ftz.
Status op_absneg_f32(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  bool neg = i.aux & 1, ftz = i.aux & 2;
  lanes(m, [=](int l) {
    uint32_t v = neg ? a[l] ^ 0x80000000u : a[l] & 0x7fffffffu;
    if ((v & 0x7fffffffu) > 0x7f800000u) v = 0x7fffffffu;  // measured (H200): NaN becomes canonical
    d[l] = ftz && !(v & 0x7f800000u) ? v & 0x80000000u : v;
  });
  return Status::kNext;
}

Status op_absneg_f64(Warp& w, const Insn& i, uint32_t m) {
  uint64_t* d = w.cell<uint64_t>(i.d);
  const uint64_t* a = w.cell<uint64_t>(i.a);
  bool neg = i.aux & 1;
  // measured (H200): a NaN keeps its sign and payload.
  lanes(m, [=](int l) {
    bool nan = (a[l] << 1) > 0xffe0000000000000ull;
    d[l] = nan ? a[l] | 1ull << 51 : neg ? a[l] ^ (1ull << 63) : a[l] & ~(1ull << 63);
  });
  return Status::kNext;
}

Status op_minmax_f32(Warp& w, const Insn& i, uint32_t m) {
  const sem::MinMaxMode& mode = extra_of(i).minmax;
  if (i.c) {
    return each3<float, float>(
        w, i, m, [&mode](float a, float b, float c) { return sem::minmax3_f32(a, b, c, mode); });
  }
  return each2<float, float>(w, i, m,
                             [&mode](float a, float b) { return sem::minmax_f32(a, b, mode); });
}

// The common forms without xorsign. Comparison as signed integers orders -0 < +0 and needs no float
// compare.
template <bool kMax, bool kNan, bool kFtz>
struct MinMaxF32 {
  static float f(float a, float b) {
    a = In<kFtz>::f(a);
    b = In<kFtz>::f(b);
    int32_t ia = bit_cast<int32_t>(a), ib = bit_cast<int32_t>(b);
    int32_t ka = ia ^ ((ia >> 31) & 0x7fffffff), kb = ib ^ ((ib >> 31) & 0x7fffffff);
    float r = (kMax ? ka > kb : ka < kb) ? a : b;
    bool na = a != a, nb = b != b;
    if (kNan) return na || nb ? bit_cast<float>(0x7fffffffu) : r;
    r = na ? b : nb ? a : r;
    return na && nb ? bit_cast<float>(0x7fffffffu) : r;
  }
};

Status op_minmax_f64(Warp& w, const Insn& i, uint32_t m) {
  return each2<double, double>(w, i, m, [&i](double a, double b) {
    return a != a && b != b ? quiet(b) : sem::minmax_f64(a, b, i.aux != 0);
  });
}

// aux: 0 approximation, 1 reciprocal, 2 square root.
Status op_unary_f32(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  return each1<float, float>(w, i, m, [&x, &i](float a) {
    return i.aux == 0   ? sem::approx_f32(x.approx, a, x.mode.ftz)
           : i.aux == 1 ? sem::rcp_f32(a, x.mode)
                        : sem::sqrt_f32(a, x.mode);
  });
}

Status op_unary_f64(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  return each1<double, double>(w, i, m, [&x, &i](double a) {
    return i.aux == 0   ? sem::approx_ftz_f64(x.approx, a)
           : i.aux == 1 ? sem::div_f64(1.0, a, x.mode.round)
                        : sem::sqrt_f64(a, x.mode.round);
  });
}

// 2^x = 2^n * e^(f ln 2), |f| <= 1/2, Taylor to degree 11: relative error below 1e-12 before the
// one rounding to f32. Integers are exact because f = 0. Written so that the lane loop vectorises.
template <bool kFtz>
struct Ex2 {
  static float f(float x) {
    x = In<kFtz>::f(x);
    double d = x > 130.0f ? 130.0 : x < -160.0f ? -160.0 : static_cast<double>(x);
    d = x == x ? d : 0.0;
    double n = std::nearbyint(d), r = (d - n) * 0.693147180559945309417;
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    double scale = bit_cast<double>(
        static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(n)) + 1023) << 52);
    float v = static_cast<float>(p * scale);
    v = x == x ? v : bit_cast<float>(0x7fffffffu);
    return kFtz ? flush(v) : v;
  }
};

template <class T, class Bits>
Status op_testp(Warp& w, const Insn& i, uint32_t m) {
  const T* a = w.cell<T>(i.a);
  uint32_t r = 0;
  lanes(m, [&](int l) {
    int c = std::fpclassify(a[l]);
    bool v = false;
    switch (i.aux) {
      case 0:
        v = c != FP_NAN && c != FP_INFINITE;
        break;
      case 1:
        v = c == FP_INFINITE;
        break;
      case 2:
        v = c != FP_NAN;
        break;
      case 3:
        v = c == FP_NAN;
        break;
      case 4:
        v = c == FP_NORMAL || c == FP_ZERO;  // measured (H200): zeros count as normal
        break;
      default:
        v = c == FP_SUBNORMAL;
    }
    r |= static_cast<uint32_t>(v) << l;
  });
  set_pred(w, i.d, m, r);
  return Status::kNext;
}

template <class U>
struct CopySign {
  static U f(U sign, U value) {
    constexpr U kTop = U(1) << (sizeof(U) * 8 - 1);
    return (value & ~kTop) | (sign & kTop);
  }
};

// ---- half precision: 16-bit cells, or 32-bit cells holding two
uint16_t half_arith(const FpExtra& x, uint16_t a, uint16_t b) {
  return x.op == kAdd   ? sem::add_h(x.elem, a, b, x.mode)
         : x.op == kSub ? sem::sub_h(x.elem, a, b, x.mode)
                        : sem::mul_h(x.elem, a, b, x.mode);
}

template <class F>
void half_lanes2(Warp& w, const Insn& i, uint32_t m, bool packed, F f) {
  if (packed) {
    uint32_t* d = w.cell<uint32_t>(i.d);
    const uint32_t* a = w.cell<uint32_t>(i.a);
    const uint32_t* b = w.cell<uint32_t>(i.b ? i.b : i.a);
    const uint32_t* c = w.cell<uint32_t>(i.c ? i.c : i.a);
    lanes(m, [&](int l) {
      uint32_t lo =
          f(static_cast<uint16_t>(a[l]), static_cast<uint16_t>(b[l]), static_cast<uint16_t>(c[l]));
      uint32_t hi = f(static_cast<uint16_t>(a[l] >> 16), static_cast<uint16_t>(b[l] >> 16),
                      static_cast<uint16_t>(c[l] >> 16));
      d[l] = hi << 16 | lo;
    });
  } else {
    uint16_t* d = w.cell<uint16_t>(i.d);
    const uint16_t* a = w.cell<uint16_t>(i.a);
    const uint16_t* b = w.cell<uint16_t>(i.b ? i.b : i.a);
    const uint16_t* c = w.cell<uint16_t>(i.c ? i.c : i.a);
    lanes(m, [&](int l) { d[l] = f(a[l], b[l], c[l]); });
  }
}

Status op_half2(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  half_lanes2(w, i, m, i.aux,
              [&](uint16_t a, uint16_t b, uint16_t) { return half_arith(x, a, b); });
  return Status::kNext;
}

Status op_half_fma(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  half_lanes2(w, i, m, i.aux, [&](uint16_t a, uint16_t b, uint16_t c) {
    return sem::fma_h(x.elem, a, b, c, x.mode);
  });
  return Status::kNext;
}

Status op_half_minmax(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  half_lanes2(w, i, m, i.aux, [&](uint16_t a, uint16_t b, uint16_t) {
    return sem::minmax_h(x.elem, a, b, x.minmax);
  });
  return Status::kNext;
}

Status op_half_unary(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  half_lanes2(w, i, m, i.aux, [&](uint16_t a, uint16_t, uint16_t) {
    return sem::approx_h(x.approx, x.elem, a, x.mode.ftz);
  });
  return Status::kNext;
}

// aux: 1 packed, 2 neg, 4 ftz, 8 bf16.
Status op_half_absneg(Warp& w, const Insn& i, uint32_t m) {
  bool neg = i.aux & 2, ftz = i.aux & 4;
  half_lanes2(w, i, m, i.aux & 1, [&](uint16_t a, uint16_t, uint16_t) {
    uint16_t v = static_cast<uint16_t>(neg ? a ^ 0x8000 : a & 0x7fff);
    if (ftz && !(v & 0x7c00)) v &= 0x8000;
    if ((v & 0x7fff) > ((i.aux & 8) ? 0x7f80 : 0x7c00)) v = 0x7fff;
    return v;
  });
  return Status::kNext;
}

Status op_mixed(Warp& w, const Insn& i, uint32_t m) {
  const FpExtra& x = extra_of(i);
  float* d = w.cell<float>(i.d);
  const uint16_t* a = w.cell<uint16_t>(i.a);
  bool bf = x.elem == Elem::kBf16;
  auto up = [&](uint16_t h) { return bf ? sem::bf16_to_f32(h) : sem::f16_to_f32(h); };
  if (i.c) {
    const uint16_t* b = w.cell<uint16_t>(i.b);
    const float* c = w.cell<float>(i.c);
    lanes(m, [&](int l) { d[l] = sem::fma_f32(up(a[l]), up(b[l]), c[l], x.mode); });
  } else {
    const float* c = w.cell<float>(i.b);
    lanes(m, [&](int l) { d[l] = apply_f32(x.op, up(a[l]), c[l], x.mode); });
  }
  return Status::kNext;
}

Arith arith(Lower& L) { return L.s->op == "add" ? kAdd : L.s->op == "sub" ? kSub : kMul; }

void bin(Lower& L, Handler fn, Type t, const FpExtra* x = nullptr) {
  uint32_t a = L.src(1, t), b = L.src(2, t), d = L.dst(0, t);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
  i.x = x;
}

void tri(Lower& L, Handler fn, Type t, const FpExtra* x = nullptr) {
  uint32_t a = L.src(1, t), b = L.src(2, t), c = L.src(3, t), d = L.dst(0, t);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.x = x;
}

void un(Lower& L, Handler fn, Type t, const FpExtra* x = nullptr, int aux = 0) {
  uint32_t a = L.src(1, t), d = L.dst(0, t);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.x = x;
  i.aux = static_cast<uint16_t>(aux);
}

FpExtra* fp_extra(Lower& L) {
  auto* x = L.extra<FpExtra>();
  x->mode = mode_of(L);
  const std::string& op = L.s->op;
  if (op == "add" || op == "sub" || op == "mul") x->op = arith(L);
  x->minmax.is_max = op == "max";
  x->minmax.nan = L.has("NaN");
  x->minmax.xorsign = L.has("xorsign");
  x->minmax.abs = L.has("abs");
  x->minmax.ftz = L.has("ftz");
  static const std::unordered_map<std::string, Approx> approx = {
      {"ex2", Approx::kEx2},     {"lg2", Approx::kLg2},   {"rcp", Approx::kRcp},
      {"rsqrt", Approx::kRsqrt}, {"sqrt", Approx::kSqrt}, {"sin", Approx::kSin},
      {"cos", Approx::kCos},     {"tanh", Approx::kTanh}};
  auto it = approx.find(op);
  if (it != approx.end()) x->approx = it->second;
  for (auto& g : L.m.groups) {
    if (g == "bf16" || g == "bf16x2") x->elem = Elem::kBf16;
  }
  return x;
}

template <Arith kOp>
Handler pick_f32(bool ftz, bool sat) {
  return ftz ? (sat ? op2<float, F32Op<kOp, true, true>> : op2<float, F32Op<kOp, true, false>>)
             : (sat ? op2<float, F32Op<kOp, false, true>> : op2<float, F32Op<kOp, false, false>>);
}
template <Arith kOp>
Handler pick_f32x2(bool ftz) {
  return ftz ? op_f32x2<F32Op<kOp, true, false>> : op_f32x2<F32Op<kOp, false, false>>;
}

}  // namespace

void low_add_f32(Lower& L) {
  FpMode m = mode_of(L);
  Arith op = arith(L);
  if (m.round != Round::kRn) return bin(L, op_f32_slow, kF32, fp_extra(L));
  if (m.ftz && op == kMul)
    return bin(L, m.sat ? op_ftz<FtzMul<true>, 2> : op_ftz<FtzMul<false>, 2>, kF32, fp_extra(L));
  Handler fn = op == kAdd   ? pick_f32<kAdd>(m.ftz, m.sat)
               : op == kSub ? pick_f32<kSub>(m.ftz, m.sat)
                            : pick_f32<kMul>(m.ftz, m.sat);
  bin(L, fn, kF32);
}

void low_fma_f32(Lower& L) {
  FpMode m = mode_of(L);
  if (m.round != Round::kRn) return tri(L, op_fma_f32_slow, kF32, fp_extra(L));
  if (m.ftz)
    return tri(L, m.sat ? op_ftz<F32Fma<true, true>, 3> : op_ftz<F32Fma<true, false>, 3>, kF32,
               fp_extra(L));
  tri(L, m.sat ? op3<float, F32Fma<false, true>> : op3<float, F32Fma<false, false>>, kF32);
}

void low_add_f32x2(Lower& L) {
  FpMode m = mode_of(L);
  Arith op = arith(L);
  if (m.round != Round::kRn || (m.ftz && op == kMul))
    return bin(L, op_f32x2_slow, kB64, fp_extra(L));
  bin(L,
      op == kAdd   ? pick_f32x2<kAdd>(m.ftz)
      : op == kSub ? pick_f32x2<kSub>(m.ftz)
                   : pick_f32x2<kMul>(m.ftz),
      kB64);
}

void low_fma_f32x2(Lower& L) {
  FpMode m = mode_of(L);
  if (m.round != Round::kRn || m.ftz) return tri(L, op_f32x2_slow, kB64, fp_extra(L));
  tri(L, op_fma_f32x2<F32Fma<false, false>>, kB64);
}

void low_add_f64(Lower& L) {
  FpMode m = mode_of(L);
  Arith op = arith(L);
  if (m.round != Round::kRn) return bin(L, op_f64_slow, kF64, fp_extra(L));
  bin(L,
      op == kAdd   ? op2<double, F64Op<kAdd>>
      : op == kSub ? op2<double, F64Op<kSub>>
                   : op2<double, F64Op<kMul>>,
      kF64);
}

void low_fma_f64(Lower& L) {
  if (mode_of(L).round != Round::kRn) return tri(L, op_fma_f64_slow, kF64, fp_extra(L));
  tri(L, op3<double, F64Fma>, kF64);
}

void low_div_f32(Lower& L) {
  bin(L, op_div_f32, kF32, fp_extra(L));
  L.last().aux = L.has("approx") ? 1 : L.has("full") ? 2 : 0;
}

void low_div_f64(Lower& L) { bin(L, op_div_f64, kF64, fp_extra(L)); }

void low_abs_float(Lower& L) {
  Type t = L.type();
  int neg = L.s->op == "neg" ? 1 : 0;
  un(L, t.bits == 32 ? op_absneg_f32 : op_absneg_f64, t, nullptr, neg | (L.has("ftz") ? 2 : 0));
}

void low_minmax_f32(Lower& L) {
  bool max = L.s->op == "max", nan = L.has("NaN"), ftz = L.has("ftz");
  if (L.count() == 4) {
    if (L.has("xorsign")) L.fail("three-input min/max has no .xorsign");
    return tri(L, op_minmax_f32, kF32, fp_extra(L));
  }
  if (L.has("xorsign") || L.has("abs")) return bin(L, op_minmax_f32, kF32, fp_extra(L));
#define X(F)                                                                                  \
  (max ? (nan ? op2<float, MinMaxF32<true, true, F>> : op2<float, MinMaxF32<true, false, F>>) \
       : (nan ? op2<float, MinMaxF32<false, true, F>> : op2<float, MinMaxF32<false, false, F>>))
  bin(L, ftz ? X(true) : X(false), kF32);
#undef X
}

void low_minmax_f64(Lower& L) {
  bin(L, op_minmax_f64, kF64);
  L.last().aux = L.s->op == "max";
}

void low_unary_f32(Lower& L) {
  if (L.s->op == "ex2")
    return un(L, L.has("ftz") ? op1<float, Ex2<true>> : op1<float, Ex2<false>>, kF32);
  un(L, op_unary_f32, kF32, fp_extra(L), L.has("approx") ? 0 : L.s->op == "rcp" ? 1 : 2);
}

void low_unary_f64(Lower& L) {
  un(L, op_unary_f64, kF64, fp_extra(L), L.has("approx") ? 0 : L.s->op == "rcp" ? 1 : 2);
}

void low_testp(Lower& L) {
  static const char* names[] = {"finite",     "infinite", "number",
                                "notanumber", "normal",   "subnormal"};
  Type t = L.type();
  uint32_t a = L.src(1, t), d = L.dst(0, Type{'p', 1, 1});
  Insn& i = L.emit(t.bits == 32 ? op_testp<float, uint32_t> : op_testp<double, uint64_t>);
  i.d = d;
  i.a = a;
  for (uint16_t k = 0; k < 6; ++k) {
    if (L.mod(0) == names[k]) i.aux = k;
  }
}

void low_copysign(Lower& L) {
  Type t = L.type();
  bin(L, t.bits == 32 ? op2<uint32_t, CopySign<uint32_t>> : op2<uint64_t, CopySign<uint64_t>>, t);
}

void low_add_half(Lower& L) {
  Type t = L.type();
  bin(L, op_half2, t, fp_extra(L));
  L.last().aux = t.packed == 2;
}

void low_fma_half(Lower& L) {
  Type t = L.type();
  tri(L, op_half_fma, t, fp_extra(L));
  L.last().aux = t.packed == 2;
}

void low_abs_half(Lower& L) {
  Type t = L.type();
  un(L, op_half_absneg, t, nullptr,
     (t.packed == 2 ? 1 : 0) | (L.s->op == "neg" ? 2 : 0) | (L.has("ftz") ? 4 : 0) |
         (t.kind == 'h' ? 8 : 0));
}

void low_minmax_half(Lower& L) {
  Type t = L.type();
  bin(L, op_half_minmax, t, fp_extra(L));
  L.last().aux = t.packed == 2;
}

void low_unary_half(Lower& L) {
  Type t = L.type();
  un(L, op_half_unary, t, fp_extra(L), t.packed == 2);
}

void low_add_mixed(Lower& L) {
  Type h = L.type(1);
  FpExtra* x = fp_extra(L);
  uint32_t a = L.src(1, h), b = L.src(2, kF32), d = L.dst(0, kF32);
  Insn& i = L.emit(op_mixed);
  i.d = d;
  i.a = a;
  i.b = b;
  i.x = x;
}

void low_fma_mixed(Lower& L) {
  Type h = L.type(1);
  FpExtra* x = fp_extra(L);
  uint32_t a = L.src(1, h), b = L.src(2, h), c = L.src(3, kF32), d = L.dst(0, kF32);
  Insn& i = L.emit(op_mixed);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.x = x;
}

}  // namespace ptxsim
