// SPDX-License-Identifier: Apache-2.0
// tcgen05 (PTX ISA 9.7.16): Tensor Memory allocation, loads and stores, copies, MMA, commit,
// fences. Layouts and arithmetic are in sem/umma.h; this file owns allocation, ordering and
// completion.
#include <algorithm>

#include "memory.h"
#include "sem/fp.h"
#include "sem/umma.h"
#include "warp_sync.h"

namespace ptxsim {
namespace {

const Type kB32{'b', 32, 1};
const Type kB64{'b', 64, 1};
const Type kU16{'u', 16, 1};
constexpr uint32_t kPoison = 0x7fc00abcu;  // a NaN that stands out in a dump

uint32_t* tmem_of(Cta& cta) {
  if (cta.tmem.cells.empty()) cta.tmem.cells.assign(sem::kTmemLanes * sem::kTmemColumns, kPoison);
  return cta.tmem.cells.data();
}

uint32_t uniform32(const Warp& w, uint32_t cell, uint32_t m, const char* what) {
  const uint32_t* v = w.cell<uint32_t>(cell);
  uint32_t first = v[__builtin_ctz(m)];
  for (uint32_t r = m; r; r &= r - 1) {
    if (v[__builtin_ctz(r)] != first)
      trap(w, Err::kIllegalInstruction, format("%s differs between the lanes of the warp", what));
  }
  return first;
}

Cta& pair_cta(Cta& own, int which) {
  return own.cl->ctas[(own.rank & ~1u) | static_cast<uint32_t>(which)];
}

void check_allocated(const Warp& w, Cta& cta, const sem::TmemRect& r, const char* what) {
  for (uint32_t c = r.column; c < static_cast<uint32_t>(r.column) + r.columns; ++c) {
    if (c >= 512 || !cta.tmem.owner[c]) {
      trap(w, Err::kIllegalAddress,
           format("%s touches Tensor Memory column %u of CTA rank %u, which is not allocated", what,
                  c, cta.rank));
    }
  }
}

void emit_rect(Warp& w, AgentId agent, const Site& site, Cta& cta, const sem::TmemRect& r, Rw rw) {
  if (!watched(w)) return;
  Access a;
  a.agent = agent;
  a.space = Space::kTmem;
  a.rw = rw;
  a.proxy = Proxy::kAsync;
  a.addr = static_cast<uint64_t>(cta.key) << 32 | static_cast<uint32_t>(r.lane) << 16 | r.column;
  a.size = r.columns;
  a.rows = r.lanes;
  a.site = site;
  for (Observer* o : *w.cl->observers) o->on_access(a);
}

void emit_alloc(Warp& w, Cta& cta, uint32_t column, uint32_t n, bool alloc) {
  if (!watched(w)) return;
  uint64_t addr = static_cast<uint64_t>(cta.key) << 32 | column;
  for (Observer* o : *w.cl->observers) {
    alloc ? o->on_alloc(Space::kTmem, addr, n, "tcgen05.alloc")
          : o->on_free(Space::kTmem, addr, n, "tcgen05.dealloc", w.agent, w.site());
  }
}

// ---- allocation ---------------------------------------------------------------------------------
struct AllocOp : Extra {
  bool wide = false, generic = false;
  int group = 1;
};

void check_count(const Warp& w, uint32_t n) {
  if (n < 32 || n > 512 || (n & (n - 1)))
    trap(w, Err::kIllegalInstruction,
         format("%u Tensor Memory columns: must be a power of two in 32 .. 512", n));
}

Status op_alloc(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const AllocOp*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  TmemState& t = w.cta->tmem;
  uint32_t n = uniform32(w, i.b, m, "the number of columns");
  check_count(w, n);
  if (t.relinquished) trap(w, Err::kLaunchFailure, "tcgen05.alloc after relinquish_alloc_permit");
  if (x.group == 2 && w.cl->ctas.size() < 2)
    trap(w, Err::kIllegalInstruction, "cta_group::2 needs a cluster of at least 2 CTAs");
  int at = -1;
  for (uint32_t c = 0; c + n <= 512 && at < 0; c += 32) {
    bool free = true;
    for (uint32_t k = c; k < c + n; ++k) free &= t.owner[k] == 0;
    if (free) at = static_cast<int>(c);
  }
  if (at < 0) return Status::kBlock;
  uint32_t* cells = tmem_of(*w.cta);
  for (uint32_t k = 0; k < n; ++k) t.owner[at + k] = t.next;
  for (uint32_t lane = 0; lane < 128; ++lane) std::fill_n(cells + lane * 512 + at, n, kPoison);
  ++t.next;
  t.allocated += n;
  t.last_alloc = w.site();
  uint32_t dst = shared_address(w, i, x.wide, x.generic, __builtin_ctz(m), i.a, i.imm);
  uint32_t value = static_cast<uint32_t>(at);
  std::memcpy(shared_ptr_checked(w, dst, 4), &value, 4);
  w.cl->progress = true;
  if (watched(w)) {
    emit_alloc(w, *w.cta, value, n, true);
    Access a;
    a.agent = w.agent;
    a.space = Space::kShared;
    a.rw = Rw::kWrite;
    a.addr = shared_key(*w.cl, dst);
    a.size = 4;
    a.site = w.site();
    for (Observer* o : *w.cl->observers) o->on_access(a);
  }
  return Status::kNext;
}

Status op_dealloc(Warp& w, const Insn& i, uint32_t m) {
  if (!converged(w, kFull)) return Status::kConverge;
  TmemState& t = w.cta->tmem;
  uint32_t addr = uniform32(w, i.a, m, "the Tensor Memory address"),
           n = uniform32(w, i.b, m, "the number of columns");
  check_count(w, n);
  uint32_t c = addr & 0xffff;
  if (addr >> 16 || c + n > 512 || !t.owner[c]) {
    trap(w, Err::kLaunchFailure,
         format("tcgen05.dealloc of 0x%x, %u columns: no such allocation", addr, n));
  }
  uint16_t id = t.owner[c];
  bool exact = (c == 0 || t.owner[c - 1] != id) && (c + n == 512 || t.owner[c + n] != id);
  for (uint32_t k = c; k < c + n; ++k) exact &= t.owner[k] == id;
  if (!exact)
    trap(w, Err::kLaunchFailure,
         format("tcgen05.dealloc of 0x%x, %u columns: differs from the allocation", addr, n));
  for (uint32_t k = c; k < c + n; ++k) t.owner[k] = 0;
  t.allocated -= n;
  w.cl->progress = true;
  emit_alloc(w, *w.cta, c, n, false);
  return Status::kNext;
}

Status op_relinquish(Warp& w, const Insn&, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  w.cta->tmem.relinquished = true;
  return Status::kNext;
}

// ---- ld, st, wait -------------------------------------------------------------------------------
struct TmemOp : Extra {
  sem::TmemAccess access;
  std::vector<uint32_t> cells;
  uint32_t red = 0;  // cell of tcgen05.ld.red, 0 = no reduction
  char red_type = 'f';
  sem::MinMaxMode mode;
};

// tcgen05.ld.red: each thread reduces the registers that it loads.
void reduce_loaded(Warp& w, const TmemOp& x, uint32_t* const* reg) {
  uint32_t* d = w.cell<uint32_t>(x.red);
  for (int l = 0; l < kLanes; ++l) {
    if (x.red_type == 'f') {
      auto in = [&](size_t k) {
        return bit_cast<float>(x.mode.abs ? reg[k][l] & 0x7fffffffu : reg[k][l]);
      };
      float r = in(0);
      for (size_t k = 0; k < x.cells.size(); ++k) r = sem::minmax_f32(r, in(k), x.mode);
      d[l] = bit_cast<uint32_t>(r);
      continue;
    }
    // Signed order is unsigned order with the top bit turned over.
    uint32_t flip = x.red_type == 's' ? 1u << 31 : 0, r = reg[0][l] ^ flip;
    for (size_t k = 1; k < x.cells.size(); ++k) {
      uint32_t v = reg[k][l] ^ flip;
      r = x.mode.is_max ? std::max(r, v) : std::min(r, v);
    }
    d[l] = r ^ flip;
  }
}

uint32_t tmem_address(const Warp& w, const Insn& i, uint32_t m) {
  return uniform32(w, i.a, m, "the Tensor Memory address") + static_cast<uint32_t>(i.imm);
}

Status op_tmem_ld(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const TmemOp*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  uint32_t addr = tmem_address(w, i, m);
  static thread_local std::vector<sem::TmemRect> rects;
  rects.clear();
  need(w, sem::plan_tmem_access(x.access, addr, static_cast<int>(w.id % 4), &rects));
  for (auto& r : rects) check_allocated(w, *w.cta, r, "tcgen05.ld");
  uint32_t* reg[128];
  for (size_t k = 0; k < x.cells.size(); ++k) reg[k] = w.cell<uint32_t>(x.cells[k]);
  // The values are taken at issue; that the columns must stay untouched until wait::ld is what the
  // agent's lifetime tells watchers.
  sem::tmem_load(x.access, addr, tmem_of(*w.cta), reg);
  if (x.red) reduce_loaded(w, x, reg);
  if (watched(w)) {
    AsyncPtr op = new_async(w, AgentKind::kTcgenLd);
    for (auto& r : rects) emit_rect(w, op->agent, op->site, *w.cta, r, Rw::kRead);
    op->done = true;
    w.tmem_ld.push_back(op);
  }
  return Status::kNext;
}

Status op_tmem_st(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const TmemOp*>(i.x);
  if (!converged(w, kFull)) return Status::kConverge;
  uint32_t addr = tmem_address(w, i, m);
  auto rects = std::make_shared<std::vector<sem::TmemRect>>();
  need(w, sem::plan_tmem_access(x.access, addr, static_cast<int>(w.id % 4), rects.get()));
  for (auto& r : *rects) check_allocated(w, *w.cta, r, "tcgen05.st");
  auto data = std::make_shared<std::vector<uint32_t>>(x.cells.size() * kLanes);
  for (size_t k = 0; k < x.cells.size(); ++k)
    std::memcpy(&(*data)[k * kLanes], w.cell<uint32_t>(x.cells[k]), 128);
  AsyncPtr op = new_async(w, AgentKind::kTcgenSt);
  AsyncOp* raw = op.get();
  Warp* wp = &w;
  const TmemOp* px = &x;
  op->run = [wp, raw, px, addr, data, rects] {
    const uint32_t* reg[128];
    for (size_t k = 0; k < px->cells.size(); ++k) reg[k] = &(*data)[k * kLanes];
    sem::tmem_store(px->access, addr, reg, tmem_of(*wp->cta));
    for (auto& r : *rects) emit_rect(*wp, raw->agent, raw->site, *wp->cta, r, Rw::kWrite);
  };
  w.tmem_st.push_back(op);
  if (config().tmem_st_at_issue) {
    force(*op);
  } else {
    pool_add(w, op);
  }
  return Status::kNext;
}

// aux: 1 st.
Status op_wait(Warp& w, const Insn& i, uint32_t) {
  if (!converged(w, kFull)) return Status::kConverge;
  auto& q = i.aux ? w.tmem_st : w.tmem_ld;
  for (auto& op : q) {
    bool was_done = op->done;
    force(*op);
    if (watched(w)) {
      for (Observer* o : *w.cl->observers) {
        if (was_done && !i.aux) o->on_agent_end(op->agent);
        o->on_join(w.agent, op->agent, Join::kFull);
      }
    }
  }
  q.clear();
  return Status::kNext;
}

// ---- cp, mma, commit: the in-order pipe --------------------------------------------------
void make_views(Cta& own, int group, sem::CtaView* views) {
  for (int k = 0; k < group; ++k) {
    Cta& cta = group == 2 ? pair_cta(own, k) : own;
    views[k].window = cta.smem;
    views[k].smem_begin = kSmemBase;
    views[k].smem_end = cta.smem_end;
    views[k].tmem = tmem_of(cta);
  }
}

void check_pair(const Warp& w, int group) {
  if (group == 2 && ((w.cta->rank | 1) >= w.cl->ctas.size()))
    trap(w, Err::kIllegalInstruction, "cta_group::2 without a peer CTA");
}

struct CpOp : Extra {
  sem::CpShape shape = sem::CpShape::k32x128b;
  sem::CpFormat fmt = sem::CpFormat::kNone;
  int group = 1;
};

Status op_cp(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CpOp*>(i.x);
  check_pair(w, x.group);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    auto plan = std::make_shared<sem::CpPlan>();
    uint32_t taddr = w.cell<uint32_t>(i.a)[l] + static_cast<uint32_t>(i.imm);
    need(w, sem::plan_cp(x.shape, x.fmt, taddr, w.cell<uint64_t>(i.b)[l], plan.get()));
    for (int k = 0; k < x.group; ++k) {
      for (auto& rect : plan->writes)
        check_allocated(w, x.group == 2 ? pair_cta(*w.cta, k) : *w.cta, rect, "tcgen05.cp");
    }
    AsyncPtr op = new_async(w, AgentKind::kTcgenCp);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    int group = x.group;
    sem::CpFormat format = x.fmt;
    op->run = [wp, raw, plan, group, format] {
      sem::CtaView views[2];
      make_views(*wp->cta, group, views);
      for (int k = 0; k < group; ++k) {
        Cta& cta = group == 2 ? pair_cta(*wp->cta, k) : *wp->cta;
        need(*wp, sem::execute_cp(*plan, views[k]));
        emit_chunks(*wp, *raw, cta, plan->chunks,
                    format == sem::CpFormat::kB6   ? 12
                    : format == sem::CpFormat::kB4 ? 8
                                                   : 16);
        for (auto& rect : plan->writes)
          emit_rect(*wp, raw->agent, raw->site, cta, rect, Rw::kWrite);
      }
    };
    pipe_add(w, op);
  }
  return Status::kNext;
}

uint32_t used_bytes(const sem::SmemOperand& o) {
  return !o.padded ? 16 : sem::elem_bits(o.elem) == 6 ? 12 : sem::elem_bits(o.elem) == 4 ? 8 : 16;
}

struct MmaOp : Extra {
  sem::UmmaArgs args;  // the static part
  uint32_t a = 0, b = 0, idesc = 0, sfa = 0, sfb = 0, enable = 0;
  int64_t a_offset = 0, sfa_offset = 0, sfb_offset = 0;
  bool not_enable = false;
  std::vector<uint32_t> disable;
  sem::Accumulate accumulate = sem::Accumulate::kExact;
};

Status op_mma(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MmaOp*>(i.x);
  check_pair(w, x.args.cta_group);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    sem::UmmaArgs args = x.args;
    args.d_tmem = w.cell<uint32_t>(i.d)[l] + static_cast<uint32_t>(i.imm);
    args.a = args.a_in_tmem ? w.cell<uint32_t>(x.a)[l] + static_cast<uint32_t>(x.a_offset)
                            : w.cell<uint64_t>(x.a)[l];
    args.b = w.cell<uint64_t>(x.b)[l];
    args.idesc = w.cell<uint32_t>(x.idesc)[l];
    if (x.sfa) {
      args.sfa_tmem = w.cell<uint32_t>(x.sfa)[l] + static_cast<uint32_t>(x.sfa_offset);
      args.sfb_tmem = w.cell<uint32_t>(x.sfb)[l] + static_cast<uint32_t>(x.sfb_offset);
    }
    bool enable = *w.cell<uint32_t>(x.enable) >> l & 1;
    args.enable_d = enable != x.not_enable;
    uint32_t disable[8];
    if (!x.disable.empty()) {
      for (size_t k = 0; k < x.disable.size(); ++k) disable[k] = w.cell<uint32_t>(x.disable[k])[l];
      args.disable_lanes = disable;
    }
    auto plan = std::make_shared<sem::UmmaPlan>();
    need(w, sem::plan_umma(args, plan.get()));
    for (auto* rects : {&plan->reads, &plan->writes}) {
      for (auto& rect : *rects)
        check_allocated(w, x.args.cta_group == 2 ? pair_cta(*w.cta, rect.cta) : *w.cta, rect,
                        "tcgen05.mma");
    }
    AsyncPtr op = new_async(w, AgentKind::kTcgenMma);
    ++w.cl->tcgen_mma;
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    op->run = [wp, raw, plan] {
      int group = plan->args.cta_group;
      sem::CtaView views[2];
      make_views(*wp->cta, group, views);
      if (watched(*wp)) {
        for (int k = 0; k < group; ++k) {
          Cta& cta = group == 2 ? pair_cta(*wp->cta, k) : *wp->cta;
          if (!plan->args.a_in_tmem)
            emit_chunks(*wp, *raw, cta, plan->a_chunks, used_bytes(plan->a));
          emit_chunks(*wp, *raw, cta, plan->b_chunks, used_bytes(plan->b));
        }
        for (auto& rect : plan->reads) {
          emit_rect(*wp, raw->agent, raw->site,
                    group == 2 ? pair_cta(*wp->cta, rect.cta) : *wp->cta, rect, Rw::kRead);
        }
      }
      need(*wp, sem::execute_umma(*plan, views, config().accumulate));
      if (watched(*wp)) {
        for (auto& rect : plan->writes) {
          emit_rect(*wp, raw->agent, raw->site,
                    group == 2 ? pair_cta(*wp->cta, rect.cta) : *wp->cta, rect, Rw::kWrite);
        }
      }
    };
    pipe_add(w, op);
  }
  return Status::kNext;
}

