// SPDX-License-Identifier: Apache-2.0
// Barriers and fences (PTX ISA 9.7.13.1-9.7.13.4, 9.7.13.13).
#include "memory.h"
#include "warp_sync.h"

namespace ptxsim {
namespace {

const Type kU32{'u', 32, 1};
const Type kPred{'p', 1, 1};

struct BarOp : Extra {
  bool aligned = true;
  uint32_t id = 0;     // cells
  uint32_t count = 0;  // 0 = all threads
  uint8_t kind = 0;    // 0 sync, 1 arrive, 2 red.popc, 3 red.and, 4 red.or
  uint32_t pred = 0;
  bool not_pred = false;
};

uint32_t live_threads(const Cta& cta) {
  uint32_t n = 0;
  for (auto& w : cta.warps) n += static_cast<uint32_t>(__builtin_popcount(w.live));
  return n;
}

BarrierRef named_ref(const Warp& w, uint32_t id) {
  BarrierRef r;
  r.kind = BarrierKind::kNamed;
  r.owner = w.cta->key;
  r.index = id;
  return r;
}

void complete_if_full(Warp& w, NamedBarrier& b, uint32_t id) {
  uint32_t expected = b.all ? live_threads(*w.cta) : b.expected;
  if (b.arrived < expected || b.arrived == 0) return;
  uint64_t phase = b.phase++;
  b.done_and = b.red_and;
  b.done_or = b.red_or;
  b.done_popc = b.red_popc;
  b.red_and = 1;
  b.red_or = b.red_popc = 0;
  b.arrived = b.expected = 0;
  b.all = false;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_phase_complete(named_ref(w, id), phase);
  }
}

Status op_bar(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const BarOp*>(i.x);
  Split& s = w.split();
  int lane = __builtin_ctz(m);
  uint32_t id = w.cell<uint32_t>(x.id)[lane];
  if (id > 15)
    trap(w, Err::kIllegalInstruction, format("barrier number %u: allowed are 0 .. 15", id));
  NamedBarrier& b = w.cta->barriers[id];
  if (s.stage == 0) {
    if (x.aligned && !converged(w, kFull)) return Status::kConverge;
    uint32_t count = x.count ? w.cell<uint32_t>(x.count)[lane] : 0;
    if (x.count && (count == 0 || count % 32)) {
      trap(w, Err::kIllegalInstruction,
           format("barrier %u: thread count %u is not a positive multiple of 32", id, count));
    }
    bool first = b.arrived == 0;
    if (first) {
      b.all = !x.count;
      b.expected = count;
    } else if (b.all != !x.count || (x.count && b.expected != count)) {
      trap(w, Err::kLaunchFailure,
           format("barrier %u: this warp names %u threads, an earlier one %u (0 = all)", id, count,
                  b.expected));
    }
    uint32_t arrivals = static_cast<uint32_t>(__builtin_popcount(m));
    if (x.count && m == w.live) arrivals = 32;  // whole warps count as 32
    b.arrived += arrivals;
    if (x.count && b.arrived > b.expected) {
      trap(w, Err::kLaunchFailure,
           format("barrier %u: more threads than the %u expected", id, b.expected));
    }
    if (x.kind >= 2) {
      uint32_t p = *w.cell<uint32_t>(x.pred);
      if (x.not_pred) p = ~p;
      b.red_popc += static_cast<uint32_t>(__builtin_popcount(p & m));
      b.red_and &= (p & m) == m;
      b.red_or |= (p & m) != 0;
    }
    w.cl->progress = true;
    s.stage = 1;
    s.key = b.phase;
    if (watched(w)) {
      for (Observer* o : *w.cl->observers) {
        o->on_arrive(w.agent, named_ref(w, id), b.phase, arrivals, 0, Order::kAcqRel, w.site(), m);
      }
    }
    complete_if_full(w, b, id);
    if (x.kind == 1) {
      s.stage = 0;
      return Status::kNext;
    }
    ++b.waiting;
  }
  if (b.phase == s.key) return Status::kBlock;
  --b.waiting;
  s.stage = 0;
  if (x.kind >= 2 && i.d) {
    uint32_t v = x.kind == 2 ? b.done_popc : x.kind == 3 ? b.done_and : b.done_or;
    if (x.kind == 2) {
      uint32_t* d = w.cell<uint32_t>(i.d);
      lanes(m, [=](int l) { d[l] = v; });
    } else {
      set_pred(w, i.d, m, v ? kFull : 0);
    }
  }
  if (watched(w)) {
    for (Observer* o : *w.cl->observers)
      o->on_wait(w.agent, named_ref(w, id), s.key, Order::kAcqRel, w.site());
  }
  return Status::kNext;
}

Status op_bar_warp(Warp& w, const Insn& i, uint32_t m) {
  uint32_t members = w.cell<uint32_t>(i.a)[__builtin_ctz(m)];
  require_members(w, m, members);
  if (!converged(w, members)) return Status::kConverge;
  return Status::kNext;
}

BarrierRef cluster_ref(const Warp& w) {
  BarrierRef r;
  r.kind = BarrierKind::kCluster;
  r.owner = w.cl->key;
  return r;
}

void complete_cluster(Warp& w) {
  ClusterBarrier& b = w.cl->barrier;
  if (b.arrived == 0 || b.arrived < w.cl->live_threads) return;
  uint64_t phase = b.phase++;
  b.arrived = 0;
  w.cl->progress = true;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_phase_complete(cluster_ref(w), phase);
  }
}

