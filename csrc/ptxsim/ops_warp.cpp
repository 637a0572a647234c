// SPDX-License-Identifier: Apache-2.0
// Warp-wide exchange: shfl, vote, match, redux, elect, activemask; cluster launch control (PTX
// ISA 9.7.9.6, 9.7.13.9-9.7.13.18).
#include "memory.h"
#include "sem/fp.h"
#include "warp_sync.h"

namespace ptxsim {
namespace {

const Type kU32{'u', 32, 1};
const Type kPred{'p', 1, 1};
const Type kB128{'b', 128, 1};

// Common entry of the .sync instructions: the member mask is in the first active lane of cell c.
// Returns false to wait.
inline bool enter(Warp& w, uint32_t mask_cell, uint32_t m, uint32_t* members) {
  *members = w.cell<uint32_t>(mask_cell)[__builtin_ctz(m)];
  require_members(w, m, *members);
  return converged(w, *members);
}

struct ShflOp : Extra {
  int mode = 0;  // 0 up, 1 down, 2 bfly, 3 idx
  uint32_t p = 0, mask = 0;
};

Status op_shfl(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const ShflOp*>(i.x);
  uint32_t members;
  if (!enter(w, x.mask, m, &members)) return Status::kConverge;
  uint32_t a[kLanes];
  std::memcpy(a, w.cell<uint32_t>(i.a), sizeof(a));
  const uint32_t* b = w.cell<uint32_t>(i.b);
  const uint32_t* c = w.cell<uint32_t>(i.c);
  uint32_t* d = w.cell<uint32_t>(i.d);
  uint32_t ok = 0;
  uint32_t r[kLanes];
  lanes(m, [&](int l) {
    int seg = static_cast<int>(c[l] >> 8 & 31), cval = static_cast<int>(c[l] & 31),
        bval = static_cast<int>(b[l] & 31);
    int max_lane = (l & seg) | (cval & ~seg), min_lane = l & seg, j = l;
    bool p = false;
    switch (x.mode) {
      case 0:
        j = l - bval;
        p = j >= max_lane;
        break;
      case 1:
        j = l + bval;
        p = j <= max_lane;
        break;
      case 2:
        j = l ^ bval;
        p = j <= max_lane;
        break;
      default:
        j = min_lane | (bval & ~seg);
        p = j <= max_lane;
    }
    if (!p) j = l;
    // A source lane that does not take part has no defined value; hand out poison.
    r[l] = (m >> j & 1) ? a[j] : 0xffffffffu;
    ok |= static_cast<uint32_t>(p) << l;
  });
  lanes(m, [&](int l) { d[l] = r[l]; });
  if (x.p) set_pred(w, x.p, m, ok);
  return Status::kNext;
}

// aux: 0 all, 1 any, 2 uni, 3 ballot; n: predicate negated.
Status op_vote(Warp& w, const Insn& i, uint32_t m) {
  uint32_t members;
  if (!enter(w, i.c, m, &members)) return Status::kConverge;
  uint32_t p = *w.cell<uint32_t>(i.a);
  if (i.n) p = ~p;
  p &= m;
  if (i.aux == 3) {
    uint32_t* d = w.cell<uint32_t>(i.d);
    lanes(m, [=](int l) { d[l] = p; });
  } else {
    bool v = i.aux == 0 ? p == m : i.aux == 1 ? p != 0 : p == m || p == 0;
    set_pred(w, i.d, m, v ? kFull : 0);
  }
  return Status::kNext;
}

struct MatchOp : Extra {
  bool all = false;
  int bits = 32;
  uint32_t p = 0;
};

Status op_match(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MatchOp*>(i.x);
  uint32_t members;
  if (!enter(w, i.c, m, &members)) return Status::kConverge;
  uint64_t v[kLanes];
  lanes(m,
        [&](int l) { v[l] = x.bits == 64 ? w.cell<uint64_t>(i.a)[l] : w.cell<uint32_t>(i.a)[l]; });
  uint32_t* d = w.cell<uint32_t>(i.d);
  uint32_t r[kLanes];
  bool same = true;
  lanes(m, [&](int l) {
    uint32_t bits = 0;
    for (uint32_t q = m; q; q &= q - 1) {
      int k = __builtin_ctz(q);
      if (v[k] == v[l]) bits |= 1u << k;
    }
    r[l] = bits;
    same &= bits == m;
  });
  lanes(m, [&](int l) { d[l] = x.all ? (same ? m : 0) : r[l]; });
  if (x.p) set_pred(w, x.p, m, same ? kFull : 0);
  return Status::kNext;
}

Status op_activemask(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  lanes(m, [=](int l) { d[l] = m; });
  return Status::kNext;
}

// aux: 0 add, 1 min u, 2 max u, 3 min s, 4 max s, 5 and, 6 or, 7 xor.
Status op_redux(Warp& w, const Insn& i, uint32_t m) {
  uint32_t members;
  if (!enter(w, i.c, m, &members)) return Status::kConverge;
  const uint32_t* a = w.cell<uint32_t>(i.a);
  uint32_t r = a[__builtin_ctz(m)];
  for (uint32_t q = m & (m - 1); q; q &= q - 1) {
    uint32_t v = a[__builtin_ctz(q)];
    switch (i.aux) {
      case 0:
        r += v;
        break;
      case 1:
        r = v < r ? v : r;
        break;
      case 2:
        r = v > r ? v : r;
        break;
      case 3:
        r = static_cast<int32_t>(v) < static_cast<int32_t>(r) ? v : r;
        break;
      case 4:
        r = static_cast<int32_t>(v) > static_cast<int32_t>(r) ? v : r;
        break;
      case 5:
        r &= v;
        break;
      case 6:
        r |= v;
        break;
      default:
        r ^= v;
    }
  }
  uint32_t* d = w.cell<uint32_t>(i.d);
  lanes(m, [=](int l) { d[l] = r; });
  return Status::kNext;
}

struct ReduxF : Extra {
  sem::MinMaxMode mode;
  bool abs = false;
};

Status op_redux_f32(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const ReduxF*>(i.x);
  uint32_t members;
  if (!enter(w, i.c, m, &members)) return Status::kConverge;
  const uint32_t* a = w.cell<uint32_t>(i.a);
  auto in = [&](int l) { return bit_cast<float>(x.abs ? a[l] & 0x7fffffffu : a[l]); };
  float r = in(__builtin_ctz(m));
  r = sem::minmax_f32(r, r, x.mode);
  for (uint32_t q = m & (m - 1); q; q &= q - 1)
    r = sem::minmax_f32(r, in(__builtin_ctz(q)), x.mode);
  float* d = w.cell<float>(i.d);
  lanes(m, [=](int l) { d[l] = r; });
  return Status::kNext;
}

// The lowest live member is the leader.
Status op_elect(Warp& w, const Insn& i, uint32_t m) {
  uint32_t members;
  if (!enter(w, i.c, m, &members)) return Status::kConverge;
  uint32_t leader = static_cast<uint32_t>(__builtin_ctz(m));
  if (i.a) {
    uint32_t* d = w.cell<uint32_t>(i.a);
    lanes(m, [=](int l) { d[l] = leader; });
  }
  set_pred(w, i.d, m, 1u << leader);
  return Status::kNext;
}

// ---- cluster launch control: the response is {1 = cancelled, x, y, z} as four words.
struct ClcOp : Extra {
  bool wide0 = true, wide1 = true, generic = true, multicast = false;
  int64_t offset0 = 0, offset1 = 0;
};

Status op_clc_try(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const ClcOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t dst = shared_address(w, i, x.wide0, x.generic, l, i.a, x.offset0);
    uint32_t bar = shared_address(w, i, x.wide1, x.generic, l, i.b, x.offset1);
    if (dst & 15)
      trap(w, Err::kMisalignedAddress,
           "clusterlaunchcontrol.try_cancel: the response needs 16-byte alignment");
    AsyncPtr op = new_async(w, AgentKind::kOther);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    bool multicast = x.multicast;
    op->run = [wp, raw, dst, bar, multicast] {
      Grid& g = *wp->cl->grid;
      uint32_t response[4] = {0, 0, 0, 0};
      uint32_t n = g.next.fetch_add(1);
      if (n < g.total) {
        response[0] = 1;
        response[1] = n % g.clusters[0] * g.cluster[0];
        response[2] = n / g.clusters[0] % g.clusters[1] * g.cluster[1];
        response[3] = n / (g.clusters[0] * g.clusters[1]) * g.cluster[2];
      } else {
        g.next.store(g.total);
      }
      uint32_t off = (1u << kRankShift) - 1;
      for (auto& cta : wp->cl->ctas) {
        if (!multicast && cta.rank != dst >> kRankShift) continue;
        uint32_t at = cta.rank << kRankShift | (dst & off);
        std::memcpy(shared_ptr_checked(*wp, at, 16), response, 16);
        if (watched(*wp)) {
          Access a;
          a.agent = raw->agent;
          a.space = Space::kShared;
          a.rw = Rw::kWrite;
          a.proxy = Proxy::kAsync;
          a.addr = shared_key(*wp->cl, at);
          a.size = 16;
          a.site = raw->site;
          for (Observer* o : *wp->cl->observers) o->on_access(a);
        }
        mbar_arrive(*wp, raw->agent, cta.rank << kRankShift | (bar & off), 0, -16, Order::kRelease,
                    raw->site);
      }
    };
    pool_add(w, op);
  }
  return Status::kNext;
}

// aux: 0 is_canceled, 1 v4, 2.. x, y, z.
struct ClcQuery : Extra {
  std::vector<uint32_t> cells;
};

Status op_clc_query(Warp& w, const Insn& i, uint32_t m) {
  const uint64_t* a = w.cell<uint64_t>(i.a);
  if (i.aux == 0) {
    uint32_t r = 0;
    lanes(m, [&](int l) { r |= static_cast<uint32_t>(a[l] & 1) << l; });
    set_pred(w, i.d, m, r);
    return Status::kNext;
  }
  auto& x = *static_cast<const ClcQuery*>(i.x);
  lanes(m, [&](int l) {
    uint32_t v[4] = {static_cast<uint32_t>(a[l] >> 32), static_cast<uint32_t>(a[l + kLanes]),
                     static_cast<uint32_t>(a[l + kLanes] >> 32), 0};
    if (i.aux == 1) {
      for (int k = 0; k < 4; ++k) w.cell<uint32_t>(x.cells[k])[l] = v[k];
    } else {
      w.cell<uint32_t>(x.cells[0])[l] = v[i.aux - 2];
    }
  });
  return Status::kNext;
}

}  // namespace