struct CommitOp : Extra {
  bool wide = false, generic = false, multicast = false;
  uint32_t mask = 0;
  int group = 1;
};

Status op_commit(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const CommitOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t bar = shared_address(w, i, x.wide, x.generic, l, i.a, i.imm);
    uint32_t targets = 1u << (bar >> kRankShift);
    if (x.multicast) targets = w.cell<uint16_t>(x.mask)[l];
    if (targets == 0 || targets >> w.cl->ctas.size()) {
      trap(w, Err::kIllegalInstruction,
           format("tcgen05.commit to CTA mask 0x%x of a cluster of %zu CTAs", targets,
                  w.cl->ctas.size()));
    }
    AsyncPtr op = new_async(w, AgentKind::kTcgenCommit);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    op->run = [wp, raw, bar, targets] {
      for (uint32_t t = targets; t; t &= t - 1) {
        uint32_t rank = static_cast<uint32_t>(__builtin_ctz(t));
        mbar_arrive(*wp, raw->agent, rank << kRankShift | (bar & ((1u << kRankShift) - 1)), 1, 0,
                    Order::kRelease, raw->site);
      }
    };
    pipe_add(w, op);
  }
  return Status::kNext;
}

// aux: 1 after.
Status op_fence(Warp& w, const Insn& i, uint32_t) {
  if (watched(w)) {
    Fence f = i.aux ? Fence::kTcgenAfterSync : Fence::kTcgenBeforeSync;
    for (Observer* o : *w.cl->observers)
      o->on_fence(w.agent, f, Order::kAcqRel, Scope::kCta, w.site());
  }
  return Status::kNext;
}

