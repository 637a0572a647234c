// SPDX-License-Identifier: Apache-2.0
// cvt (PTX ISA 9.7.9.21-9.7.9.22); the conversions themselves are sem/narrow.h.
#include "cells.h"
#include "lanes.h"
#include "lower.h"
#include "sem/narrow.h"

namespace ptxsim {
namespace {

using sem::CvtMode;
using sem::Elem;
using sem::Round;

const Type kU32{'u', 32, 1};
const Type kF32{'f', 32, 1};

struct CvtExtra : Extra {
  Type to, from;
  Elem to_elem = Elem::kF32, from_elem = Elem::kF32;
  CvtMode mode;
  bool integral = false;                 // float to float with an integer rounding modifier
  uint8_t from_cell = 32, to_cell = 32;  // register widths
  std::vector<uint32_t> cells;           // further sources
};

int64_t extend(uint64_t v, Type t) {
  if (t.bits == 64) return static_cast<int64_t>(v);
  uint64_t mask = (1ull << t.bits) - 1;
  v &= mask;
  if (t.kind == 's' && (v >> (t.bits - 1) & 1)) v |= ~mask;
  return static_cast<int64_t>(v);
}

double float_in(const CvtExtra& x, uint64_t v) {
  switch (x.from_elem) {
    case Elem::kF64:
      return sem::bits_f64(v);
    case Elem::kF32: {
      uint32_t u = static_cast<uint32_t>(v);
      if (x.mode.ftz && !(u & 0x7f800000u)) u &= 0x80000000u;
      return sem::bits_f32(u);
    }
    default:
      return sem::decode(x.from_elem, static_cast<uint32_t>(v));
  }
}

uint64_t convert(const CvtExtra& x, uint64_t v) {
  bool from_float = x.from.kind == 'f' || x.from.kind == 'h';
  bool to_float = x.to.kind == 'f' || x.to.kind == 'h';
  if (!from_float && !to_float) {
    uint64_t e = static_cast<uint64_t>(extend(v, x.from));
    return sem::int_to_int(e, x.from.kind == 's', x.to.bits, x.to.kind == 's', x.mode.sat);
  }
  if (!from_float) {
    uint64_t r = sem::int_to_float(x.to_elem, static_cast<uint64_t>(extend(v, x.from)),
                                   x.from.kind == 's', x.mode.round);
    if (x.mode.sat) {
      double d = x.to_elem == Elem::kF64   ? sem::bits_f64(r)
                 : x.to_elem == Elem::kF32 ? sem::bits_f32(static_cast<uint32_t>(r))
                                           : sem::decode(x.to_elem, static_cast<uint32_t>(r));
      d = d > 0 ? (d < 1 ? d : 1) : 0;
      return x.to_elem == Elem::kF64 ? sem::f64_bits(d) : sem::encode(x.to_elem, d);
    }
    return r;
  }
  double d = float_in(x, v);
  if (to_float && d != d) {  // measured (H200): which conversions keep the payload of a NaN
    if (x.from_elem == Elem::kF64 && x.to_elem == Elem::kF16 && !x.mode.satfinite && !x.mode.relu &&
        !x.mode.sat) {
      return static_cast<uint16_t>(v >> 48 & 0x8000) | 0x7e00 |
             static_cast<uint16_t>(v >> 42 & 0x3ff);
    }
    if (x.from_elem == Elem::kF16 && x.to_elem == Elem::kF64 && !x.mode.sat) {
      return (v & 0x8000) << 48 | 0x7ff8000000000000ull | (v & 0x3ff) << 42;
    }
    if (x.to_elem == Elem::kTf32 && x.mode.round == Round::kRna && !x.mode.satfinite &&
        !x.mode.relu)
      return v & 0xffffe000u;
    if (x.integral && x.to_elem == Elem::kF32) return x.mode.sat ? 0 : 0x7fffffffu;
  }
  if (!to_float) {
    return sem::float_to_int(d, x.from_elem == Elem::kF64, x.to.bits, x.to.kind == 's',
                             x.mode.round);
  }
  if (x.integral) d = sem::round_integral(d, x.mode.round);
  if (x.to_elem == Elem::kF64) {
    if (x.mode.sat) d = d > 0 ? (d < 1 ? d : 1) : 0;
    return sem::f64_bits(d);
  }
  if (x.to_elem == Elem::kF32 && x.from_elem == Elem::kF64 && !x.mode.sat) {
    return sem::f32_bits(sem::f64_to_f32(d, x.integral ? Round::kRn : x.mode.round, x.mode.ftz));
  }
  CvtMode mode = x.mode;
  if (x.integral) mode.round = Round::kRn;
  return sem::encode(x.to_elem, d, mode);
}

Status op_cvt(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CvtExtra*>(i.x);
  lanes(m, [&](int l) {
    put_elem(w, i.d, x.to_cell, l, convert(x, get_elem(w, i.a, x.from_cell, l)));
  });
  return Status::kNext;
}

// Integer width changes without saturation.
template <class D, class S, class From>
Status op_cvt_int(Warp& w, const Insn& i, uint32_t m) {
  D* d = w.cell<D>(i.d);
  const S* a = w.cell<S>(i.a);
  lanes(m, [=](int l) { d[l] = static_cast<D>(static_cast<From>(a[l])); });
  return Status::kNext;
}

struct F16ToF32 {
  static float f(uint16_t h) { return sem::f16_to_f32(h); }
};
struct Bf16ToF32 {
  static uint32_t f(uint16_t h) { return static_cast<uint32_t>(h) << 16; }
};

// d = pack(a hi, b lo) from two f32 registers; four sources for the x4 forms.
Status op_cvt_pack(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CvtExtra*>(i.x);
  const float* a = w.cell<float>(i.a);
  const float* b = w.cell<float>(i.b);
  const uint32_t* r = i.c ? w.cell<uint32_t>(i.c) : nullptr;
  lanes(m, [&](int l) {
    CvtMode mode = x.mode;
    if (r) mode.rbits = r[l];
    uint32_t v;
    if (!x.cells.empty()) {
      double e[4];
      for (int k = 0; k < 4; ++k) e[k] = w.cell<float>(x.cells[k])[l];
      v = sem::pack4_rs(x.to_elem, e, mode.relu, r[l]);
    } else {
      v = sem::pack2(x.to_elem, a[l], b[l], mode);
    }
    put_elem(w, i.d, x.to_cell, l, v);
  });
  return Status::kNext;
}

// Fast paths of the packed conversions that attention kernels are made of; sem/narrow.h says the
// same.
struct PackBf16 {
  static uint32_t one(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    uint32_t r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : r;
  }
  static uint32_t f(float hi, float lo) { return one(hi) << 16 | one(lo); }
};
struct PackE4m3 {
  static uint32_t one(float x) {
    uint32_t u = bit_cast<uint32_t>(x), a = u & 0x7fffffffu, sign = u >> 24 & 0x80;
    // Normal results: round the mantissa to 3 bits and rebias 127 -> 7. Below 2^-6: units of 2^-9,
    // where adding 2^14 leaves the rounded count in the low bits of the sum.
    uint32_t normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(a) + 16384.0f) & 0xff;
    uint32_t r = a < 0x3c800000u ? tiny : normal;
    r = a >= 0x43e00000u ? 0x7e : r;
    return a > 0x7f800000u ? 0x7f : sign | r;
  }
  static uint16_t f(float hi, float lo) { return static_cast<uint16_t>(one(hi) << 8 | one(lo)); }
};

Status op_cvt_pair(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CvtExtra*>(i.x);
  lanes(m, [&](int l) {
    double hi, lo;
    sem::unpack2(x.from_elem, static_cast<uint32_t>(get_elem(w, i.a, x.from_cell, l)), &hi, &lo);
    put_elem(w, i.d, x.to_cell, l, sem::pack2(x.to_elem, hi, lo, x.mode));
  });
  return Status::kNext;
}

// aux: bits of one element; n: 1 signed, 2 with c.
Status op_cvt_packint(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const int32_t* a = w.cell<int32_t>(i.a);
  const int32_t* b = w.cell<int32_t>(i.b);
  const uint32_t* c = i.c ? w.cell<uint32_t>(i.c) : nullptr;
  int bits = i.aux;
  int64_t lo = (i.n & 1) ? -(1ll << (bits - 1)) : 0,
          hi = (i.n & 1) ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
  uint32_t mask = static_cast<uint32_t>((1ull << bits) - 1);
  lanes(m, [=](int l) {
    auto sat = [&](int64_t v) {
      return static_cast<uint32_t>(v < lo ? lo : v > hi ? hi : v) & mask;
    };
    uint32_t r = sat(a[l]) << bits | sat(b[l]);
    if (c) r |= c[l] << (2 * bits);
    d[l] = r;
  });
  return Status::kNext;
}

Elem elem_of(const std::string& name) {
  static const std::unordered_map<std::string, Elem> map = {
      {"f64", Elem::kF64},     {"f32", Elem::kF32},     {"tf32", Elem::kTf32},
      {"f16", Elem::kF16},     {"bf16", Elem::kBf16},   {"f16x2", Elem::kF16},
      {"bf16x2", Elem::kBf16}, {"e4m3x2", Elem::kE4m3}, {"e5m2x2", Elem::kE5m2},
      {"e2m3x2", Elem::kE2m3}, {"e3m2x2", Elem::kE3m2}, {"e2m1x2", Elem::kE2m1},
      {"e4m3x4", Elem::kE4m3}, {"e5m2x4", Elem::kE5m2}, {"e2m3x4", Elem::kE2m3},
      {"e3m2x4", Elem::kE3m2}, {"e2m1x4", Elem::kE2m1}, {"ue8m0x2", Elem::kUe8m0}};
  auto it = map.find(name);
  return it == map.end() ? Elem::kF32 : it->second;
}

CvtMode cvt_mode(Lower& L) {
  CvtMode c;
  c.round = L.has("rna")                  ? Round::kRna
            : L.has("rs")                 ? Round::kRs
            : L.has("rz") || L.has("rzi") ? Round::kRz
            : L.has("rm") || L.has("rmi") ? Round::kRm
            : L.has("rp") || L.has("rpi") ? Round::kRp
                                          : Round::kRn;
  c.satfinite = L.has("satfinite");
  c.relu = L.has("relu");
  c.sat = L.has("sat");
  c.ftz = L.has("ftz");
  return c;
}

// Register source of a conversion: its width may exceed the type's.
uint32_t loose_src(Lower& L, const Operand& o, Type t, uint8_t* cell_bits) {
  if (o.kind == Operand::kReg) {
    Type r = L.reg_type(o);
    if (r.kind == 'p' || r.bits == 128 || r.bits < t.bits)
      L.fail("register too narrow for the source type");
    *cell_bits = static_cast<uint8_t>(cell_width(r));
    return L.src(o, r);
  }
  *cell_bits = static_cast<uint8_t>(cell_width(t));
  return L.src(o, t);
}

// Results narrower than the register are extended by their signedness (the callers produce 64-bit
// extended values).
uint32_t loose_dst(Lower& L, const Operand& o, Type t, uint8_t* cell_bits) {
  if (o.kind == Operand::kReg) {
    Type r = L.reg_type(o);
    if (r.kind == 'p' || r.bits == 128 || r.bits < t.bits)
      L.fail("register too narrow for the destination type");
    *cell_bits = static_cast<uint8_t>(cell_width(r));
    return L.dst(o, r);
  }
  *cell_bits = static_cast<uint8_t>(cell_width(t));
  return L.dst(o, t);
}

}  // namespace

