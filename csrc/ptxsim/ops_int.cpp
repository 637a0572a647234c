// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic (PTX ISA 9.7.1, 9.7.2).
#include <limits>
#include <type_traits>

#include "int_pick.h"

namespace ptxsim {
namespace {

template <class T>
using U = std::make_unsigned_t<T>;
template <class T>
constexpr int kBits = sizeof(T) * 8;

// Arithmetic wraps; it is done unsigned. 16-bit products are widened so that no int overflow
// arises.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, uint32_t, U<T>>;

template <class T>
struct Add {
  static T f(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b)); }
};
template <class T>
struct Sub {
  static T f(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) - static_cast<Wide<T>>(b)); }
};
struct AddSat {
  static int32_t f(int32_t a, int32_t b) {
    int64_t r = static_cast<int64_t>(a) + b;
    return static_cast<int32_t>(r > INT32_MAX ? INT32_MAX : r < INT32_MIN ? INT32_MIN : r);
  }
};
struct SubSat {
  static int32_t f(int32_t a, int32_t b) {
    int64_t r = static_cast<int64_t>(a) - b;
    return static_cast<int32_t>(r > INT32_MAX ? INT32_MAX : r < INT32_MIN ? INT32_MIN : r);
  }
};
template <class T>
struct MulLo {
  static T f(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)); }
};
template <class T>
T mul_hi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using W = std::conditional_t<std::is_signed<T>::value, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> 64);
  } else {
    using W = std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>;
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> kBits<T>);
  }
}
template <class T>
struct MulHi {
  static T f(T a, T b) { return mul_hi(a, b); }
};
template <class T>
struct MadLo {
  static T f(T a, T b, T c) { return Add<T>::f(MulLo<T>::f(a, b), c); }
};
template <class T>
struct MadHi {
  static T f(T a, T b, T c) { return Add<T>::f(mul_hi(a, b), c); }
};
struct MadHiSat {
  static int32_t f(int32_t a, int32_t b, int32_t c) { return AddSat::f(mul_hi(a, b), c); }
};
template <class T>
struct MulWide {
  template <class D>
  struct To {
    static D f(T a, T b) { return static_cast<D>(static_cast<D>(a) * static_cast<D>(b)); }
  };
};
template <class D, class T>
Status op_mad_wide(Warp& w, const Insn& i, uint32_t m) {
  D* d = w.cell<D>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const D* c = w.cell<D>(i.c);
  lanes(m, [=](int l) {
    d[l] = Add<D>::f(MulLo<D>::f(static_cast<D>(a[l]), static_cast<D>(b[l])), c[l]);
  });
  return Status::kNext;
}
template <class T>
T low24(T v) {
  return std::is_signed<T>::value ? static_cast<T>(static_cast<U<T>>(v) << 8) >> 8
                                  : static_cast<T>(v & 0xffffff);
}
template <class T, bool kHi>
struct Mul24 {
  static T f(T a, T b) {
    using W = std::conditional_t<std::is_signed<T>::value, int64_t, uint64_t>;
    W p = static_cast<W>(low24(a)) * static_cast<W>(low24(b));
    return static_cast<T>(kHi ? p >> 16 : p);
  }
};
template <class T, bool kHi>
struct Mad24 {
  static T f(T a, T b, T c) { return Add<T>::f(Mul24<T, kHi>::f(a, b), c); }
};
template <class T>
struct Sad {
  static T f(T a, T b, T c) { return Add<T>::f(c, a < b ? Sub<T>::f(b, a) : Sub<T>::f(a, b)); }
};
// measured (H200): quotient and remainder of a division by zero are all ones.
template <class T>
struct Div {
  static T f(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed<T>::value && b == static_cast<T>(-1))
      return static_cast<T>(0 - static_cast<Wide<T>>(a));
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  static T f(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed<T>::value && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
template <class T>
struct Abs {
  static T f(T a) { return a < 0 ? static_cast<T>(0 - static_cast<Wide<T>>(a)) : a; }
};
template <class T>
struct Neg {
  static T f(T a) { return static_cast<T>(0 - static_cast<Wide<T>>(a)); }
};
template <class T>
struct Min {
  static T f(T a, T b) { return a < b ? a : b; }
};
template <class T>
struct Max {
  static T f(T a, T b) { return a < b ? b : a; }
};
template <class T>
struct MinRelu {
  static T f(T a, T b) { return Max<T>::f(Min<T>::f(a, b), 0); }
};
template <class T>
struct MaxRelu {
  static T f(T a, T b) { return Max<T>::f(Max<T>::f(a, b), 0); }
};
// 16x2 packs of any 16-bit operation.
template <class Op, class T>
struct Pack2 {
  static uint32_t f(uint32_t a, uint32_t b) {
    uint32_t lo = static_cast<uint16_t>(Op::f(static_cast<T>(a), static_cast<T>(b)));
    uint32_t hi = static_cast<uint16_t>(Op::f(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return hi << 16 | lo;
  }
};
template <class T>
struct Popc {
  static uint32_t f(T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
};
template <class T>
struct Clz {
  static uint32_t f(T a) {
    return a ? static_cast<uint32_t>(__builtin_clzll(a)) - (64 - kBits<T>) : kBits<T>;
  }
};
template <class T, bool kShift>
struct Bfind {
  static uint32_t f(T v) {
    U<T> a = std::is_signed<T>::value && v < 0 ? ~static_cast<U<T>>(v) : static_cast<U<T>>(v);
    if (!a) return 0xffffffffu;
    uint32_t pos = 63 - static_cast<uint32_t>(__builtin_clzll(a));
    return kShift ? kBits<T> - 1 - pos : pos;
  }
};
template <class T>
struct Brev {
  static T f(T a) {
    T r = 0;
    for (int k = 0; k < kBits<T>; ++k) r |= static_cast<T>((a >> k) & 1) << (kBits<T> - 1 - k);
    return r;
  }
};

template <class T>
Status op_bfe(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  constexpr uint32_t kMsb = kBits<T> - 1;
  lanes(m, [=](int l) {
    // measured (H200): the 64-bit form takes position and length as they are, the 32-bit form their
    // low 8 bits.
    uint32_t pos = b[l], len = c[l];
    if (kBits<T> == 32) {
      pos &= 0xff;
      len &= 0xff;
    }
    U<T> v = static_cast<U<T>>(a[l]);
    // spec: sbit = 0 for unsigned types or len == 0, else bit min(pos + len - 1, msb).
    U<T> sign = 0;
    if (std::is_signed<T>::value && len) {
      uint64_t end = static_cast<uint64_t>(pos) + len - 1;
      uint32_t at = end < kMsb ? static_cast<uint32_t>(end) : kMsb;
      sign = (v >> at & 1) ? ~U<T>(0) : 0;
    }
    U<T> r = pos > kMsb ? 0 : v >> pos;
    uint32_t keep = pos > kMsb ? 0 : len < kMsb + 1 - pos ? len : kMsb + 1 - pos;
    U<T> mask = keep >= kMsb + 1 ? ~U<T>(0) : (U<T>(1) << keep) - 1;
    d[l] = static_cast<T>((r & mask) | (sign & ~mask));
  });
  return Status::kNext;
}

template <class T>
Status op_bfi(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  const uint32_t* e = w.cell<uint32_t>(static_cast<uint32_t>(i.imm));
  lanes(m, [=](int l) {
    uint32_t pos = c[l] & 0xff, len = e[l] & 0xff;
    T mask = pos >= kBits<T> ? 0 : (len >= kBits<T> ? ~T(0) : ((T(1) << len) - 1)) << pos;
    T v = pos >= kBits<T> ? 0 : a[l] << pos;
    d[l] = (b[l] & ~mask) | (v & mask);
  });
  return Status::kNext;
}

Status op_fns(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const int32_t* c = w.cell<int32_t>(i.c);
  lanes(m, [=](int l) {
    uint32_t base = b[l], mask = a[l];
    int32_t n = c[l];
    uint32_t r = 0xffffffffu;
    if (base < 32) {
      if (n == 0) {
        if (mask >> base & 1) r = base;
      } else {
        int step = n > 0 ? 1 : -1, left = n > 0 ? n : -n;
        for (int k = static_cast<int>(base); k >= 0 && k < 32; k += step) {
          if ((mask >> k & 1) && --left == 0) {
            r = static_cast<uint32_t>(k);
            break;
          }
        }
      }
    }
    d[l] = r;
  });
  return Status::kNext;
}

template <bool kSigned, bool kClamp>
struct Szext {
  static uint32_t f(uint32_t a, uint32_t b) {
    uint32_t n = kClamp ? (b > 32 ? 32 : b) : b & 31;
    if (n == 0) return 0;
    if (n == 32) return a;
    return kSigned ? static_cast<uint32_t>(static_cast<int32_t>(a << (32 - n)) >> (32 - n))
                   : a & ((1u << n) - 1);
  }
};
template <bool kClamp>
struct Bmsk {
  static uint32_t f(uint32_t a, uint32_t b) {
    uint32_t pos = kClamp ? (a > 32 ? 32 : a) : a & 31;
    uint32_t len = kClamp ? (b > 32 ? 32 : b) : b & 31;
    uint64_t mask = ((1ull << len) - 1) << pos;
    return static_cast<uint32_t>(mask);
  }
};

Status op_dp(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  bool as = i.aux & 1, bs = i.aux & 2, two = i.aux & 4, hi = i.aux & 8;
  auto byte = [](uint32_t v, int k, bool s) {
    uint8_t x = static_cast<uint8_t>(v >> (8 * k));
    return s ? static_cast<int64_t>(static_cast<int8_t>(x)) : static_cast<int64_t>(x);
  };
  auto half = [](uint32_t v, int k, bool s) {
    uint16_t x = static_cast<uint16_t>(v >> (16 * k));
    return s ? static_cast<int64_t>(static_cast<int16_t>(x)) : static_cast<int64_t>(x);
  };
  lanes(m, [=](int l) {
    int64_t sum = c[l];
    for (int k = 0; k < (two ? 2 : 4); ++k) {
      sum += two ? half(a[l], k, as) * byte(b[l], k + (hi ? 2 : 0), bs)
                 : byte(a[l], k, as) * byte(b[l], k, bs);
    }
    d[l] = static_cast<uint32_t>(sum);
  });
  return Status::kNext;
}

// Carry chain: one carry bit per lane in a predicate cell at i.imm. aux: 1 sub, 2 carry in, 4 carry
// out.
template <class T>
Status op_carry(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  uint32_t* cc = w.cell<uint32_t>(static_cast<uint32_t>(i.imm));
  uint32_t in = *cc, out = 0;
  using W = unsigned __int128;
  lanes(m, [&](int l) {
    W c = (i.aux & 2) ? in >> l & 1 : 0;
    W r = (i.aux & 1) ? static_cast<W>(a[l]) - b[l] - c : static_cast<W>(a[l]) + b[l] + c;
    d[l] = static_cast<T>(r);
    out |= static_cast<uint32_t>((r >> kBits<T>)&1) << l;
  });
  if (i.aux & 4) set_pred(w, static_cast<uint32_t>(i.imm), m, out);
  return Status::kNext;
}

// aux: 1 hi, 2 carry in, 4 carry out, 8 signed.
template <class T>
Status op_mad_carry(Warp& w, const Insn& i, uint32_t m) {
  T* d = w.cell<T>(i.d);
  const T* a = w.cell<T>(i.a);
  const T* b = w.cell<T>(i.b);
  const T* c = w.cell<T>(i.c);
  uint32_t* cc = w.cell<uint32_t>(static_cast<uint32_t>(i.imm));
  uint32_t in = *cc, out = 0;
  using W = unsigned __int128;
  lanes(m, [&](int l) {
    T lo = MulLo<T>::f(a[l], b[l]);
    T hi = (i.aux & 8) ? static_cast<T>(mul_hi(static_cast<std::make_signed_t<T>>(a[l]),
                                               static_cast<std::make_signed_t<T>>(b[l])))
                       : mul_hi(a[l], b[l]);
    W r = static_cast<W>((i.aux & 1) ? hi : lo) + c[l] + ((i.aux & 2) ? in >> l & 1 : 0);
    d[l] = static_cast<T>(r);
    out |= static_cast<uint32_t>((r >> kBits<T>)&1) << l;
  });
  if (i.aux & 4) set_pred(w, static_cast<uint32_t>(i.imm), m, out);
  return Status::kNext;
}

}  // namespace

void low_add_int(Lower& L) {
  Type t = L.type();
  if (L.has("sat")) {
    if (t.kind != 's' || t.bits != 32 || t.packed != 1) L.fail(".sat needs s32");
    return three(L, op2<int32_t, AddSat>, t);
  }
  if (t.packed == 2) return three(L, op2<uint32_t, Pack2<Add<uint16_t>, uint16_t>>, t);
#define X(T) op2<T, Add<T>>
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_sub_int(Lower& L) {
  Type t = L.type();
  if (L.has("sat")) {
    if (t.kind != 's' || t.bits != 32 || t.packed != 1) L.fail(".sat needs s32");
    return three(L, op2<int32_t, SubSat>, t);
  }
  if (t.packed == 2) return three(L, op2<uint32_t, Pack2<Sub<uint16_t>, uint16_t>>, t);
#define X(T) op2<T, Sub<T>>
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_mul_int(Lower& L) {
  Type t = L.type();
  if (L.has("wide")) {
    if (t.bits == 64) L.fail("mul.wide takes 16- or 32-bit types");
    Handler fn = t.kind == 's'
                     ? (t.bits == 16 ? op2x<int32_t, int16_t, MulWide<int16_t>::To<int32_t>>
                                     : op2x<int64_t, int32_t, MulWide<int32_t>::To<int64_t>>)
                     : (t.bits == 16 ? op2x<uint32_t, uint16_t, MulWide<uint16_t>::To<uint32_t>>
                                     : op2x<uint64_t, uint32_t, MulWide<uint32_t>::To<uint64_t>>);
    Type wide = t;
    wide.bits *= 2;
    uint32_t a = L.src(1, t), b = L.src(2, t), d = L.dst(0, wide);
    Insn& i = L.emit(fn);
    i.d = d;
    i.a = a;
    i.b = b;
    return;
  }
#define X(T) (L.has("hi") ? op2<T, MulHi<T>> : op2<T, MulLo<T>>)
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_mad_int(Lower& L) {
  Type t = L.type();
  if (L.has("wide")) {
    if (t.bits == 64) L.fail("mad.wide takes 16- or 32-bit types");
    Handler fn =
        t.kind == 's'
            ? (t.bits == 16 ? op_mad_wide<int32_t, int16_t> : op_mad_wide<int64_t, int32_t>)
            : (t.bits == 16 ? op_mad_wide<uint32_t, uint16_t> : op_mad_wide<uint64_t, uint32_t>);
    Type wide = t;
    wide.bits *= 2;
    uint32_t a = L.src(1, t), b = L.src(2, t), c = L.src(3, wide), d = L.dst(0, wide);
    Insn& i = L.emit(fn);
    i.d = d;
    i.a = a;
    i.b = b;
    i.c = c;
    return;
  }
  if (L.has("sat")) {
    if (!L.has("hi") || t.kind != 's' || t.bits != 32) L.fail(".sat needs mad.hi.s32");
    return four(L, op3<int32_t, MadHiSat>, t);
  }
#define X(T) (L.has("hi") ? op3<T, MadHi<T>> : op3<T, MadLo<T>>)
  four(L, PICK_INT(t, X), t);
#undef X
}

void low_mul24(Lower& L) {
  Type t = L.type();
  bool hi = L.has("hi");
  three(L,
        t.kind == 's'
            ? (hi ? op2<int32_t, Mul24<int32_t, true>> : op2<int32_t, Mul24<int32_t, false>>)
            : (hi ? op2<uint32_t, Mul24<uint32_t, true>> : op2<uint32_t, Mul24<uint32_t, false>>),
        t);
}

void low_mad24(Lower& L) {
  Type t = L.type();
  bool hi = L.has("hi");
  four(L,
       t.kind == 's'
           ? (hi ? op3<int32_t, Mad24<int32_t, true>> : op3<int32_t, Mad24<int32_t, false>>)
           : (hi ? op3<uint32_t, Mad24<uint32_t, true>> : op3<uint32_t, Mad24<uint32_t, false>>),
       t);
}

void low_sad(Lower& L) {
  Type t = L.type();
#define X(T) op3<T, Sad<T>>
  four(L, PICK_INT(t, X), t);
#undef X
}

void low_div_int(Lower& L) {
  Type t = L.type();
#define X(T) op2<T, Div<T>>
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_rem_int(Lower& L) {
  Type t = L.type();
#define X(T) op2<T, Rem<T>>
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_abs_int(Lower& L) {
  Type t = L.type();
  two(L,
      t.bits == 16   ? op1<int16_t, Abs<int16_t>>
      : t.bits == 32 ? op1<int32_t, Abs<int32_t>>
                     : op1<int64_t, Abs<int64_t>>,
      t, t);
}

void low_neg_int(Lower& L) {
  Type t = L.type();
  two(L,
      t.bits == 16   ? op1<int16_t, Neg<int16_t>>
      : t.bits == 32 ? op1<int32_t, Neg<int32_t>>
                     : op1<int64_t, Neg<int64_t>>,
      t, t);
}

void low_minmax_int(Lower& L) {
  Type t = L.type();
  bool max = L.s->op == "max";
  if (L.has("relu")) {
    if (t.kind != 's' || t.bits != 32) L.fail(".relu needs s32 or s16x2");
    if (t.packed == 2) {
      return three(L,
                   max ? op2<uint32_t, Pack2<MaxRelu<int16_t>, int16_t>>
                       : op2<uint32_t, Pack2<MinRelu<int16_t>, int16_t>>,
                   t);
    }
    return three(L, max ? op2<int32_t, MaxRelu<int32_t>> : op2<int32_t, MinRelu<int32_t>>, t);
  }
  if (t.packed == 2) {
    Handler fn = t.kind == 's' ? (max ? op2<uint32_t, Pack2<Max<int16_t>, int16_t>>
                                      : op2<uint32_t, Pack2<Min<int16_t>, int16_t>>)
                               : (max ? op2<uint32_t, Pack2<Max<uint16_t>, uint16_t>>
                                      : op2<uint32_t, Pack2<Min<uint16_t>, uint16_t>>);
    return three(L, fn, t);
  }
#define X(T) (max ? op2<T, Max<T>> : op2<T, Min<T>>)
  three(L, PICK_INT(t, X), t);
#undef X
}

void low_popc(Lower& L) {
  Type t = L.type();
  two(L,
      t.bits == 32 ? op1x<uint32_t, uint32_t, Popc<uint32_t>>
                   : op1x<uint32_t, uint64_t, Popc<uint64_t>>,
      kU32, t);
}

void low_clz(Lower& L) {
  Type t = L.type();
  two(L,
      t.bits == 32 ? op1x<uint32_t, uint32_t, Clz<uint32_t>>
                   : op1x<uint32_t, uint64_t, Clz<uint64_t>>,
      kU32, t);
}

void low_bfind(Lower& L) {
  Type t = L.type();
  bool sh = L.has("shiftamt");
#define X(T) (sh ? op1x<uint32_t, T, Bfind<T, true>> : op1x<uint32_t, T, Bfind<T, false>>)
  two(L, PICK_INT(t, X), kU32, t);
#undef X
}

void low_fns(Lower& L) { four(L, op_fns, kU32); }

void low_brev(Lower& L) {
  Type t = L.type();
  two(L, t.bits == 32 ? op1<uint32_t, Brev<uint32_t>> : op1<uint64_t, Brev<uint64_t>>, t, t);
}

void low_bfe(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), b = L.src(2, kU32), c = L.src(3, kU32), d = L.dst(0, t);
#define X(T) op_bfe<T>
  Insn& i = L.emit(t.kind == 's' ? (t.bits == 32 ? op_bfe<int32_t> : op_bfe<int64_t>)
                                 : (t.bits == 32 ? op_bfe<uint32_t> : op_bfe<uint64_t>));
#undef X
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
}

void low_bfi(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), b = L.src(2, t), c = L.src(3, kU32), e = L.src(4, kU32),
           d = L.dst(0, t);
  Insn& i = L.emit(t.bits == 32 ? op_bfi<uint32_t> : op_bfi<uint64_t>);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.imm = e;
}

void low_szext(Lower& L) {
  Type t = L.type();
  bool clamp = L.has("clamp");
  three(L,
        t.kind == 's'
            ? (clamp ? op2<uint32_t, Szext<true, true>> : op2<uint32_t, Szext<true, false>>)
            : (clamp ? op2<uint32_t, Szext<false, true>> : op2<uint32_t, Szext<false, false>>),
        t);
}

void low_bmsk(Lower& L) {
  three(L, L.has("clamp") ? op2<uint32_t, Bmsk<true>> : op2<uint32_t, Bmsk<false>>, kU32);
}

void low_dp4a(Lower& L) {
  uint16_t aux = static_cast<uint16_t>((L.mod(0) == "s32" ? 1 : 0) | (L.mod(1) == "s32" ? 2 : 0));
  four(L, op_dp, kU32);
  L.last().aux = aux;
}

void low_dp2a(Lower& L) {
  uint16_t aux = static_cast<uint16_t>((L.mod(1) == "s32" ? 1 : 0) | (L.mod(2) == "s32" ? 2 : 0) |
                                       4 | (L.has("hi") ? 8 : 0));
  four(L, op_dp, kU32);
  L.last().aux = aux;
}

void low_add_cc(Lower& L) {
  Type t = L.type();
  const std::string& op = L.s->op;
  uint16_t aux = static_cast<uint16_t>((op[0] == 's' ? 1 : 0) | (op.back() == 'c' ? 2 : 0) |
                                       (L.has("cc") ? 4 : 0));
  three(L, t.bits == 32 ? op_carry<uint32_t> : op_carry<uint64_t>, t);
  L.last().aux = aux;
  L.last().imm = L.carry_cell();
}

void low_mad_cc(Lower& L) {
  Type t = L.type();
  uint16_t aux = static_cast<uint16_t>((L.has("hi") ? 1 : 0) | (L.s->op == "madc" ? 2 : 0) |
                                       (L.has("cc") ? 4 : 0) | (t.kind == 's' ? 8 : 0));
  four(L, t.bits == 32 ? op_mad_carry<uint32_t> : op_mad_carry<uint64_t>, t);
  L.last().aux = aux;
  L.last().imm = L.carry_cell();
}

}  // namespace ptxsim