int group_of(Lower& L) { return L.has("cta_group::2") ? 2 : 1; }

void tmem_access(Lower& L, bool load) {
  auto* x = L.extra<TmemOp>();
  x->access.shape = L.has("32x32b")    ? sem::TmemShape::k32x32b
                    : L.has("16x64b")  ? sem::TmemShape::k16x64b
                    : L.has("16x128b") ? sem::TmemShape::k16x128b
                    : L.has("16x256b") ? sem::TmemShape::k16x256b
                                       : sem::TmemShape::k16x32bx2;
  for (auto& g : L.m.groups) {
    if (g.size() > 1 && g[0] == 'x' && g[1] >= '0' && g[1] <= '9')
      x->access.num = atoi(g.c_str() + 1);
  }
  x->access.pack16 = L.has("pack::16b") || L.has("unpack::16b");
  // ld r, [taddr] {, imm};  st [taddr] {, imm}, r
  // ld.red r, redval, [taddr] {, imm}
  bool red = L.has("red");
  size_t addr = red ? 2 : load ? 1 : 0, data = load ? 0 : L.count() - 1;
  size_t split = load ? addr + 1 : 1;
  if (x->access.shape == sem::TmemShape::k16x32bx2)
    x->access.half_split = static_cast<int>(L.immediate(split));
  if (red) {
    if (x->access.num < 2) L.fail("tcgen05.ld.red starts at .x2");
    x->red_type = L.has("f32") ? 'f' : L.has("s32") ? 's' : 'u';
    x->mode.is_max = L.has("max");
    x->mode.nan = L.has("NaN");
    x->mode.abs = L.has("abs");
    x->red = L.dst(1, Type{x->red_type, 32, 1});
  }
  std::string e = sem::check_tmem_access(x->access);
  if (!e.empty()) L.fail(e);
  x->cells = L.vec(L.op(data), kB32, load);
  int want = sem::tmem_regs(x->access);
  if (static_cast<int>(x->cells.size()) != want)
    L.fail(format("expected %d registers, found %zu", want, x->cells.size()));
  Address a = L.address(addr, true);
  if (a.wide) L.fail("a Tensor Memory address has 32 bits");
  Insn& i = L.emit(load ? op_tmem_ld : op_tmem_st);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
  i.flags |= kBlocking;
}

}  // namespace