void low_shfl(Lower& L) {
  auto* x = L.extra<ShflOp>();
  x->mode = L.has("up") ? 0 : L.has("down") ? 1 : L.has("bfly") ? 2 : 3;
  const Operand& o = L.op(0);
  uint32_t d;
  if (o.kind == Operand::kPair) {
    d = L.dst(o.elems[0], kU32);
    x->p = L.dst(o.elems[1], kPred);
  } else {
    d = L.dst(o, kU32);
  }
  uint32_t a = L.src(1, kU32), b = L.src(2, kU32), c = L.src(3, kU32);
  x->mask = L.src(4, kU32);
  Insn& i = L.emit(op_shfl);
  i.d = d;
  i.a = a;
  i.b = b;
  i.c = c;
  i.x = x;
  i.flags |= kBlocking;
}

void low_vote(Lower& L) {
  bool neg = false;
  uint32_t a = L.pred(L.op(1), &neg), c = L.src(2, kU32);
  bool ballot = L.has("ballot");
  uint32_t d = L.dst(0, ballot ? kU32 : kPred);
  Insn& i = L.emit(op_vote);
  i.d = d;
  i.a = a;
  i.c = c;
  i.n = neg;
  i.aux = ballot ? 3 : L.has("all") ? 0 : L.has("any") ? 1 : 2;
  i.flags |= kBlocking;
}

