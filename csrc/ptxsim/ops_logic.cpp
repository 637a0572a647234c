// SPDX-License-Identifier: Apache-2.0
// Logic and shifts (PTX ISA 9.7.8).
#include <type_traits>

#include "int_pick.h"

namespace ptxsim {
namespace {

template <class T>
constexpr int kBits = sizeof(T) * 8;
// 16-bit operands widen to int; shifting in unsigned avoids its overflow.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, uint32_t, std::make_unsigned_t<T>>;

template <class T>
struct And {
  static T f(T a, T b) { return a & b; }
};
template <class T>
struct Or {
  static T f(T a, T b) { return a | b; }
};
template <class T>
struct Xor {
  static T f(T a, T b) { return a ^ b; }
};
template <class T>
struct Not {
  static T f(T a) { return static_cast<T>(~a); }
};
template <class T>
struct Cnot {
  static T f(T a) { return a == 0; }
};

// aux: 0 and, 1 or, 2 xor, 3 not; flags of negated operands at 4 and 8.
Status op_pred_logic(Warp& w, const Insn& i, uint32_t m) {
  uint32_t a = *w.cell<uint32_t>(i.a), b = i.b ? *w.cell<uint32_t>(i.b) : 0;
  if (i.aux & 4) a = ~a;
  if (i.aux & 8) b = ~b;
  uint32_t r = (i.aux & 3) == 0 ? a & b : (i.aux & 3) == 1 ? a | b : (i.aux & 3) == 2 ? a ^ b : ~a;
  set_pred(w, i.d, m, r);
  return Status::kNext;
}

uint32_t lop3_value(uint32_t a, uint32_t b, uint32_t c, int lut) {
  uint32_t r = 0;
  if (lut & 0x01) r |= ~a & ~b & ~c;
  if (lut & 0x02) r |= ~a & ~b & c;
  if (lut & 0x04) r |= ~a & b & ~c;
  if (lut & 0x08) r |= ~a & b & c;
  if (lut & 0x10) r |= a & ~b & ~c;
  if (lut & 0x20) r |= a & ~b & c;
  if (lut & 0x40) r |= a & b & ~c;
  if (lut & 0x80) r |= a & b & c;
  return r;
}

Status op_lop3(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  int lut = i.aux;
  lanes(m, [=](int l) { d[l] = lop3_value(a[l], b[l], c[l], lut); });
  return Status::kNext;
}

struct LopPred : Extra {
  uint32_t p, q;
  bool is_and, negate;
};

Status op_lop3_pred(Warp& w, const Insn& i, uint32_t m) {
  op_lop3(w, i, m);
  auto& x = *static_cast<const LopPred*>(i.x);
  const uint32_t* d = w.cell<uint32_t>(i.d);
  uint32_t nonzero = 0, q = *w.cell<uint32_t>(x.q);
  if (x.negate) q = ~q;
  lanes(m, [&](int l) { nonzero |= static_cast<uint32_t>(d[l] != 0) << l; });
  set_pred(w, x.p, m, x.is_and ? nonzero & q : nonzero | q);
  return Status::kNext;
}

template <bool kLeft, bool kWrap>
Status op_shf(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  lanes(m, [=](int l) {
    uint32_t n = kWrap ? c[l] & 31 : (c[l] < 32 ? c[l] : 32);
    uint64_t v = static_cast<uint64_t>(b[l]) << 32 | a[l];
    d[l] = kLeft ? static_cast<uint32_t>((v << n) >> 32) : static_cast<uint32_t>(v >> n);
  });
  return Status::kNext;
}

template <class T, bool kLeft>
Status op_shift(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  constexpr uint32_t kMax = kBits<T> - 1;
  lanes(m, [=](int l) {
    uint32_t n = b[l];
    if (kLeft) {
      d[l] = n > kMax ? 0 : static_cast<T>(static_cast<Wide<T>>(a[l]) << n);
    } else {
      uint32_t k = n > kMax ? kMax : n;
      T r = static_cast<T>(a[l] >> k);
      d[l] = !std::is_signed<T>::value && n > kMax ? 0 : r;
    }
  });
  return Status::kNext;
}

}  // namespace

void low_logic2(Lower& L) {
  Type t = L.type();
  int kind = L.s->op == "and" ? 0 : L.s->op == "or" ? 1 : 2;
  if (t.kind == 'p') {
    bool na = false, nb = false;
    uint32_t a = L.pred(L.op(1), &na), b = L.pred(L.op(2), &nb), d = L.dst(0, t);
    Insn& i = L.emit(op_pred_logic);
    i.d = d;
    i.a = a;
    i.b = b;
    i.aux = static_cast<uint16_t>(kind | (na ? 4 : 0) | (nb ? 8 : 0));
    return;
  }
#define X(T) (kind == 0 ? op2<T, And<T>> : kind == 1 ? op2<T, Or<T>> : op2<T, Xor<T>>)
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_logic1(Lower& L) {
  Type t = L.type();
  if (t.kind == 'p') {
    bool na = false;
    uint32_t a = L.pred(L.op(1), &na), d = L.dst(0, t);
    Insn& i = L.emit(op_pred_logic);
    i.d = d;
    i.a = a;
    i.aux = static_cast<uint16_t>(3 | (na ? 4 : 0));
    return;
  }
  bool cnot = L.s->op == "cnot";
#define X(T) (cnot ? op1<T, Cnot<T>> : op1<T, Not<T>>)
  two(L, PICK_INT(t, X), t, t);
#undef X
}

void low_lop3(Lower& L) {
  if (L.m.groups.size() == 1) {
    four(L, op_lop3, kU32);
    L.last().aux = static_cast<uint16_t>(L.immediate(4) & 0xff);
    return;
  }
  // lop3.BoolOp.b32 d|p, a, b, c, lut, q
  if (L.op(0).kind != Operand::kPair) L.fail("expected d|p");
  auto* x = L.extra<LopPred>();
  uint32_t a = L.src(1, kU32), b = L.src(2, kU32), c = L.src(3, kU32);
  uint32_t d = L.dst(L.op(0).elems[0], kU32);
  x->p = L.dst(L.op(0).elems[1], Type{'p', 1, 1});
  x->q = L.pred(L.op(5), &x->negate);
  x->is_and = L.has("and");
  Insn& i = L.emit(op_lop3_pred);
  i.x = x;
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.aux = static_cast<uint16_t>(L.immediate(4) & 0xff);
}

void low_shf(Lower& L) {
  bool left = L.has("l"), wrap = L.has("wrap");
  four(L,
       left ? (wrap ? op_shf<true, true> : op_shf<true, false>)
            : (wrap ? op_shf<false, true> : op_shf<false, false>),
       kU32);
}

void low_shift(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), b = L.src(2, kU32), d = L.dst(0, t);
  bool left = L.s->op == "shl";
#define X(T) (left ? op_shift<T, true> : op_shift<T, false>)
  Insn& i = L.emit(PICK_INT(t, X));
#undef X
  i.d = d;
  i.a = a;
  i.b = b;
}

}  // namespace ptxsim
