// SPDX-License-Identifier: Apache-2.0
// Atomics and reductions (PTX ISA 9.7.13.5-9.7.13.8). Host atomics, because CTAs run on several
// host threads.
#include <mutex>

#include "memory.h"
#include "sem/fp.h"

namespace ptxsim {
namespace {

enum AtomOp : uint8_t { kAnd, kOr, kXor, kCas, kExch, kAdd, kInc, kDec, kMin, kMax };

struct AtomExtra : MemOp {
  AtomOp op = kAdd;
  Type type;
  bool has_result = true;
  sem::Elem elem = sem::Elem::kF16;
};

AtomOp op_of(Lower& L) {
  static const char* names[] = {"and", "or",  "xor", "cas", "exch",
                                "add", "inc", "dec", "min", "max"};
  for (int k = 0; k < 10; ++k) {
    if (L.has(names[k])) return static_cast<AtomOp>(k);
  }
  L.fail("no operation");
}

// New value of the location; `v` operand, `c` the third operand of cas.
template <class T>
T combine(AtomOp op, T old, T v, T c) {
  switch (op) {
    case kAnd:
      return old & v;
    case kOr:
      return old | v;
    case kXor:
      return old ^ v;
    case kCas:
      return old == v ? c : old;
    case kExch:
      return v;
    case kAdd:
      return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                            static_cast<std::make_unsigned_t<T>>(v));
    case kInc:
      return old >= v ? 0 : static_cast<T>(old + 1);
    case kDec:
      return old == 0 || old > v ? v : static_cast<T>(old - 1);
    case kMin:
      return v < old ? v : old;
    default:
      return v > old ? v : old;
  }
}

template <class T, class F>
T update(uint8_t* p, F f) {
  T* at = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  for (;;) {
    T next = f(old);
    if (__atomic_compare_exchange_n(at, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      return old;
  }
}

uint32_t add_pair(sem::Elem e, uint32_t a, uint32_t b) {
  uint32_t lo = sem::add_h(e, static_cast<uint16_t>(a), static_cast<uint16_t>(b));
  uint32_t hi = sem::add_h(e, static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16));
  return hi << 16 | lo;
}

// f32 atomics on global memory flush subnormals (spec: atom.add.f32 on global memory flushes;
// shared does not).
float add_f32(float a, float b, bool ftz) {
  sem::FpMode m;
  m.ftz = ftz;
  return sem::add_f32(a, b, m);
}

uint64_t apply(const AtomExtra& x, uint8_t* p, uint64_t v, uint64_t c, bool shared) {
  const Type& t = x.type;
  if (t.kind == 'f' && t.packed == 1 && t.bits == 32) {
    return update<uint32_t>(p, [&](uint32_t old) {
      return bit_cast<uint32_t>(
          add_f32(bit_cast<float>(old), bit_cast<float>(static_cast<uint32_t>(v)), !shared));
    });
  }
  if (t.kind == 'f' && t.bits == 64) {
    return update<uint64_t>(p, [&](uint64_t old) {
      return bit_cast<uint64_t>(bit_cast<double>(old) + bit_cast<double>(v));
    });
  }
  if (t.packed == 2)
    return update<uint32_t>(
        p, [&](uint32_t old) { return add_pair(x.elem, old, static_cast<uint32_t>(v)); });
  if (t.kind == 'f' || t.kind == 'h') {
    return update<uint16_t>(
        p, [&](uint16_t old) { return sem::add_h(x.elem, old, static_cast<uint16_t>(v)); });
  }
  bool s = t.kind == 's';
  switch (t.bits) {
    case 16:
      return update<uint16_t>(p, [&](uint16_t old) {
        return combine<uint16_t>(x.op, old, static_cast<uint16_t>(v), static_cast<uint16_t>(c));
      });
    case 32:
      if (s) {
        return update<uint32_t>(p, [&](uint32_t old) {
          return static_cast<uint32_t>(combine<int32_t>(
              x.op, static_cast<int32_t>(old), static_cast<int32_t>(v), static_cast<int32_t>(c)));
        });
      }
      return update<uint32_t>(p, [&](uint32_t old) {
        return combine<uint32_t>(x.op, old, static_cast<uint32_t>(v), static_cast<uint32_t>(c));
      });
    default:
      if (s) {
        return update<uint64_t>(p, [&](uint64_t old) {
          return static_cast<uint64_t>(combine<int64_t>(
              x.op, static_cast<int64_t>(old), static_cast<int64_t>(v), static_cast<int64_t>(c)));
        });
      }
      return update<uint64_t>(p, [&](uint64_t old) { return combine<uint64_t>(x.op, old, v, c); });
  }
}

inline uint64_t get(const Warp& w, uint32_t cell, int bits, int l) {
  return bits == 16   ? w.cell<uint16_t>(cell)[l]
         : bits == 32 ? w.cell<uint32_t>(cell)[l]
                      : w.cell<uint64_t>(cell)[l];
}

Status op_atom(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const AtomExtra*>(i.x);
  uint8_t* p[kLanes];
  uint32_t size = static_cast<uint32_t>(x.type.bits / 8);
  resolve(w, i, x, m, size, p);
  if (x.type.bits == 128) {
    static std::mutex mutex;  // 128-bit cas/exch: no plain host instruction in the baseline ISA
    std::lock_guard<std::mutex> lock(mutex);
    lanes(m, [&](int l) {
      uint64_t old[2];
      std::memcpy(old, p[l], 16);
      const uint64_t* b = w.cell<uint64_t>(i.b);
      bool swap = x.op == kExch || (old[0] == b[l] && old[1] == b[l + kLanes]);
      const uint64_t* n = x.op == kExch ? b : w.cell<uint64_t>(i.c);
      uint64_t next[2] = {n[l], n[l + kLanes]};
      if (swap) std::memcpy(p[l], next, 16);
      w.cell<uint64_t>(i.d)[l] = old[0];
      w.cell<uint64_t>(i.d)[l + kLanes] = old[1];
    });
  } else {
    for (uint32_t r = m; r; r &= r - 1) {
      int l = __builtin_ctz(r);
      uint64_t c = i.c ? get(w, i.c, x.type.bits, l) : 0;
      uint64_t old = apply(x, p[l], get(w, i.b, x.type.bits, l), c, in_window(w, p[l]));
      if (i.d) {
        if (x.type.bits == 16) {
          w.cell<uint16_t>(i.d)[l] = static_cast<uint16_t>(old);
        } else if (x.type.bits == 32) {
          w.cell<uint32_t>(i.d)[l] = static_cast<uint32_t>(old);
        } else {
          w.cell<uint64_t>(i.d)[l] = old;
        }
      }
    }
  }
  if (watched(w)) emit_accesses(w, x, m, size, Rw::kAtomic, p);
  // A lock or flag loop of one split must not starve the lanes that would release it.
  if (x.op != kCas && x.op != kExch) w.cl->progress = true;
  if (i.d && (x.op == kCas || x.op == kExch) && w.splits.size() > 1) return Status::kPause;
  return Status::kNext;
}

Status op_red_vec(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const AtomExtra*>(i.x);
  uint8_t* p[kLanes];
  uint32_t size = static_cast<uint32_t>(x.type.bits / 8), total = size * x.count;
  resolve(w, i, x, m, total, p);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    for (uint32_t k = 0; k < x.count; ++k)
      apply(x, p[l] + k * size, get(w, x.cells[k], x.type.bits, l), 0, false);
  }
  w.cl->progress = true;
  if (watched(w)) emit_accesses(w, x, m, total, Rw::kAtomic, p);
  return Status::kNext;
}

// st.async / red.async: data to a CTA of the cluster, then complete_tx on a barrier of the same
// CTA.
struct AsyncStore : Extra {
  AtomExtra atom;
  bool reduce = false;
  bool wide_d = false, wide_b = false;
  int64_t offset_b = 0;
  uint32_t bar = 0;
};

Status op_store_async(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const AsyncStore*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t dst = shared_address(w, i, x.wide_d, false, l, i.a, i.imm);
    uint32_t bar = shared_address(w, i, x.wide_b, false, l, x.bar, x.offset_b);
    if (dst >> kRankShift != bar >> kRankShift)
      trap(w, Err::kIllegalInstruction, "data and mbarrier are in different CTAs");
    uint32_t size = static_cast<uint32_t>(x.atom.type.bits / 8), total = size * x.atom.count;
    if (dst % total)
      trap(w, Err::kMisalignedAddress,
           format("address 0x%x is not aligned to %u bytes", dst, total));
    std::vector<uint64_t> v;
    for (uint32_t c : x.atom.cells) v.push_back(get(w, c, x.atom.type.bits, l));
    AsyncPtr op = new_async(w, AgentKind::kOther);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    const AsyncStore* px = &x;
    op->run = [wp, raw, px, dst, bar, v, size, total] {
      uint8_t* p = shared_ptr_checked(*wp, dst, total);
      for (size_t k = 0; k < v.size(); ++k) {
        if (px->reduce) {
          apply(px->atom, p + k * size, v[k], 0, true);
        } else {
          std::memcpy(p + k * size, &v[k], size);
        }
      }
      if (watched(*wp)) {
        Access a;
        a.agent = raw->agent;
        a.space = Space::kShared;
        a.rw = px->reduce ? Rw::kAtomic : Rw::kWrite;
        a.order = px->reduce ? Order::kRelaxed : Order::kWeak;
        a.proxy = Proxy::kAsync;
        a.addr = shared_key(*wp->cl, dst);
        a.size = total;
        a.site = raw->site;
        for (Observer* o : *wp->cl->observers) o->on_access(a);
      }
      mbar_arrive(*wp, raw->agent, bar, 0, -static_cast<int64_t>(total), Order::kRelease,
                  raw->site);
    };
    pool_add(w, op);
  }
  return Status::kNext;
}