// aux: 1 wait, 2 aligned, 4 relaxed.
Status op_cluster(Warp& w, const Insn& i, uint32_t m) {
  ClusterBarrier& b = w.cl->barrier;
  Split& s = w.split();
  if (s.stage == 0 && (i.aux & 2) && !converged(w, kFull)) return Status::kConverge;
  if (!(i.aux & 1)) {
    if (w.cluster_arrived & m)
      trap(w, Err::kLaunchFailure, "barrier.cluster.arrive twice without barrier.cluster.wait");
    w.cluster_arrived |= m;
    w.cluster_phase = b.phase;
    b.arrived += static_cast<uint32_t>(__builtin_popcount(m));
    w.cl->progress = true;
    if (watched(w)) {
      Order order = (i.aux & 4) ? Order::kRelaxed : Order::kRelease;
      for (Observer* o : *w.cl->observers) {
        o->on_arrive(w.agent, cluster_ref(w), b.phase, static_cast<uint32_t>(__builtin_popcount(m)),
                     0, order, w.site(), m);
      }
    }
    complete_cluster(w);
    return Status::kNext;
  }
  if ((w.cluster_arrived & m) != m)
    trap(w, Err::kLaunchFailure, "barrier.cluster.wait without barrier.cluster.arrive");
  if (b.phase == w.cluster_phase) return Status::kBlock;
  w.cluster_arrived &= ~m;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers)
      o->on_wait(w.agent, cluster_ref(w), w.cluster_phase, Order::kAcquire, w.site());
  }
  return Status::kNext;
}

struct FenceOp : Extra {
  Fence fence = Fence::kThread;
  Order order = Order::kAcqRel;
  Scope scope = Scope::kNone;
};

Status op_fence(Warp& w, const Insn& i, uint32_t m) {
  auto& x = *static_cast<const FenceOp*>(i.x);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (watched(w)) {
    for (Observer* o : *w.cl->observers)
      o->on_fence(w.agent, x.fence, x.order, x.scope, w.site(), m);
  }
  return Status::kNext;
}

}  // namespace

void named_barriers_after_exit(Warp& w) {
  for (uint32_t id = 0; id < 16; ++id) {
    NamedBarrier& b = w.cta->barriers[id];
    if (b.all && b.arrived) complete_if_full(w, b, id);
  }
  complete_cluster(w);
}

