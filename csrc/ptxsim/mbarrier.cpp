// SPDX-License-Identifier: Apache-2.0
// mbarrier objects (PTX ISA 9.7.13.15): state, phases, transaction counts, misuse.
#include "memory.h"
#include "sem/fault.h"

namespace ptxsim {

constexpr int64_t kMaxCount = (1 << 20) - 1;  // spec: counts and tx-count are limited to 2^20 - 1

uint64_t Mbarrier::packed() const {
  // Opaque to programs. Bit 63 is set and the fields overlap nothing a float or pointer store would
  // leave.
  return 1ull << 63 | (phase & 1) << 62 | (static_cast<uint64_t>(tx) & 0x1fffff) << 40 |
         static_cast<uint64_t>(expected & 0xfffff) << 20 |
         (static_cast<uint64_t>(pending) & 0xfffff);
}

namespace {

uint32_t offset_of(uint32_t addr) { return addr & ((1u << kRankShift) - 1); }

void write_back(const Warp& w, uint32_t addr, const Mbarrier& b) {
  uint64_t v = b.packed();
  std::memcpy(w.cl->window + addr, &v, 8);
}

BarrierRef ref(const Warp& w, uint32_t addr) {
  BarrierRef r;
  r.kind = BarrierKind::kMbarrier;
  r.owner = cta_of_shared(w, addr).key;
  r.addr = shared_key(*w.cl, addr);
  return r;
}

}  // namespace

Mbarrier& mbar_at(const Warp& w, uint32_t addr) {
  if (addr & 7)
    trap(w, Err::kMisalignedAddress, format("mbarrier at 0x%x is not aligned to 8 bytes", addr));
  shared_ptr_checked(w, addr, 8);
  Cta& cta = cta_of_shared(w, addr);
  auto it = cta.mbarriers.find(offset_of(addr));
  if (it == cta.mbarriers.end()) {
    trap(w, Err::kLaunchFailure,
         format("shared address 0x%x (offset 0x%x of CTA rank %u) holds no initialised mbarrier",
                addr, offset_of(addr) - kSmemBase, addr >> kRankShift));
  }
  uint64_t v;
  std::memcpy(&v, w.cl->window + addr, 8);
  if (v != it->second.packed()) {
    trap(w, Err::kLaunchFailure,
         format("the mbarrier at shared offset 0x%x was overwritten (holds 0x%llx)",
                offset_of(addr) - kSmemBase, (unsigned long long)v));
  }
  return it->second;
}

void mbar_init(Warp& w, uint32_t addr, uint32_t count) {
  if (addr & 7)
    trap(w, Err::kMisalignedAddress, format("mbarrier at 0x%x is not aligned to 8 bytes", addr));
  if (count == 0 || count > kMaxCount)
    trap(w, Err::kIllegalInstruction,
         format("mbarrier.init with count %u, allowed 1 .. %lld", count, (long long)kMaxCount));
  shared_ptr_checked(w, addr, 8);
  Mbarrier b;
  b.expected = count;
  b.pending = count;
  cta_of_shared(w, addr).mbarriers[offset_of(addr)] = b;
  write_back(w, addr, b);
  w.cl->progress = true;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_barrier_init(w.agent, ref(w, addr), count, w.site());
  }
}

void mbar_inval(Warp& w, uint32_t addr) {
  mbar_at(w, addr);
  cta_of_shared(w, addr).mbarriers.erase(offset_of(addr));
  uint64_t poison = ~0ull;
  std::memcpy(w.cl->window + addr, &poison, 8);
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_barrier_inval(w.agent, ref(w, addr), w.site());
  }
}

