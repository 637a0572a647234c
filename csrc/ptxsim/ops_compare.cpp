// SPDX-License-Identifier: Apache-2.0
// Comparison and selection (PTX ISA 9.7.6, 9.7.7.2).
#include <cmath>

#include "cells.h"
#include "lanes.h"
#include "lower.h"
#include "sem/narrow.h"

namespace ptxsim {
namespace {

using sem::Elem;

const Type kPred{'p', 1, 1};

template <class T>
Status op_selp(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  uint32_t p = *w.cell<uint32_t>(i.c);
  if (i.aux) p = ~p;
  lanes(m, [=](int l) { d[l] = (p >> l & 1) ? a[l] : b[l]; });
  return Status::kNext;
}

// aux: 1 c is a float, 2 ftz.
template <class T>
Status op_slct(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  lanes(m, [=](int l) {
    bool ge;
    if (i.aux & 1) {
      uint32_t u = c[l];
      if ((i.aux & 2) && !(u & 0x7f800000u)) u &= 0x80000000u;
      ge = bit_cast<float>(u) >= 0.0f;  // NaN selects b
    } else {
      ge = static_cast<int32_t>(c[l]) >= 0;
    }
    d[l] = ge ? a[l] : b[l];
  });
  return Status::kNext;
}

enum Cmp : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

Cmp cmp_of(const std::string& name) {
  static const std::unordered_map<std::string, Cmp> map = {
      {"eq", kEq},   {"ne", kNe},   {"lt", kLt},   {"le", kLe},   {"gt", kGt},   {"ge", kGe},
      {"lo", kLt},   {"ls", kLe},   {"hi", kGt},   {"hs", kGe},   {"equ", kEqu}, {"neu", kNeu},
      {"ltu", kLtu}, {"leu", kLeu}, {"gtu", kGtu}, {"geu", kGeu}, {"num", kNum}, {"nan", kNan}};
  return map.at(name);
}

template <class T, Cmp kOp>
inline bool compare(T a, T b) {
  switch (kOp) {
    case kEq:
      return a == b;
    case kNe:
      return a < b || a > b;  // ordered: false for NaN
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kEqu:
      return !(a < b || a > b);
    case kNeu:
      return !(a == b);
    case kLtu:
      return !(a >= b);
    case kLeu:
      return !(a > b);
    case kGtu:
      return !(a <= b);
    case kGeu:
      return !(a < b);
    case kNum:
      return a == a && b == b;
    default:
      return !(a == a && b == b);
  }
}

template <class T, Cmp kOp>
uint32_t compare_lanes(const Warp& w, const Insn& i, bool ftz) {
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  uint8_t r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    T x = a[l], y = b[l];
    if (std::is_same<T, float>::value && ftz) {
      x = static_cast<T>(std::fabs(static_cast<float>(x)) < 1.17549435e-38f ? 0.0f : x);
      y = static_cast<T>(std::fabs(static_cast<float>(y)) < 1.17549435e-38f ? 0.0f : y);
    }
    r[l] = compare<T, kOp>(x, y);
  }
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= static_cast<uint32_t>(r[l]) << l;
  return bits;
}

struct SetExtra : Extra {
  uint32_t q = 0;  // second destination of setp, 0 = none
  uint32_t c = 0;  // predicate combined in, 0 = none
  bool not_c = false;
  uint8_t bool_op = 0;  // 0 none, 1 and, 2 or, 3 xor
  bool ftz = false;
  uint8_t result = 0;  // set: 1 = u32/s32 all ones, 2 = f32 1.0
};

uint32_t combine(uint32_t r, uint32_t c, int op) {
  return op == 1 ? r & c : op == 2 ? r | c : op == 3 ? r ^ c : r;
}

template <class T, Cmp kOp>
Status op_setp(Warp& w, const Insn& i, uint32_t m) {
  uint32_t r = compare_lanes<T, kOp>(w, i, false);
  set_pred(w, i.d, m, r);
  return Status::kNext;
}

template <class T, Cmp kOp>
Status op_setp_full(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const SetExtra*>(i.x);
  uint32_t r = compare_lanes<T, kOp>(w, i, x.ftz);
  uint32_t c = x.c ? *w.cell<uint32_t>(x.c) : 0;
  if (x.not_c) c = ~c;
  uint32_t p = combine(r, c, x.bool_op);
  if (x.result) {
    uint32_t* d = w.cell<uint32_t>(i.d);
    uint32_t one = x.result == 1 ? 0xffffffffu : 0x3f800000u;
    lanes(m, [&](int l) { d[l] = (p >> l & 1) ? one : 0; });
    return Status::kNext;
  }
  uint32_t q = combine(~r, c, x.bool_op);
  set_pred(w, i.d, m, p);
  if (x.q) set_pred(w, x.q, m, q);
  return Status::kNext;
}

template <class T>
Handler pick_cmp(Cmp c, bool full) {
#define X(K) \
  case K:    \
    return full ? op_setp_full<T, K> : op_setp<T, K>;
  switch (c) {
    X(kEq)
    X(kNe)
    X(kLt)
    X(kLe)
    X(kGt)
    X(kGe)
    default:
      break;
  }
  if constexpr (std::is_floating_point<T>::value) {
    switch (c) {
      X(kEqu)
      X(kNeu)
      X(kLtu)
      X(kLeu)
      X(kGtu)
      X(kGeu)
      X(kNum)
      X(kNan)
      default:
        break;
    }
  }
#undef X
  return nullptr;
}

Handler pick_cmp_type(Type t, Cmp c, bool full) {
  if (t.kind == 'f') return t.bits == 32 ? pick_cmp<float>(c, full) : pick_cmp<double>(c, full);
  if (t.kind == 's') {
    return t.bits == 16   ? pick_cmp<int16_t>(c, full)
           : t.bits == 32 ? pick_cmp<int32_t>(c, full)
                          : pick_cmp<int64_t>(c, full);
  }
  return t.bits == 16   ? pick_cmp<uint16_t>(c, full)
         : t.bits == 32 ? pick_cmp<uint32_t>(c, full)
                        : pick_cmp<uint64_t>(c, full);
}

struct HalfSet : SetExtra {
  Elem elem = Elem::kF16;
  bool packed = false;
  Cmp cmp = kEq;
};

bool compare_f(Cmp c, float a, float b) {
  switch (c) {
#define X(K) \
  case K:    \
    return compare<float, K>(a, b);
    X(kEq)
    X(kNe)
    X(kLt)
    X(kLe)
    X(kGt)
    X(kGe)
    X(kEqu)
    X(kNeu)
    X(kLtu)
    X(kLeu)
    X(kGtu)
    X(kGeu)
    X(kNum)
    X(kNan)
#undef X
  }
  return false;
}

// Packed: p is the comparison of the low halves, q of the high halves. Scalar: q is the complement.
Status op_setp_half(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const HalfSet*>(i.x);
  auto up = [&](uint16_t h) {
    if (x.elem == Elem::kBf16) return sem::bf16_to_f32(h);
    if (x.ftz && !(h & 0x7c00)) h &= 0x8000;
    return sem::f16_to_f32(h);
  };
  uint32_t r = 0, r2 = 0;
  lanes(m, [&](int l) {
    uint32_t a = x.packed ? w.cell<uint32_t>(i.a)[l] : w.cell<uint16_t>(i.a)[l];
    uint32_t b = x.packed ? w.cell<uint32_t>(i.b)[l] : w.cell<uint16_t>(i.b)[l];
    r |= static_cast<uint32_t>(
             compare_f(x.cmp, up(static_cast<uint16_t>(a)), up(static_cast<uint16_t>(b))))
         << l;
    if (x.packed) {
      r2 |= static_cast<uint32_t>(compare_f(x.cmp, up(static_cast<uint16_t>(a >> 16)),
                                            up(static_cast<uint16_t>(b >> 16))))
            << l;
    }
  });
  uint32_t c = x.c ? *w.cell<uint32_t>(x.c) : 0;
  if (x.not_c) c = ~c;
  set_pred(w, i.d, m, combine(r, c, x.bool_op));
  if (x.q) set_pred(w, x.q, m, combine(x.packed ? r2 : ~r, c, x.bool_op));
  return Status::kNext;
}

}  // namespace