void low_cvt(Lower& L) {
  auto* x = L.extra<CvtExtra>();
  size_t n = L.m.groups.size();
  const std::string &to = L.mod(n - 2), &from = L.mod(n - 1);
  x->mode = cvt_mode(L);
  bool tf32 = to == "tf32";
  if (tf32) {
    x->to = Type{'f', 32, 1};
  } else if (!parse_type(to, &x->to)) {
    L.fail("unknown type " + to);
  }
  if (from == "tf32" || !parse_type(from, &x->from)) L.fail("unknown source type " + from);
  x->to_elem = elem_of(to);
  x->from_elem = elem_of(from);
  bool from_float = x->from.kind == 'f' || x->from.kind == 'h',
       to_float = x->to.kind == 'f' || x->to.kind == 'h';
  bool integer_round = L.has("rni") || L.has("rzi") || L.has("rmi") || L.has("rpi");
  bool float_round = L.has("rn") || L.has("rz") || L.has("rm") || L.has("rp") || L.has("rna");
  if (from_float && !to_float && !integer_round)
    L.fail("float to integer needs an integer rounding modifier");
  if (!from_float && to_float && !float_round) L.fail("integer to float needs a rounding modifier");
  if (!from_float && !to_float && (integer_round || float_round))
    L.fail("no rounding between integers");
  x->integral = from_float && to_float && integer_round;
  if (tf32 && from != "f32") L.fail("cvt to tf32 takes f32");
  uint32_t a = L.src_loose(L.op(1), x->from, &x->from_cell);
  uint32_t d = L.dst_loose(L.op(0), x->to, &x->to_cell);
  Handler fn = op_cvt;
  if (!from_float && !to_float && !x->mode.sat) {
    // The narrower type decides which bits survive; of equal widths the destination's signedness
    // extends into the register.
    Type via = x->from.bits < x->to.bits ? x->from : x->to;
    bool direct = via.bits == x->from.bits ? true : x->to.bits == x->to_cell || x->to_cell <= 16;
    auto pick_from = [&](auto dcell, auto scell) -> Handler {
      using D = decltype(dcell);
      using S = decltype(scell);
      bool sg = via.kind == 's';
      switch (via.bits) {
        case 8:
          return sg ? op_cvt_int<D, S, int8_t> : op_cvt_int<D, S, uint8_t>;
        case 16:
          return sg ? op_cvt_int<D, S, int16_t> : op_cvt_int<D, S, uint16_t>;
        case 32:
          return sg ? op_cvt_int<D, S, int32_t> : op_cvt_int<D, S, uint32_t>;
        default:
          return op_cvt_int<D, S, uint64_t>;
      }
    };
    auto pick_src = [&](auto dcell) -> Handler {
      return x->from_cell == 16   ? pick_from(dcell, uint16_t())
             : x->from_cell == 32 ? pick_from(dcell, uint32_t())
                                  : pick_from(dcell, uint64_t());
    };
    // A destination narrower than its register after widening (u16 -> s32 in a 64-bit register)
    // keeps the general path.
    if (direct && (x->to_cell == cell_width(x->to))) {
      fn = x->to_cell == 16   ? pick_src(uint16_t())
           : x->to_cell == 32 ? pick_src(uint32_t())
                              : pick_src(uint64_t());
    }
  } else if (to == "f32" && from == "f16" && !x->mode.sat && !x->mode.ftz && !x->integral &&
             x->from_cell == 16) {
    fn = op1x<float, uint16_t, F16ToF32>;
  } else if (to == "f32" && from == "bf16" && !x->mode.sat && !x->mode.ftz && x->from_cell == 16 &&
             x->to_cell == 32) {
    fn = op1x<uint32_t, uint16_t, Bf16ToF32>;
  }
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.x = x;
}