void low_bar(Lower& L) {
  auto* x = L.extra<BarOp>();
  x->aligned = L.s->op == "bar" || L.has("aligned");
  bool red = L.has("red");
  size_t at = red ? 1 : 0;
  x->kind = L.has("sync") ? 0 : L.has("arrive") ? 1 : L.has("popc") ? 2 : L.has("and") ? 3 : 4;
  x->id = L.src(at, kU32);
  size_t n = L.count();
  if (red) {
    // red d, a {, b}, p
    x->pred = L.pred(L.op(n - 1), &x->not_pred);
    if (n == 4) x->count = L.src(2, kU32);
  } else if (n == 2) {
    x->count = L.src(1, kU32);
  }
  uint32_t d = red ? L.dst(0, x->kind == 2 ? kU32 : kPred) : 0;
  Insn& i = L.emit(op_bar);
  i.d = d;
  i.x = x;
  i.flags |= kBlocking;
}

void low_bar_warp(Lower& L) {
  uint32_t a = L.src(0, kU32);
  Insn& i = L.emit(op_bar_warp);
  i.a = a;
  i.flags |= kBlocking;
}

void low_barrier_cluster(Lower& L) {
  Insn& i = L.emit(op_cluster);
  i.aux = static_cast<uint16_t>((L.has("wait") ? 1 : 0) | (L.has("aligned") ? 2 : 0) |
                                (L.has("relaxed") ? 4 : 0));
  i.flags |= kBlocking;
}

void low_membar(Lower& L) {
  auto* x = L.extra<FenceOp>();
  x->order = L.has("sc")           ? Order::kSeqCst
             : L.has("acquire")    ? Order::kAcquire
             : L.has("release")    ? Order::kRelease
             : L.s->op == "membar" ? Order::kSeqCst
                                   : Order::kAcqRel;
  x->scope = scope_of(L);
  if (L.has("mbarrier_init")) {
    x->fence = Fence::kMbarrierInit;
    x->scope = Scope::kCluster;
  } else if (L.has("proxy")) {
    if (L.has("alias")) {
      x->fence = Fence::kProxyAlias;
    } else if (L.has("async::shared::cta") || L.has("async::shared::cluster") ||
               L.has("shared::cta") || L.has("shared::cluster")) {
      x->fence = Fence::kProxyAsyncShared;
    } else if (L.has("async::global") || L.has("async.global") || L.has("global")) {
      x->fence = Fence::kProxyAsyncGlobal;
    } else {
      x->fence = Fence::kProxyAsync;
    }
  }
  L.emit(op_fence).x = x;
}

void low_fence_tensormap(Lower& L) {
  auto* x = L.extra<FenceOp>();
  x->fence = Fence::kProxyTensormap;
  x->order = order_of(L);
  x->scope = scope_of(L);
  L.emit(op_fence).x = x;
}

void trigger_dependents(Cta& cta) {
  if (cta.triggered) return;
  cta.triggered = true;
  ++cta.cl->grid->triggered;
  cta.cl->progress = true;
}

namespace {

Status op_launch_dependents(Warp& w, const Insn&, uint32_t) {
  if (!w.cl->grid->in_chain) return Status::kNext;
  trigger_dependents(*w.cta);
  return Status::kPause;  // what follows may come after the dependent's first instructions
}

Status op_grid_wait(Warp& w, const Insn&, uint32_t) {
  const Grid* before = w.cl->grid->prerequisite;
  if (before && !before->complete) return Status::kBlock;
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_grid_wait(w.agent, w.site());
  }
  return Status::kNext;
}

}  // namespace

void low_griddep(Lower& L) {
  L.emit(L.has("wait") ? op_grid_wait : op_launch_dependents).flags |= kBlocking;
}

}  // namespace ptxsim