void low_match(Lower& L) {
  auto* x = L.extra<MatchOp>();
  Type t = L.type();
  x->all = L.has("all");
  x->bits = t.bits;
  const Operand& o = L.op(0);
  uint32_t d;
  if (o.kind == Operand::kPair) {
    if (!x->all) L.fail("match.any has no predicate");
    d = L.dst(o.elems[0], kU32);
    x->p = L.dst(o.elems[1], kPred);
  } else {
    d = L.dst(o, kU32);
  }
  uint32_t a = L.src(1, t), c = L.src(2, kU32);
  Insn& i = L.emit(op_match);
  i.d = d;
  i.a = a;
  i.c = c;
  i.x = x;
  i.flags |= kBlocking;
}

void low_activemask(Lower& L) {
  uint32_t d = L.dst(0, kU32);
  L.emit(op_activemask).d = d;
}

void low_redux(Lower& L) {
  uint32_t a = L.src(1, kU32), c = L.src(2, kU32), d = L.dst(0, kU32);
  bool s = L.has("s32");
  Insn& i = L.emit(op_redux);
  i.d = d;
  i.a = a;
  i.c = c;
  i.aux = L.has("add")   ? 0
          : L.has("min") ? (s ? 3 : 1)
          : L.has("max") ? (s ? 4 : 2)
          : L.has("and") ? 5
          : L.has("or")  ? 6
                         : 7;
  i.flags |= kBlocking;
}