uint64_t mbar_arrive(Warp& w, AgentId agent, uint32_t addr, uint32_t count, int64_t tx, Order order,
                     const Site& site, uint32_t lanes) {
  Mbarrier& b = mbar_at(w, addr);
  uint64_t phase = b.phase;
  // The transaction count changes first: arrive.expect_tx must not complete a phase on its arrival
  // alone.
  if (!sem::faulty(sem::Fault::kTxCount)) b.tx += tx;
  if (b.tx > kMaxCount || b.tx < -kMaxCount) {
    trap(w, Err::kLaunchFailure,
         format("tx-count %lld of the mbarrier at shared offset 0x%x leaves the range of 2^20 - 1",
                (long long)b.tx, offset_of(addr) - kSmemBase));
  }
  if (b.pending < static_cast<int64_t>(count)) {
    trap(w, Err::kLaunchFailure,
         format("%u arrivals on the mbarrier at shared offset 0x%x (CTA rank %u), but only %lld of "
                "%u are pending in phase %llu",
                count, offset_of(addr) - kSmemBase, addr >> kRankShift, (long long)b.pending,
                b.expected, (unsigned long long)phase));
  }
  b.pending -= count;
  bool complete = b.pending == 0 && b.tx == 0;
  if (complete) {
    ++b.phase;
    b.pending = b.expected;
  }
  write_back(w, addr, b);
  w.cl->progress = true;
  if (watched(w)) {
    BarrierRef r = ref(w, addr);
    for (Observer* o : *w.cl->observers)
      o->on_arrive(agent, r, phase, count, tx, order, site, lanes);
    if (complete) {
      for (Observer* o : *w.cl->observers) o->on_phase_complete(r, phase);
    }
  }
  return phase;
}

namespace {

const Type kU32{'u', 32, 1};
const Type kU64{'u', 64, 1};
const Type kPred{'p', 1, 1};

struct MbarOp : Extra {
  bool wide = true, generic = true;
  int64_t offset = 0;
  Order order = Order::kRelease;
  Scope scope = Scope::kCta;
  uint32_t count = 0;  // cell, 0 = 1
  uint32_t tx = 0;     // cell
  bool drop = false, no_complete = false, remote = false;
  bool parity = false;
  bool try_wait = false;
};

// The mbarrier that an instruction names: its data and the cell of its address.
struct MbarOperand {
  MbarOp* x;
  uint32_t cell;
};

MbarOperand mbar_operand(Lower& L, size_t index) {
  auto* x = L.extra<MbarOp>();
  x->generic = !(L.has("shared") || L.has("shared::cta") || L.has("shared::cluster"));
  Address a = L.address(index, !x->generic);
  x->wide = a.wide;
  x->offset = a.offset;
  if (x->generic && !a.wide) L.fail("a generic address has 64 bits");
  return {x, a.cell};
}

Insn& emit(Lower& L, Handler fn, MbarOperand bar, uint32_t b = 0, uint32_t d = 0) {
  Insn& i = L.emit(fn);
  i.d = d;
  i.a = bar.cell;
  i.b = b;
  i.x = bar.x;
  return i;
}

inline uint32_t addr_of(const Warp& w, const Insn& i, const MbarOp& x, int lane) {
  return shared_address(w, i, x.wide, x.generic, lane, i.a, x.offset);
}

void own_cta(const Warp& w, uint32_t addr, const char* what) {
  if (addr >> kRankShift != w.cta->rank) {
    trap(w, Err::kIllegalInstruction,
         format("%s on the mbarrier of CTA rank %u: only the own CTA's may be used", what,
                addr >> kRankShift));
  }
}

Status op_init(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t a = addr_of(w, i, x, l);
    own_cta(w, a, "mbarrier.init");
    mbar_init(w, a, w.cell<uint32_t>(i.b)[l]);
  }
  return Status::kNext;
}

Status op_inval(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) mbar_inval(w, addr_of(w, i, x, __builtin_ctz(r)));
  return Status::kNext;
}