void low_tc_alloc(Lower& L) {
  auto* x = L.extra<AllocOp>();
  x->generic = !L.has("shared::cta");
  x->group = group_of(L);
  Address a = L.address(0, !x->generic);
  x->wide = a.wide;
  uint32_t n = L.src(1, kB32);
  Insn& i = L.emit(op_alloc);
  i.a = a.cell;
  i.imm = a.offset;
  i.b = n;
  i.x = x;
  i.flags |= kBlocking;
}

void low_tc_dealloc(Lower& L) {
  uint32_t a = L.src(0, kB32), n = L.src(1, kB32);
  Insn& i = L.emit(op_dealloc);
  i.a = a;
  i.b = n;
  i.flags |= kBlocking;
}

void low_tc_relinquish(Lower& L) { L.emit(op_relinquish).flags |= kBlocking; }
void low_tc_ld(Lower& L) { tmem_access(L, true); }
void low_tc_st(Lower& L) { tmem_access(L, false); }

void low_tc_wait(Lower& L) {
  Insn& i = L.emit(op_wait);
  i.aux = L.has("wait::st");
  i.flags |= kBlocking;
}

void low_tc_cp(Lower& L) {
  auto* x = L.extra<CpOp>();
  x->group = group_of(L);
  x->shape = L.has("128x256b")        ? sem::CpShape::k128x256b
             : L.has("128x128b")      ? sem::CpShape::k128x128b
             : L.has("4x256b")        ? sem::CpShape::k4x256b
             : L.has("warpx2::02_13") ? sem::CpShape::k64x128b0213
             : L.has("warpx2::01_23") ? sem::CpShape::k64x128b0123
                                      : sem::CpShape::k32x128b;
  x->fmt = L.has("b6x16_p32")   ? sem::CpFormat::kB6
           : L.has("b4x16_p64") ? sem::CpFormat::kB4
                                : sem::CpFormat::kNone;
  if (L.has("b8x16") != (x->fmt != sem::CpFormat::kNone))
    L.fail(".b8x16 and the source format come together");
  Address a = L.address(0, true);
  uint32_t b = L.src(1, kB64);
  Insn& i = L.emit(op_cp);
  i.a = a.cell;
  i.imm = a.offset;
  i.b = b;
  i.x = x;
}