void low_redux_f32(Lower& L) {
  auto* x = L.extra<ReduxF>();
  x->mode.is_max = L.has("max");
  x->mode.nan = L.has("NaN");
  x->abs = L.has("abs");
  uint32_t a = L.src(1, kU32), c = L.src(2, kU32), d = L.dst(0, kU32);
  Insn& i = L.emit(op_redux_f32);
  i.d = d;
  i.a = a;
  i.c = c;
  i.x = x;
  i.flags |= kBlocking;
}

void low_elect(Lower& L) {
  const Operand& o = L.op(0);
  if (o.kind != Operand::kPair) L.fail("expected d|p");
  uint32_t d = o.elems[0].kind == Operand::kSink ? 0 : L.dst(o.elems[0], kU32);
  uint32_t p = L.dst(o.elems[1], kPred), c = L.src(1, kU32);
  Insn& i = L.emit(op_elect);
  i.d = p;
  i.a = d;
  i.c = c;
  i.flags |= kBlocking;
}

void low_clc_try(Lower& L) {
  auto* x = L.extra<ClcOp>();
  x->generic = !L.has("shared::cta");
  x->multicast = L.has("multicast::cluster::all");
  Address a = L.address(0, !x->generic), b = L.address(1, !x->generic);
  x->wide0 = a.wide;
  x->wide1 = b.wide;
  if (!a.wide || !b.wide) x->generic = false;
  x->offset0 = a.offset;
  x->offset1 = b.offset;
  Insn& i = L.emit(op_clc_try);
  i.a = a.cell;
  i.b = b.cell;
  i.x = x;
}

void low_clc_query(Lower& L) {
  uint32_t a = L.src(1, kB128);
  if (L.has("is_canceled")) {
    uint32_t d = L.dst(0, kPred);
    Insn& i = L.emit(op_clc_query);
    i.d = d;
    i.a = a;
    return;
  }
  auto* x = L.extra<ClcQuery>();
  bool v4 = L.has("v4");
  if (v4) {
    const Operand& o = L.op(0);
    if (o.kind != Operand::kVec || o.elems.size() != 4) L.fail("expected four registers");
    x->cells = L.vec(o, kU32, true);
  } else {
    x->cells.push_back(L.dst(0, kU32));
  }
  Insn& i = L.emit(op_clc_query);
  i.a = a;
  i.x = x;
  i.aux = v4 ? 1 : L.has("get_first_ctaid::x") ? 2 : L.has("get_first_ctaid::y") ? 3 : 4;
}

}  // namespace ptxsim