// aux: 1 complete_tx.
Status op_expect(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    int64_t tx = w.cell<uint32_t>(i.b)[l];
    mbar_arrive(w, w.agent, addr_of(w, i, x, l), 0, i.aux ? -tx : tx, Order::kRelaxed, w.site(),
                1u << l);
  }
  return Status::kNext;
}

Status op_arrive(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t a = addr_of(w, i, x, l);
    uint32_t count = x.count ? w.cell<uint32_t>(x.count)[l] : 1;
    if (count == 0 || count > kMaxCount)
      trap(w, Err::kIllegalInstruction, format("mbarrier.arrive with count %u", count));
    int64_t tx = x.tx ? w.cell<uint32_t>(x.tx)[l] : 0;
    Mbarrier& b = mbar_at(w, a);
    uint64_t state = b.packed();
    if (x.drop) {
      if (b.expected < count)
        trap(w, Err::kLaunchFailure, "mbarrier.arrive_drop below an expected count of zero");
      b.expected -= count;
    }
    if (x.no_complete && b.pending <= static_cast<int64_t>(count)) {
      trap(w, Err::kLaunchFailure, "mbarrier.arrive.noComplete would complete the phase");
    }
    mbar_arrive(w, w.agent, a, count, tx, x.order, w.site(), 1u << l);
    if (i.d) w.cell<uint64_t>(i.d)[l] = state;
  }
  return Status::kNext;
}

// Completed phase that a test with the given state or parity observes; -1 when it has not
// completed.
int64_t observed_phase(const Mbarrier& b, const MbarOp& x, uint64_t operand) {
  uint64_t parity = x.parity ? operand & 1 : operand >> 62 & 1;
  return (b.phase & 1) != parity ? static_cast<int64_t>(b.phase) - 1 : -1;
}

Status op_wait(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  uint32_t ok = 0;
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t a = addr_of(w, i, x, l);
    own_cta(w, a, x.try_wait ? "mbarrier.try_wait" : "mbarrier.test_wait");
    uint64_t operand = x.parity ? w.cell<uint32_t>(i.b)[l] : w.cell<uint64_t>(i.b)[l];
    if (x.parity && operand > 1)
      trap(w, Err::kIllegalInstruction,
           format("phase parity %llu: must be 0 or 1", (unsigned long long)operand));
    Mbarrier& b = mbar_at(w, a);
    int64_t phase = observed_phase(b, x, operand);
    if (sem::faulty(sem::Fault::kParity)) phase = static_cast<int64_t>(b.phase);
    bool done = phase >= 0 || (b.phase & 1) != (x.parity ? operand & 1 : operand >> 62 & 1);
    ok |= static_cast<uint32_t>(done) << l;
    if (watched(w)) {
      for (Observer* o : *w.cl->observers) {
        if (done && phase >= 0) {
          o->on_wait(w.agent, ref(w, a), static_cast<uint64_t>(phase), x.order, w.site());
        } else if (!done) {
          o->on_wait_failed(w.agent, ref(w, a), b.phase, w.site());
        }
      }
    }
    if (!done && (r & (r - 1)) == 0) {
      w.last_wait_addr = a;
      w.last_wait_phase = b.phase;
    }
  }
  set_pred(w, i.d, m, ok);
  if (ok != m) {
    if (w.last_wait_addr) {
      w.wait_kernel_pc = w.pc();
      w.failed_wait = true;
    }
    return Status::kYield;
  }
  w.failed_wait = false;
  return Status::kNext;
}

Status op_pending(Warp& w, const Insn& i, uint32_t m) {
  uint32_t* d = w.cell<uint32_t>(i.d);
  const uint64_t* a = w.cell<uint64_t>(i.a);
  lanes(m, [=](int l) { d[l] = static_cast<uint32_t>(a[l] & 0xfffff); });
  return Status::kNext;
}