void low_selp(Lower& L) {
  Type t = L.type();
  bool neg = false;
  uint32_t a = L.src(1, t), b = L.src(2, t), c = L.pred(L.op(3), &neg), d = L.dst(0, t);
  Insn& i = L.emit(t.bits == 16   ? op_selp<uint16_t>
                   : t.bits == 32 ? op_selp<uint32_t>
                                  : op_selp<uint64_t>);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.aux = neg;
}

void low_slct(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), b = L.src(2, t), c = L.src(3, L.type(1)), d = L.dst(0, t);
  Insn& i = L.emit(t.bits == 16   ? op_slct<uint16_t>
                   : t.bits == 32 ? op_slct<uint32_t>
                                  : op_slct<uint64_t>);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.aux = static_cast<uint16_t>((L.type(1).kind == 'f' ? 1 : 0) | (L.has("ftz") ? 2 : 0));
}

namespace {
void set_common(Lower& L, SetExtra* x, bool* full) {
  x->ftz = L.has("ftz");
  x->bool_op = L.has("and") ? 1 : L.has("or") ? 2 : L.has("xor") ? 3 : 0;
  if ((x->bool_op != 0) != (L.count() == 4)) L.fail("a boolean operator needs a predicate operand");
  if (x->bool_op) x->c = L.pred(L.op(3), &x->not_c);
  *full = x->ftz || x->bool_op;
}
}  // namespace