void low_tc_mma(Lower& L) {
  auto* x = L.extra<MmaOp>();
  sem::UmmaArgs& g = x->args;
  static const std::pair<const char*, sem::UmmaKind> kinds[] = {
      {"kind::f16", sem::UmmaKind::kF16},           {"kind::tf32", sem::UmmaKind::kTf32},
      {"kind::f8f6f4", sem::UmmaKind::kF8f6f4},     {"kind::i8", sem::UmmaKind::kI8},
      {"kind::mxf8f6f4", sem::UmmaKind::kMxf8f6f4}, {"kind::mxf4", sem::UmmaKind::kMxf4},
      {"kind::mxf4nvf4", sem::UmmaKind::kMxf4nvf4}};
  for (auto& k : kinds) {
    if (L.has(k.first)) g.kind = k.second;
  }
  g.cta_group = group_of(L);
  g.ws = L.has("ws");
  bool scaled = L.has("block_scale");
  g.block16 = L.has("block16");
  g.block32 = L.has("block32");
  if (scaled) {
    g.scale_vec = L.has("scale_vec::1X")               ? 1
                  : L.has("scale_vec::2X")             ? 2
                  : L.has("scale_vec::4X")             ? 4
                  : g.block16                          ? 4
                  : g.kind == sem::UmmaKind::kMxf8f6f4 ? 1
                                                       : 2;
  }
  Address d = L.address(0, true);
  const Operand& a = L.op(1);
  g.a_in_tmem = a.kind == Operand::kAddr;
  if (g.a_in_tmem) {
    Address at = L.address(a, true);
    x->a = at.cell;
    x->a_offset = at.offset;
  } else {
    x->a = L.src(1, kB64);
  }
  x->b = L.src(2, kB64);
  x->idesc = L.src(3, kB32);
  size_t next = 4;
  if (scaled) {
    Address sa = L.address(4, true), sb = L.address(5, true);
    x->sfa = sa.cell;
    x->sfa_offset = sa.offset;
    x->sfb = sb.cell;
    x->sfb_offset = sb.offset;
    next = 6;
  } else if (L.op(4).kind == Operand::kVec) {
    x->disable = L.vec(L.op(4), kB32, false);
    size_t want = g.cta_group == 2 ? 8 : 4;
    if (x->disable.size() != want)
      L.fail(format("the disable-output-lane vector takes %zu registers", want));
    next = 5;
  }
  if (next >= L.count()) L.fail("missing enable-input-d");
  x->enable = L.pred(L.op(next), &x->not_enable);
  if (next + 1 < L.count()) {
    if (g.ws) L.unsupported("zero-column-mask of tcgen05.mma.ws");
    g.scale_input_d = static_cast<int>(L.immediate(next + 1));
    if (g.scale_input_d < 0 || g.scale_input_d > 15) L.fail("scale-input-d must be 0 .. 15");
  }
  Insn& i = L.emit(op_mma);
  i.d = d.cell;
  i.imm = d.offset;
  i.x = x;
}

void low_tc_fence(Lower& L) { L.emit(op_fence).aux = L.has("fence::after_thread_sync"); }

void low_tc_commit(Lower& L) {
  auto* x = L.extra<CommitOp>();
  x->group = group_of(L);
  x->multicast = L.has("multicast::cluster");
  bool shared = L.has("shared::cluster");
  Address a = L.address(0, shared);
  x->wide = a.wide;
  x->generic = !shared;
  if (x->generic && !a.wide) L.fail("a generic address has 64 bits");
  if (x->multicast != (L.count() == 2)) L.fail("multicast and the CTA mask come together");
  if (x->multicast) x->mask = L.src(1, kU16);
  Insn& i = L.emit(op_commit);
  i.a = a.cell;
  i.imm = a.offset;
  i.x = x;
}

}  // namespace ptxsim