// st.bulk: zero-fills own shared memory; aux unused.
Status op_st_bulk(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MemOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t a = shared_address(w, i, x.wide, x.space == Mem::kGeneric, l, i.a, i.imm);
    uint64_t n = w.cell<uint64_t>(i.b)[l];
    if ((a & 7) || (n & 7) || n > (1u << 20))
      trap(w, Err::kIllegalInstruction, "st.bulk needs an address and size divisible by 8");
    std::memset(shared_ptr_checked(w, a, static_cast<uint32_t>(n)), 0, n);
    if (watched(w)) {
      Access e;
      e.agent = w.agent;
      e.space = Space::kShared;
      e.rw = Rw::kWrite;
      e.addr = shared_key(*w.cl, a);
      e.size = static_cast<uint32_t>(n);
      e.lane = static_cast<uint32_t>(l);
      e.site = w.site();
      for (Observer* o : *w.cl->observers) o->on_access(e);
    }
  }
  w.cl->progress = true;
  return Status::kNext;
}

Address atom_operand(Lower& L, size_t index, AtomExtra* x) {
  Address a = memory_operand(L, index, x);
  if (x->order == Order::kWeak)
    x->order = Order::kRelaxed;  // spec: the defaults are .relaxed and .gpu
  if (x->scope == Scope::kNone) x->scope = Scope::kGpu;
  x->op = op_of(L);
  x->type = L.type(L.m.groups.size() ? 0 : 0);
  x->elem = x->type.kind == 'h' ? sem::Elem::kBf16 : sem::Elem::kF16;
  if (x->type.kind == 'f' && x->type.packed == 1 && x->type.bits >= 32 && x->op != kAdd)
    L.unsupported("float atomics other than add");
  if (x->type.kind == 'b' &&
      (x->op == kAdd || x->op == kMin || x->op == kMax || x->op == kInc || x->op == kDec)) {
    L.fail("the operation needs an integer or float type");
  }
  return a;
}

}  // namespace