void low_cvt_pack(Lower& L) {
  auto* x = L.extra<CvtExtra>();
  const std::string& to = L.mod(L.m.groups.size() - 2);
  x->mode = cvt_mode(L);
  x->to_elem = elem_of(to);
  bool x4 = to.back() == '4';
  int bits = x4                                ? (to == "e2m1x4" ? 16 : 32)
             : to == "f16x2" || to == "bf16x2" ? 32
             : to == "e2m1x2"                  ? 8
                                               : 16;
  Type t{'b', static_cast<uint16_t>(bits), 1};
  uint32_t a = 0, b = 0, c = 0;
  if (x4) {
    if (L.op(1).kind != Operand::kVec || L.op(1).elems.size() != 4) L.fail("expected {a, b, e, f}");
    x->cells = L.vec(L.op(1), kF32, false);
    a = b = x->cells[0];
    c = L.src(2, kU32);
  } else {
    a = L.src(1, kF32);
    b = L.src(2, kF32);
    if (L.count() == 4) c = L.src(3, kU32);
  }
  uint32_t d = L.dst_loose(L.op(0), t, &x->to_cell);
  Handler fn = op_cvt_pack;
  bool plain = L.has("rn") && !L.has("relu");
  if (plain && to == "bf16x2" && !L.has("satfinite")) fn = op2x<uint32_t, float, PackBf16>;
  if (plain && to == "e4m3x2" && x->to_cell == 16) fn = op2x<uint16_t, float, PackE4m3>;
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.x = x;
}

