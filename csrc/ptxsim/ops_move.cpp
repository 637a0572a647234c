// SPDX-License-Identifier: Apache-2.0
// Moves, byte permutes, address spaces (PTX ISA 9.7.9.3-9.7.9.24).
#include "cells.h"
#include "lanes.h"
#include "lower.h"
#include "special.h"

namespace ptxsim {
namespace {

const Type kU32{'u', 32, 1};
const Type kU64{'u', 64, 1};
const Type kPred{'p', 1, 1};

template <class T>
struct Id {
  static T f(T a) { return a; }
};

Status op_mov_pred(Warp& w, const Insn& i, uint32_t m) {
  uint32_t a = *w.cell<uint32_t>(i.a);
  set_pred(w, i.d, m, i.aux ? ~a : a);
  return Status::kNext;
}

Status op_mov128(Warp& w, const Insn& i, uint32_t m) {
  uint64_t* d = w.cell<uint64_t>(i.d);
  const uint64_t* a = w.cell<uint64_t>(i.a);
  lanes(m, [=](int l) {
    d[l] = a[l];
    d[l + kLanes] = a[l + kLanes];
  });
  return Status::kNext;
}

// Clocks advance with the instructions of the cluster, so that they are monotonic and
// seed-reproducible.
Status op_clock(Warp& w, const Insn& i, uint32_t m) {
  uint64_t t = w.cl->steps + w.steps;
  uint64_t v = t;
  switch (i.aux) {
    case kClock:
    case kGlobalTimerLo:
      v = static_cast<uint32_t>(t);
      break;
    case kClockHi:
    case kGlobalTimerHi:
      v = t >> 32;
      break;
    default:
      break;
  }
  if (i.n == 8) {
    uint64_t* d = w.cell<uint64_t>(i.d);
    lanes(m, [=](int l) { d[l] = v; });
  } else {
    uint32_t* d = w.cell<uint32_t>(i.d);
    lanes(m, [=](int l) { d[l] = static_cast<uint32_t>(v); });
  }
  return Status::kNext;
}

struct VecExtra : Extra {
  std::vector<uint32_t> cells;
  uint8_t bits = 0;  // of one element
};

// aux: bits of the packed register.
Status op_pack(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const VecExtra*>(i.x);
  lanes(m, [&](int l) {
    uint64_t word[2] = {0, 0};
    for (size_t k = 0; k < x.cells.size(); ++k) {
      uint64_t v = get_elem(w, x.cells[k], x.bits, l);
      if (x.bits < 64) v &= (1ull << x.bits) - 1;
      size_t at = k * x.bits;
      word[at / 64] |= v << (at % 64);
    }
    put_elem(w, i.d, i.aux > 64 ? 64 : i.aux, l, word[0]);
    if (i.aux == 128) w.cell<uint64_t>(i.d)[l + kLanes] = word[1];
  });
  return Status::kNext;
}

Status op_unpack(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const VecExtra*>(i.x);
  lanes(m, [&](int l) {
    uint64_t word[2] = {get_elem(w, i.a, i.aux > 64 ? 64 : i.aux, l), 0};
    if (i.aux == 128) word[1] = w.cell<uint64_t>(i.a)[l + kLanes];
    for (size_t k = 0; k < x.cells.size(); ++k) {
      size_t at = k * x.bits;
      uint64_t v = word[at / 64] >> (at % 64);
      if (x.bits < 64) v &= (1ull << x.bits) - 1;
      if (x.cells[k]) put_elem(w, x.cells[k], x.bits, l, v);
    }
  });
  return Status::kNext;
}

// {lo, hi} of two 32-bit registers, the most frequent forms.
Status op_pack2x32(Warp& w, const Insn& i, uint32_t m) {
  uint64_t* d = w.cell<uint64_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  lanes(m, [=](int l) { d[l] = static_cast<uint64_t>(b[l]) << 32 | a[l]; });
  return Status::kNext;
}

Status op_prmt(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint32_t* a = w.cell<uint32_t>(i.a);
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  int mode = i.aux;
  lanes(m, [=](int l) {
    uint64_t v = static_cast<uint64_t>(b[l]) << 32 | a[l];
    uint32_t sel = c[l], r = 0;
    uint32_t k = sel & 3;
    for (uint32_t n = 0; n < 4; ++n) {
      uint32_t s = 0;
      switch (mode) {
        case 0:
          s = sel >> (4 * n) & 15;
          break;
        case 1:  // f4e
          s = (k + n) & 7;
          break;
        case 2:  // b4e
          s = (k + 8 - n) & 7;
          break;
        case 3:  // rc8
          s = k;
          break;
        case 4:  // ecl
          s = n > k ? n : k;
          break;
        case 5:  // ecr
          s = n < k ? n : k;
          break;
        default:  // rc16
          s = (k & 1) * 2 + (n & 1);
      }
      uint32_t byte = static_cast<uint32_t>(v >> (8 * (s & 7))) & 0xff;
      if (s & 8) byte = (byte & 0x80) ? 0xff : 0;
      r |= byte << (8 * n);
    }
    d[l] = r;
  });
  return Status::kNext;
}

// ---- address spaces -----------------------------------------------------------------------------
// aux: 0 none needed, 1 shared -> generic, 2 generic -> shared; n: register bytes.
Status op_cvta(Warp& w, const Insn& i, uint32_t m) {
  uint64_t* d = w.cell<uint64_t>(i.d);
  const uint64_t* a = w.cell<uint64_t>(i.a);
  uint64_t base = reinterpret_cast<uint64_t>(w.cl->window);
  uint64_t add = i.aux == 1 ? base : i.aux == 2 ? 0 - base : 0;
  lanes(m, [=](int l) { d[l] = a[l] + add; });
  return Status::kNext;
}

// aux: 0 shared::cluster, 1 shared::cta, 2 local, 3 param, 4 const, 5 global.
Status op_isspacep(Warp& w, const Insn& i, uint32_t m) {
  const uint64_t* a = w.cell<uint64_t>(i.a);
  uint64_t base = reinterpret_cast<uint64_t>(w.cl->window);
  uint64_t local = reinterpret_cast<uint64_t>(w.local),
           local_size = static_cast<uint64_t>(w.kernel->local_bytes) * kLanes;
  const Grid& g = *w.cl->grid;
  uint64_t param = reinterpret_cast<uint64_t>(g.param_ptr);
  uint32_t r = 0;
  lanes(m, [&](int l) {
    bool shared = a[l] - base < kWindow;
    bool is_local = local && a[l] - local < local_size;
    bool is_param = a[l] - param < g.kernel->param_bytes;
    bool v = false;
    switch (i.aux) {
      case 0:
        v = shared;
        break;
      case 1:
        v = shared && ((a[l] - base) >> kRankShift) == w.cta->rank;
        break;
      case 2:
        v = is_local;
        break;
      case 3:
        v = is_param;
        break;
      case 4:
        v = false;
        break;
      default:
        v = !shared && !is_local;
    }
    r |= static_cast<uint32_t>(v) << l;
  });
  set_pred(w, i.d, m, r);
  return Status::kNext;
}

// aux: 1 shared::cluster addresses (else generic); n: register bytes.
Status op_mapa(Warp& w, const Insn& i, uint32_t m) {
  const uint32_t* rank = w.cell<uint32_t>(i.b);
  uint64_t base = i.aux ? 0 : reinterpret_cast<uint64_t>(w.cl->window);
  lanes(m, [&](int l) {
    uint64_t a = i.n == 8 ? w.cell<uint64_t>(i.a)[l] : w.cell<uint32_t>(i.a)[l];
    uint64_t off = a - base;
    if (off >= kWindow)
      trap(w, Err::kIllegalAddress,
           format("mapa of 0x%llx, which is not in shared memory", (unsigned long long)a));
    // A rank outside the cluster is no error by itself: code computes such addresses and does not
    // use them. Their use is caught.
    uint64_t r =
        base + ((off & ((1u << kRankShift) - 1)) | static_cast<uint64_t>(rank[l]) << kRankShift);
    if (i.n == 8) {
      w.cell<uint64_t>(i.d)[l] = r;
    } else {
      w.cell<uint32_t>(i.d)[l] = static_cast<uint32_t>(r);
    }
  });
  return Status::kNext;
}

Status op_getctarank(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  uint64_t base = i.aux ? 0 : reinterpret_cast<uint64_t>(w.cl->window);
  lanes(m, [&](int l) {
    uint64_t a = i.n == 8 ? w.cell<uint64_t>(i.a)[l] : w.cell<uint32_t>(i.a)[l];
    d[l] = static_cast<uint32_t>((a - base) >> kRankShift) & 15;
  });
  return Status::kNext;
}

}  // namespace

void low_mov(Lower& L) {
  Type t;
  if (L.mod(0) == "pred") {
    bool neg = false;
    uint32_t a = L.pred(L.op(1), &neg), d = L.dst(0, kPred);
    Insn& i = L.emit(op_mov_pred);
    i.d = d;
    i.a = a;
    i.aux = neg;
    return;
  }
  t = L.type();
  const Operand& dst = L.op(0);
  const Operand& src = L.op(1);
  if (src.kind == Operand::kVec && dst.kind == Operand::kVec) L.fail("mov between two vectors");
  if (src.kind == Operand::kVec || dst.kind == Operand::kVec) {
    const Operand& v = src.kind == Operand::kVec ? src : dst;
    int n = static_cast<int>(v.elems.size());
    if (n < 2 || n > 8 || t.bits % n) L.fail("vector does not divide the register");
    Type e{'b', static_cast<uint16_t>(t.bits / n), 1};
    if (e.bits < 8) L.unsupported("mov of elements below 8 bits");
    if (src.kind == Operand::kVec && t.bits == 64 && n == 2) {
      uint32_t a = L.src(v.elems[0], e), b = L.src(v.elems[1], e), d = L.dst(dst, t);
      Insn& i = L.emit(op_pack2x32);
      i.d = d;
      i.a = a;
      i.b = b;
      return;
    }
    auto* x = L.extra<VecExtra>();
    x->bits = static_cast<uint8_t>(e.bits);
    bool pack = src.kind == Operand::kVec;
    for (auto& o : v.elems) {
      if (!pack && o.kind == Operand::kSink) {
        x->cells.push_back(0);
      } else {
        x->cells.push_back(pack ? L.src(o, e) : L.dst(o, e));
      }
    }
    uint32_t other = pack ? L.dst(dst, t) : L.src(src, t);
    Insn& i = L.emit(pack ? op_pack : op_unpack);
    i.x = x;
    i.aux = t.bits < 16 ? 16 : t.bits;
    (pack ? i.d : i.a) = other;
    return;
  }
  if (src.kind == Operand::kName && src.name[0] == '%') {
    int id = special_register(src.name);
    if (id > kSpecialFixed) {
      uint32_t d = L.dst(0, t);
      Insn& i = L.emit(op_clock);
      i.d = d;
      i.aux = static_cast<uint16_t>(id);
      i.n = static_cast<uint8_t>(t.bits / 8);
      return;
    }
  }
  uint32_t a = L.src(1, t), d = L.dst(0, t);
  Insn& i = L.emit(t.bits == 128  ? op_mov128
                   : t.bits == 64 ? op1<uint64_t, Id<uint64_t>>
                   : t.bits == 32 ? op1<uint32_t, Id<uint32_t>>
                                  : op1<uint16_t, Id<uint16_t>>);
  i.d = d;
  i.a = a;
}

void low_prmt(Lower& L) {
  static const char* modes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  uint32_t a = L.src(1, kU32), b = L.src(2, kU32), c = L.src(3, kU32), d = L.dst(0, kU32);
  Insn& i = L.emit(op_prmt);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  if (L.m.groups.size() > 1) {
    for (uint16_t k = 1; k < 7; ++k) {
      if (L.mod(1) == modes[k]) i.aux = k;
    }
  }
}

void low_cvta(Lower& L) {
  if (L.type().bits != 64) L.fail("generic addresses have 64 bits");
  const std::string& space = L.mod(1);
  bool shared = space.compare(0, 6, "shared") == 0;
  uint32_t a = L.src(1, kU64), d = L.dst(0, kU64);
  Insn& i = L.emit(op_cvta);
  i.d = d;
  i.a = a;
  i.aux = shared ? (L.has("to") ? 2 : 1) : 0;
}

void low_isspacep(Lower& L) {
  const std::string& sp = L.mod(0);
  uint32_t a = L.src(1, kU64), d = L.dst(0, kPred);
  Insn& i = L.emit(op_isspacep);
  i.d = d;
  i.a = a;
  i.aux = sp == "shared::cluster"                 ? 0
          : sp == "shared" || sp == "shared::cta" ? 1
          : sp == "local"                         ? 2
          : sp.compare(0, 5, "param") == 0        ? 3
          : sp == "const"                         ? 4
                                                  : 5;
}

void low_mapa(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), b = L.src(2, kU32), d = L.dst(0, t);
  Insn& i = L.emit(op_mapa);
  i.d = d;
  i.a = a;
  i.b = b;
  i.aux = L.has("shared::cluster");
  i.n = static_cast<uint8_t>(t.bits / 8);
}

void low_getctarank(Lower& L) {
  Type t = L.type();
  uint32_t a = L.src(1, t), d = L.dst(0, kU32);
  Insn& i = L.emit(op_getctarank);
  i.d = d;
  i.a = a;
  i.aux = L.has("shared::cluster");
  i.n = static_cast<uint8_t>(t.bits / 8);
}

void low_createpolicy(Lower& L) {
  // Cache policies have no effect on values; any token will do.
  uint32_t a = L.constant(0, 8), d = L.dst(0, kU64);
  Insn& i = L.emit(op1<uint64_t, Id<uint64_t>>);
  i.d = d;
  i.a = a;
}

}  // namespace ptxsim