void low_atom(Lower& L) {
  auto* x = L.extra<AtomExtra>();
  Address a = atom_operand(L, 1, x);
  Type t = x->type;
  if (t.bits == 128 && x->op != kCas && x->op != kExch) L.fail("128-bit atomics are cas and exch");
  if (t.bits == 16 && t.kind == 'b' && x->op != kCas)
    L.fail("16-bit atomics are cas and add.noftz");
  uint32_t b = L.src(2, t), c = x->op == kCas ? L.src(3, t) : 0,
           d = L.is_sink(0) && t.bits != 128 ? 0 : L.dst(0, t);
  Insn& i = L.emit(op_atom);
  i.d = d;
  i.a = a.cell;
  i.imm = a.offset;
  i.b = b;
  i.c = c;
  i.x = x;
}

void low_red(Lower& L) {
  auto* x = L.extra<AtomExtra>();
  Address a = atom_operand(L, 0, x);
  uint32_t b = L.src(1, x->type);
  Insn& i = L.emit(op_atom);
  i.a = a.cell;
  i.imm = a.offset;
  i.b = b;
  i.x = x;
}

void low_red_vec(Lower& L) {
  auto* x = L.extra<AtomExtra>();
  Address a = atom_operand(L, 0, x);
  x->count = static_cast<uint8_t>(L.has("v2") ? 2 : L.has("v4") ? 4 : 8);
  x->cells = L.vec(L.op(1), x->type, false);
  if (x->cells.size() != x->count) L.fail("wrong number of data registers");
  Insn& i = L.emit(op_red_vec);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
}

namespace {
void store_async(Lower& L, bool reduce) {
  auto* x = L.extra<AsyncStore>();
  x->reduce = reduce;
  Address a = L.address(0, true), b = L.address(2, true);
  x->wide_d = a.wide;
  x->wide_b = b.wide;
  x->offset_b = b.offset;
  x->bar = b.cell;
  x->atom.type = L.type();
  if (reduce) x->atom.op = op_of(L);
  x->atom.count = static_cast<uint8_t>(L.has("v2") ? 2 : L.has("v4") ? 4 : 1);
  x->atom.cells = L.vec(L.op(1), x->atom.type, false);
  if (x->atom.cells.size() != x->atom.count) L.fail("wrong number of data registers");
  Insn& i = L.emit(op_store_async);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
}
}  // namespace

void low_st_async(Lower& L) { store_async(L, false); }
void low_red_async(Lower& L) { store_async(L, true); }

void low_st_bulk(Lower& L) {
  auto* x = L.extra<MemOp>();
  x->space = space_of(L);
  Address a = L.address(0, x->space == Mem::kShared);
  x->wide = a.wide;
  if (L.immediate(2) != 0) L.fail("st.bulk stores zero only");
  uint32_t n = L.src(1, Type{'u', 64, 1});
  Insn& i = L.emit(op_st_bulk);
  i.a = a.cell;
  i.imm = a.offset;
  i.b = n;
  i.x = x;
}

}  // namespace ptxsim