void low_setp(Lower& L) {
  Type t = L.type();
  auto* x = L.extra<SetExtra>();
  bool full = false;
  set_common(L, x, &full);
  const Operand& d = L.op(0);
  uint32_t p;
  if (d.kind == Operand::kPair) {
    p = L.dst(d.elems[0], kPred);
    x->q = L.dst(d.elems[1], kPred);
    full = true;
  } else {
    p = L.dst(d, kPred);
  }
  Handler fn = pick_cmp_type(t, cmp_of(L.mod(0)), full);
  if (!fn) L.fail("comparison needs a floating-point type");
  uint32_t a = L.src(1, t), b = L.src(2, t);
  Insn& i = L.emit(fn);
  i.d = p;
  i.a = a;
  i.b = b;
  i.x = x;
}

void low_set(Lower& L) {
  Type to = L.type(0), t = L.type(1);
  auto* x = L.extra<SetExtra>();
  bool full = false;
  set_common(L, x, &full);
  x->result = to.kind == 'f' ? 2 : 1;
  Handler fn = pick_cmp_type(t, cmp_of(L.mod(0)), true);
  if (!fn) L.fail("comparison needs a floating-point type");
  uint32_t a = L.src(1, t), b = L.src(2, t), d = L.dst(0, to);
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = a;
  i.b = b;
  i.x = x;
}

void low_setp_half(Lower& L) {
  Type t = L.type();
  auto* x = L.extra<HalfSet>();
  bool full = false;
  set_common(L, x, &full);
  x->elem = t.kind == 'h' ? Elem::kBf16 : Elem::kF16;
  x->packed = t.packed == 2;
  x->cmp = cmp_of(L.mod(0));
  const Operand& d = L.op(0);
  uint32_t p;
  if (d.kind == Operand::kPair) {
    p = L.dst(d.elems[0], kPred);
    x->q = L.dst(d.elems[1], kPred);
  } else {
    if (x->packed) L.fail("packed setp needs p|q");
    p = L.dst(d, kPred);
  }
  uint32_t a = L.src(1, t), b = L.src(2, t);
  Insn& i = L.emit(op_setp_half);
  i.d = p;
  i.a = a;
  i.b = b;
  i.x = x;
}

}  // namespace ptxsim