// cp.async.mbarrier.arrive: arrives once all prior cp.async of the lane are complete.
Status op_cp_arrive(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const MbarOp*>(i.x);
  for (uint32_t r = m; r; r &= r - 1) {
    int l = __builtin_ctz(r);
    uint32_t a = addr_of(w, i, x, l);
    std::vector<AsyncPtr> before;
    for (auto& g : w.cp_async[l].committed) before.insert(before.end(), g.begin(), g.end());
    before.insert(before.end(), w.cp_async[l].open.begin(), w.cp_async[l].open.end());
    if (!i.aux) {
      // Without .noinc the pending count grows by one, so that the arrival is neutral to the
      // expected count.
      Mbarrier& b = mbar_at(w, a);
      ++b.pending;
      write_back(w, a, b);
    }
    AsyncPtr op = new_async(w, AgentKind::kCpAsyncArrive);
    AsyncOp* raw = op.get();
    Warp* wp = &w;
    op->run = [wp, raw, a, before] {
      for (auto& b : before) {
        force(*b);
        if (watched(*wp)) {
          for (Observer* o : *wp->cl->observers) o->on_join(raw->agent, b->agent, Join::kFull);
        }
      }
      mbar_arrive(*wp, raw->agent, a, 1, 0, Order::kRelease, raw->site);
    };
    pool_add(w, op);
  }
  return Status::kNext;
}

}  // namespace

void low_mbar_init(Lower& L) {
  MbarOperand bar = mbar_operand(L, 0);
  emit(L, op_init, bar, L.src(1, kU32));
}

void low_mbar_inval(Lower& L) { emit(L, op_inval, mbar_operand(L, 0)); }

void low_mbar_expect(Lower& L) {
  MbarOperand bar = mbar_operand(L, 0);
  emit(L, op_expect, bar, L.src(1, kU32)).aux = L.has("complete_tx");
}

void low_mbar_arrive(Lower& L) {
  bool expect = L.has("expect_tx");
  // state, [addr], n   or   [addr], n   (state may be the sink)
  size_t at = L.op(0).kind == Operand::kAddr ? 0 : 1;
  if (at + 1 + (expect ? 1 : 0) > L.count() || (expect && at + 2 != L.count()))
    L.fail("wrong number of operands");
  MbarOperand bar = mbar_operand(L, at);
  uint32_t d = 0;
  if (at == 1 && !L.is_sink(0)) d = L.dst(0, kU64);
  if (d && L.has("shared::cluster")) L.fail("a shared::cluster arrive returns no state");
  bar.x->order = L.has("relaxed") ? Order::kRelaxed : Order::kRelease;
  bar.x->scope = L.has("cluster") ? Scope::kCluster : Scope::kCta;
  if (at + 1 < L.count()) (expect ? bar.x->tx : bar.x->count) = L.src(at + 1, kU32);
  bar.x->drop = L.has("arrive_drop");
  bar.x->no_complete = L.has("noComplete");
  emit(L, op_arrive, bar, 0, d);
}

void low_mbar_cp_arrive(Lower& L) {
  emit(L, op_cp_arrive, mbar_operand(L, 0)).aux = L.has("noinc");
}

void low_mbar_wait(Lower& L) {
  MbarOperand bar = mbar_operand(L, 1);
  bar.x->parity = L.has("parity");
  bar.x->try_wait = L.has("try_wait");
  bar.x->order = L.has("relaxed") ? Order::kRelaxed : Order::kAcquire;
  bar.x->scope = L.has("cluster") ? Scope::kCluster : Scope::kCta;
  uint32_t b = L.src(2, bar.x->parity ? kU32 : kU64), d = L.dst(0, kPred);
  if (L.count() == 4) L.src(3, kU32);  // the suspend time hint
  emit(L, op_wait, bar, b, d);
}

void low_mbar_pending(Lower& L) {
  uint32_t a = L.src(1, kU64), d = L.dst(0, kU32);
  Insn& i = L.emit(op_pending);
  i.d = d;
  i.a = a;
}

}  // namespace ptxsim