void low_cvt_pair(Lower& L) {
  auto* x = L.extra<CvtExtra>();
  size_t n = L.m.groups.size();
  const std::string &to = L.mod(n - 2), &from = L.mod(n - 1);
  x->mode = cvt_mode(L);
  x->to_elem = elem_of(to);
  x->from_elem = elem_of(from);
  auto bits = [](const std::string& s) {
    return s == "f16x2" || s == "bf16x2" ? 32 : s == "e2m1x2" ? 8 : 16;
  };
  uint32_t a = L.src_loose(L.op(1), Type{'b', static_cast<uint16_t>(bits(from)), 1}, &x->from_cell);
  uint32_t d = L.dst_loose(L.op(0), Type{'b', static_cast<uint16_t>(bits(to)), 1}, &x->to_cell);
  Insn& i = L.emit(op_cvt_pair);
  i.d = d;
  i.a = a;
  i.x = x;
}

void low_cvt_packint(Lower& L) {
  const std::string& to = L.mod(2);
  uint32_t a = L.src(1, kU32), b = L.src(2, kU32), c = L.count() == 4 ? L.src(3, kU32) : 0,
           d = L.dst(0, kU32);
  Insn& i = L.emit(op_cvt_packint);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.n = to[0] == 's';
  i.aux = static_cast<uint16_t>(atoi(to.c_str() + 1));
}

uint32_t Lower::src_loose(const Operand& o, Type t, uint8_t* cell_bits) {
  return loose_src(*this, o, t, cell_bits);
}
uint32_t Lower::dst_loose(const Operand& o, Type t, uint8_t* cell_bits) {
  return loose_dst(*this, o, t, cell_bits);
}

}  // namespace ptxsim
