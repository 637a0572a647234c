// SPDX-License-Identifier: Apache-2.0
// Events that carry happens-before edges (PTX ISA 8.9.4, 8.9.5, 9.7.13.15, 9.7.16.6).
#include "race.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "race_detector.h"

namespace ptxsim {

RaceOptions RaceOptions::parse(const std::string& text) {
  RaceOptions o;
  size_t at = 0;
  while (at <= text.size()) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string word = text.substr(at, end - at);
    at = end + 1;
    if (word.empty()) continue;
    if (word == "strict") {
      o.strict_tcgen = o.strict_init = o.strict_complete_tx = true;
      o.strict_atomics = true;
    } else if (word == "strict-tcgen") {
      o.strict_tcgen = true;
    } else if (word == "strict-init") {
      o.strict_init = true;
    } else if (word == "strict-complete-tx") {
      o.strict_complete_tx = true;
    } else if (word == "strict-atomics") {
      o.strict_atomics = true;
    } else if (word == "war-fence") {
      o.war_fence = true;
    } else if (word == "tmem-at-issue") {
      o.tmem_at_issue = true;
    } else if (word == "path-fence") {
      o.path_fence = true;
    } else if (word.compare(0, 10, "shadow-mb=") == 0 && word.size() > 10 && word.size() < 17 &&
               word.find_first_not_of("0123456789", 10) == std::string::npos) {
      o.shadow_limit = static_cast<size_t>(std::stoul(word.substr(10))) << 20;
    } else {
      throw std::invalid_argument("race option '" + word +
                                  "': allowed are strict, strict-tcgen, strict-init, "
                                  "strict-complete-tx, strict-atomics, war-fence, "
                                  "path-fence, tmem-at-issue, shadow-mb=N");
    }
  }
  return o;
}

std::unique_ptr<Observer> make_race_detector(const RaceOptions& options) {
  return std::unique_ptr<Observer>(new race::Detector(options));
}

Observer* make_race_watcher() {
  RaceOptions options;
  if (const char* text = std::getenv("PTXSIM_RACE")) {
    try {
      options = RaceOptions::parse(text);
    } catch (const std::invalid_argument& e) {
      std::fprintf(stderr, "ptxsim: PTXSIM_RACE: %s; the option is ignored\n", e.what());
    }
  }
  return make_race_detector(options).release();
}

namespace race {
void Detector::on_launch_begin(const LaunchInfo& info, Reporter* reporter) {
  reporter_ = reporter;
  number_ = info.number;
  seen_.clear();
  reports_ = 0;
  region_key_ = ~0ull;
  if (info.dependent) {
    launch_agents_[info.number] = info.first_agent;
    launch_ctas_[info.number] = info.cta_base;
    // Of the launches before, the primary is the one that this launch may overlap; its own primary
    // is taken as complete.
    auto primary = launch_agents_.find(info.number - 1);
    if (primary != launch_agents_.end()) forget_before(primary->second);
    return;
  }
  launch_agents_ = {{info.number, info.first_agent}};
  launch_ctas_ = {{info.number, info.cta_base}};
  waited_.clear();
  first_agent_ = 0;
  agents_.clear();
  slots_.clear();
  ctas_.clear();
  cta_at_.clear();
  barriers_.clear();
  releases_.clear();
  cp_async_slots_.clear();
  global_.clear();
}

void Detector::forget_before(AgentId first) {
  if (first <= first_agent_) return;
  global_.each([&](Cell& cell) {
    for (uint32_t k = 0; k < cell.size();) {
      if (cell[k].agent < first) {
        cell.erase(k);
      } else {
        ++k;
      }
    }
  });
  size_t drop = std::min<size_t>(first - first_agent_, agents_.size());
  agents_.erase(agents_.begin(), agents_.begin() + static_cast<long>(drop));
  first_agent_ = first;
}

void Detector::on_launch_end(const LaunchInfo&) {
  if (global_.full() && reporter_) {
    reporter_->report("race",
                      "note: the shadow memory limit was reached; part of global memory was not "
                      "checked (option shadow-mb)",
                      false);
  }
  // What the launch did stays known until the next one begins: that may be a dependent.
  region_key_ = ~0ull;
}

// A component of the clocks for "launch `number` of the chain is complete and visible".
static Slot grid_slot(uint32_t number) { return Slot{0x80000000u + number, 0}; }

bool Detector::launch_known(uint32_t number, const View& v) const {
  return v.k->hb.get(grid_slot(number)) >= 1;
}

// griddepcontrol.wait blocks until the primary is complete and its memory operations are visible
// (9.7.13.13). The primary's own primary was complete before, if the primary waited for it.
void Detector::on_grid_wait(AgentId id, const Site&) {
  AgentState* a = find(id);
  if (!a || !a->warp) return;
  uint32_t number = a->info.launch;
  waited_.insert(number);
  for (uint32_t n = number; n > 0 && waited_.count(n); --n)
    mut(&a->warp->k).hb.raise(grid_slot(n - 1), 1);
}

void Detector::on_cta_begin(uint32_t cluster, uint32_t cta, uint32_t rank, uint64_t smem_addr,
                            uint32_t smem_size) {
  CtaState& c = ctas_[cta];
  c.cluster = cluster;
  c.rank = rank;
  c.smem_addr = smem_addr;
  c.smem_size = smem_size;
  uint64_t end = (smem_addr & 0xffffff) + smem_size;
  c.smem.reset(new Region(static_cast<uint32_t>((end + kCellUnits - 1) / kCellUnits)));
  c.tmem.reset();
  cta_at_[smem_addr >> 24] = cta;
  region_key_ = ~0ull;
}

void Detector::on_cta_end(uint32_t, uint32_t cta) {
  auto it = ctas_.find(cta);
  if (it == ctas_.end()) return;
  uint64_t place = it->second.smem_addr >> 24;
  for (auto b = barriers_.begin(); b != barriers_.end();) {
    bool mine = std::get<0>(b->first) == BarrierKind::kMbarrier
                    ? std::get<1>(b->first) >> 24 == place
                : std::get<0>(b->first) == BarrierKind::kNamed ? std::get<1>(b->first) == cta
                                                               : false;
    b = mine ? barriers_.erase(b) : std::next(b);
  }
  cta_at_.erase(place);
  ctas_.erase(it);
  region_key_ = ~0ull;
}

AgentState* Detector::find(AgentId id) {
  if (id < first_agent_ || id - first_agent_ >= agents_.size()) return nullptr;
  AgentState& a = agents_[id - first_agent_];
  return a.info.id ? &a : nullptr;
}

Knowledge& Detector::mut(Shared* k) {
  if (k->use_count() > 1) *k = std::make_shared<Knowledge>(**k);
  return **k;
}

View Detector::view(const AgentState& a) const {
  View v;
  v.agent = &a;
  if (a.warp) {
    v.k = a.warp->k.get();
    v.own = a.warp->slot;
    v.own_tick = a.warp->now;
  } else if (a.op) {
    v.k = a.op->k.get();
    v.own = a.op->parent_slot;
    v.own_tick = a.op->parent_tick;
    v.pipe = a.op->pipe;
    v.pipe_tick = a.op->pipe_tick;
  }
  return v;
}

void Detector::on_agent_begin(const AgentInfo& info) {
  size_t at = info.id - first_agent_;
  if (agents_.size() <= at) agents_.resize(std::max<size_t>(at + 1, agents_.size() * 3 / 2));
  AgentState& a = agents_[at];
  a = AgentState();
  a.info = info;
  if (info.kind == AgentKind::kWarp) {
    a.warp.reset(new WarpState());
    a.slot = a.warp->slot = new_slot(info.cluster);
    auto cta = ctas_.find(info.cta);
    if (cta != ctas_.end()) cta->second.warps.push_back(info.id);
    return;
  }
  a.op.reset(new OpState());
  AgentState* p = find(info.parent);
  if (!p || !p->warp) {
    a.op->k = std::make_shared<Knowledge>();
    return;
  }
  WarpState& w = *p->warp;
  a.op->k = w.k;
  a.op->parent_slot = w.slot;
  // CUTLASS issues bulk stores with all lanes of a warp: the hardware sees one instruction, PTX 32
  // identical copies. Copies of one instruction with nothing in between do not race with each
  // other.
  const AgentState* last = w.last_op && w.last_op_tick == w.now ? find(w.last_op) : nullptr;
  bool same = last && last->info.kind == info.kind && last->info.site.pc == info.site.pc;
  a.group = same ? last->group : info.id;
  a.op->parent_tick = w.now++;
  w.last_op = info.id;
  w.last_op_tick = w.now;
  if (options_.tmem_at_issue &&
      (info.kind == AgentKind::kTcgenLd || info.kind == AgentKind::kTcgenSt)) {
    a.alts.push_back({w.slot, w.now, false, ~0u});
    mut(&w.k).tmem.raise(w.slot, w.now);
    ++w.now;
  }
  if (is_pipe_kind(info.kind)) {
    if (!w.pipe.valid()) w.pipe = new_slot(info.cluster);
    a.op->pipe = w.pipe;
    a.op->pipe_tick = ++w.pipe_seq;
    a.alts.push_back({w.pipe, w.pipe_seq, false, ~0u});
  }
  check_wgmma_fence(a, w);
}

// Register accesses raise no events, so only the fence before the first wgmma of a warp is checked
// (9.7.15.7.1).
void Detector::check_wgmma_fence(const AgentState& a, const WarpState& w) {
  if (a.info.kind != AgentKind::kWgmma || w.wgmma_fenced || !reporter_) return;
  report(Missing::kWgmmaFence, a.info.site.pc, a.info.site.pc, 0,
         agent_text(a.info.id) +
             " without any wgmma.fence before it by a warp of the warpgroup\n  at " +
             reporter_->describe(a.info.site) +
             "\n  needed: wgmma.fence.sync.aligned before the first wgmma.mma_async",
         true);
}

void Detector::on_agent_end(AgentId id) {
  if (AgentState* a = find(id)) {
    a->op.reset();
    a->warp.reset();
  }
}

// The pipe of one issuer is in order by construction (see on_agent_begin); an edge between two
// issuers is what tcgen05.fence and barriers have to establish, so an order of the model's queue
// proves nothing and is dropped.
void Detector::on_order(AgentId before, AgentId after) {
  AgentState *b = find(before), *a = find(after);
  if (!a || !b || !a->op) return;
  if (b->warp) {
    // One more issuer: wgmma is issued by the four warps of a warpgroup.
    if (before == a->info.parent) return;
    WarpState& w = *b->warp;
    Knowledge& k = mut(&a->op->k);
    k.hb.join(w.k->hb);
    for (int s = 0; s < kFenceSpaces; ++s) k.fenced[s].join(w.k->fenced[s]);
    k.init.join(w.k->init);
    k.init_seen.join(w.k->init_seen);
    k.hb.raise(w.slot, w.now++);
    check_wgmma_fence(*a, w);
    return;
  }
  if (b->info.parent != a->info.parent || is_pipe_kind(a->info.kind)) return;
  for (const Alt& alt : b->alts) {
    if (alt.reads_only) continue;
    Knowledge& k = mut(&a->op->k);
    k.hb.raise(alt.slot, alt.tick);
    k.tmem.raise(alt.slot, alt.tick);
  }
}

void Detector::on_join(AgentId joiner, AgentId op, Join what) {
  AgentState *j = find(joiner), *o = find(op);
  if (!j || !o) return;
  if (j->warp) {
    WarpState& w = *j->warp;
    o->alts.push_back({w.slot, w.now, what == Join::kRead, ~0u});
    // The joiner's own later tcgen05 operations are ordered behind it without a fence.
    if (what == Join::kFull) mut(&w.k).tmem.raise(w.slot, w.now);
    ++w.now;
  } else if (j->op) {
    j->op->joined.push_back(op);
  }
}

Detector::BarrierKey Detector::key_of(const BarrierRef& b) {
  if (b.kind == BarrierKind::kMbarrier) return {b.kind, b.addr, 0};
  return {b.kind, b.owner, b.kind == BarrierKind::kCluster ? 0 : b.index};
}

void Detector::on_barrier_init(AgentId id, const BarrierRef& b, uint32_t, const Site& site) {
  AgentState* a = find(id);
  if (!a || !a->warp) return;
  BarrierState& s = barriers_[key_of(b)];
  s = BarrierState();
  s.addr = b.addr;
  s.slot = new_slot(a->info.cluster);
  s.init_by = id;
  s.init_slot = a->warp->slot;
  s.init_tick = a->warp->now;
  s.init_site = site;
  mut(&a->warp->k).init_seen.raise(s.init_slot, s.init_tick);
}

void Detector::on_barrier_inval(AgentId id, const BarrierRef& b, const Site& site) {
  auto it = barriers_.find(key_of(b));
  if (it == barriers_.end()) return;
  if (AgentState* a = find(id)) check_init(a, &it->second, site, false);
  barriers_.erase(it);
}

// Any operation on an mbarrier must come after its init: through causality order, or, for the init
// alone, through fence.mbarrier_init and a barrier of any memory order (9.7.13.4).
void Detector::check_init(AgentState* a, BarrierState* b, const Site& site, bool bulk) {
  if (!b->init_by) return;
  View v = view(*a);
  if (!v.k || b->init_by == a->info.id) return;
  bool hb = known(b->init_slot, b->init_tick, v);
  bool fence = v.k->init.get(b->init_slot) >= b->init_tick;
  bool own = a->info.parent == b->init_by;
  if (!hb && !fence) {
    report(Missing::kMbarrierInit, b->init_site.pc, site.pc, 0,
           "the mbarrier at " + place_text(Space::kShared, b->addr, 0xff) + " is used by " +
               agent_text(a->info.id) + " before its init by " + agent_text(b->init_by) +
               " is visible there\n  init: " + reporter_->describe(b->init_site) +
               "\n  use:  " + reporter_->describe(site) +
               "\n  needed: a barrier between them, or fence.mbarrier_init.release.cluster before "
               "a relaxed barrier.cluster.arrive",
           options_.strict_init || v.k->init_seen.get(b->init_slot) < b->init_tick);
  } else if (bulk && !fence && !own) {
    report(Missing::kInitFence, b->init_site.pc, site.pc, 0,
           "the mbarrier at " + place_text(Space::kShared, b->addr, 0xff) + " is signalled by " +
               agent_text(a->info.id) +
               ", but no fence.mbarrier_init or fence.proxy.async follows its init by " +
               agent_text(b->init_by) + "\n  init: " + reporter_->describe(b->init_site) +
               "\n  use:  " + reporter_->describe(site),
           options_.strict_init);
  }
}

void Detector::arrive_warp(WarpState* w, Payload* p, bool release) {
  if (release) {
    p->released.join(*w->k);
    p->released.hb.raise(w->slot, w->now);
  } else if (w->fence_k) {
    p->released.join(*w->fence_k);
    p->released.hb.raise(w->slot, w->fence_tick);
  }
  p->init.join(w->k->init);
  p->init_seen.join(w->k->init_seen);
  p->tmem.join(w->tmem_published);
  p->piped.join(w->piped_published);
  p->touch();
  ++w->now;
}

// Signals of asynchronous operations. A complete_tx speaks for its own copy only (8.9.1.1),
// cp.async.mbarrier.arrive for the copies before it, tcgen05.commit for the tcgen05 operations of
// the thread and all that these were ordered behind.
void Detector::arrive_op(AgentState* a, BarrierState* b, Payload* p, uint64_t phase, bool mbarrier,
                         uint32_t place) {
  OpState& o = *a->op;
  if (a->info.kind == AgentKind::kTcgenCommit) {
    p->released.join(*o.k);
    if (o.parent_slot.valid()) p->released.hb.raise(o.parent_slot, o.parent_tick);
    if (o.pipe.valid()) {
      p->released.hb.raise(o.pipe, o.pipe_tick);
      p->tmem.raise(o.pipe, o.pipe_tick);
      p->tmem.raise(o.parent_slot, o.parent_tick);
      p->piped.raise(o.pipe, o.pipe_tick);
    }
    p->tmem.join(o.k->tmem);
    p->piped.join(o.k->piped);
    p->touch();
    return;
  }
  if (!mbarrier) return;
  Alt alt{b->slot, static_cast<Tick>(phase + 1), false, place};
  if (a->info.kind == AgentKind::kCpAsyncArrive) {
    if (!b->for_cp_async) {
      b->for_cp_async = true;
      cp_async_slots_[b->slot.cluster].push_back(b->slot);
    }
    for (AgentId id : o.joined) {
      if (AgentState* c = find(id)) c->alts.push_back(alt);
    }
  } else {
    a->alts.push_back(alt);
  }
}

void Detector::on_arrive(AgentId id, const BarrierRef& ref, uint64_t phase, uint32_t count,
                         int64_t tx, Order order, const Site& site, uint32_t) {
  if (ref.kind == BarrierKind::kWarp) return;
  AgentState* a = find(id);
  if (!a) return;
  bool mbarrier = ref.kind == BarrierKind::kMbarrier;
  auto it = barriers_.find(key_of(ref));
  if (it == barriers_.end()) {
    if (mbarrier) return;
    it = barriers_.emplace(key_of(ref), BarrierState()).first;
  }
  BarrierState& b = it->second;
  if (mbarrier)
    check_init(a, &b, site,
               a->info.kind == AgentKind::kBulkLoad || a->info.kind == AgentKind::kBulkStore);
  Payload& p = b.phases[phase];
  if (a->warp) {
    // mbarrier.complete_tx "simulates the completion of an asynchronous operation", whose signal is
    // a release, yet it has no form but .relaxed. CUTLASS publishes a scheduler response with it.
    bool simulated = mbarrier && count == 0 && tx < 0 && !options_.strict_complete_tx;
    arrive_warp(a->warp.get(), &p, releases(order) || simulated);
  } else if (a->op) {
    arrive_op(a, &b, &p, phase, mbarrier, static_cast<uint32_t>(ref.addr >> 24));
  }
}

void Detector::on_phase_complete(const BarrierRef& ref, uint64_t phase) {
  if (ref.kind == BarrierKind::kWarp) return;
  auto it = barriers_.find(key_of(ref));
  if (it == barriers_.end()) return;
  BarrierState& b = it->second;
  if (ref.kind == BarrierKind::kMbarrier) {
    // Arrivals are atomic operations on the object, so a wait observes all arrivals up to its phase
    // (8.9.2).
    auto p = b.phases.find(phase);
    if (p != b.phases.end()) {
      b.done.join(p->second);
      b.phases.erase(p);
    }
    b.done.released.hb.raise(b.slot, static_cast<Tick>(phase + 1));
    b.done.touch();
  } else {
    b.phases.erase(b.phases.begin(),
                   b.phases.lower_bound(phase));  // everybody has left the phases before this one
  }
}

void Detector::wait_payload(WarpState* w, const Payload& p, bool acquire) {
  if (w->last_join == &p && w->last_version == p.version) return;
  w->last_join = acquire ? &p : nullptr;
  w->last_version = p.version;
  if (acquire) {
    p.released.into(&mut(&w->k));
  } else {
    w->pending.join(p.released);
  }
  if (!p.init_seen.empty()) {
    Knowledge& k = mut(&w->k);
    k.init.join(p.init);
    k.init_seen.join(p.init_seen);
  }
  w->tmem_pending.join(p.tmem);
  w->piped_pending.join(p.piped);
}

void Detector::on_wait(AgentId id, const BarrierRef& ref, uint64_t phase, Order order,
                       const Site& site) {
  if (ref.kind == BarrierKind::kWarp) return;
  AgentState* a = find(id);
  auto it = barriers_.find(key_of(ref));
  if (!a || !a->warp || it == barriers_.end()) return;
  BarrierState& b = it->second;
  if (ref.kind == BarrierKind::kMbarrier) {
    check_init(a, &b, site, false);
    wait_payload(a->warp.get(), b.done, acquires(order));
  } else {
    auto p = b.phases.find(phase);
    if (p != b.phases.end()) wait_payload(a->warp.get(), p->second, acquires(order));
  }
}

void Detector::on_wait_failed(AgentId id, const BarrierRef& ref, uint64_t, const Site& site) {
  if (ref.kind != BarrierKind::kMbarrier) return;
  AgentState* a = find(id);
  auto it = barriers_.find(key_of(ref));
  if (a && it != barriers_.end()) check_init(a, &it->second, site, false);
}

void Detector::release_fence(WarpState* w, Scope scope) {
  w->fence_k = w->k;
  w->fence_tick = w->now++;
  w->fence_scope = scope == Scope::kNone ? Scope::kGpu : scope;
  w->fence_slot = w->slot;
}

void Detector::proxy_fence(AgentState* a, bool shared, bool global, uint32_t lanes) {
  WarpState* w = a->warp.get();
  a->fences.push_back({w->now, lanes, {shared, global}});
  Knowledge& k = mut(&w->k);
  for (int s = 0; s < 2; ++s) {
    if (!(s == kSharedSpace ? shared : global)) continue;
    Clock& f = k.fenced[s];
    if (options_.path_fence) f.join(k.hb);
    f.raise(w->slot, w->now);
    // cp.async writes of others, whose completion this warp has waited for: no thread can fence
    // them before that.
    for (Slot c : cp_async_slots_[w->slot.cluster]) {
      if (Tick t = k.hb.get(c)) f.raise(c, t);
    }
  }
  k.init.raise(w->slot, w->now);
  ++w->now;
}

void Detector::on_fence(AgentId id, Fence fence, Order order, Scope scope, const Site&,
                        uint32_t lanes) {
  AgentState* a = find(id);
  if (!a || !a->warp) return;
  WarpState& w = *a->warp;
  switch (fence) {
    case Fence::kThread:
      if (acquires(order) && !w.pending.empty()) {
        w.pending.into(&mut(&w.k));
        w.pending.clear();
      }
      if (releases(order)) release_fence(&w, scope);
      break;
    case Fence::kMbarrierInit:
      mut(&w.k).init.raise(w.slot, w.now);
      ++w.now;
      break;
    case Fence::kProxyAsync:
      proxy_fence(a, true, true, lanes);
      break;
    case Fence::kProxyAsyncShared:
      proxy_fence(a, true, false, lanes);
      break;
    case Fence::kProxyAsyncGlobal:
      proxy_fence(a, false, true, lanes);
      break;
    case Fence::kProxyAlias:
      break;
    case Fence::kProxyTensormap:
      // The acquiring side names the map, so its fence covers what it knows by then.
      if (order != Order::kRelease) {
        Knowledge& k = mut(&w.k);
        k.fenced[kTensormapSpace].join(k.hb);
        k.fenced[kTensormapSpace].raise(w.slot, w.now);
      }
      if (releases(order)) release_fence(&w, scope);
      ++w.now;
      break;
    case Fence::kTcgenBeforeSync:
      w.tmem_published.join(w.k->tmem);
      w.tmem_published.raise(w.slot, w.now);
      w.piped_published.join(w.k->piped);
      if (w.pipe.valid()) w.piped_published.raise(w.pipe, w.pipe_seq);
      ++w.now;
      break;
    case Fence::kTcgenAfterSync:
      if (!w.tmem_pending.empty() || !w.piped_pending.empty()) {
        Knowledge& k = mut(&w.k);
        k.tmem.join(w.tmem_pending);
        k.piped.join(w.piped_pending);
      }
      break;
    case Fence::kWgmma:
      w.wgmma_fenced = true;
      break;
  }
}

void Detector::on_alloc(Space space, uint64_t addr, uint64_t size, const char*) {
  if (space == Space::kGlobal) allocations_[addr] = size;
}

// The warp that frees columns must know every access to them. CUTLASS frees columns behind a
// tcgen05.ld without wait::ld, relying on the use of its registers: a note.
void Detector::check_dealloc(uint32_t cta, uint32_t column, uint32_t columns, const AgentState& by,
                             const Site& site) {
  CtaState& owner = ctas_.at(cta);
  View v = view(by);
  if (!v.k || !reporter_) return;
  uint32_t end = (column + columns + kCellUnits - 1) / kCellUnits;
  for (uint32_t lane = 0; lane < 128; ++lane) {
    for (uint32_t c = column / kCellUnits; c < end; ++c) {
      Cell* cell = owner.tmem->at(lane * 32 + c);
      uint64_t addr = static_cast<uint64_t>(cta) << 32 | lane << 16 | c * kCellUnits;
      for (uint32_t k = 0; cell && k < cell->size(); ++k) {
        const Record& r = (*cell)[k];
        if (ordered(r, v, Space::kTmem, addr)) continue;
        const AgentState& o = state(r.agent);
        bool pending = o.info.kind == AgentKind::kTcgenLd && o.alts.empty();
        auto key = std::make_tuple(static_cast<uint8_t>(Missing::kBarrier), r.pc, site.pc, -1);
        if (seen_.count(key)) continue;
        report(Missing::kBarrier, r.pc, site.pc, -1,
               "tcgen05.dealloc by " + agent_text(by.info.id) + " frees " +
                   place_text(Space::kTmem, addr, r.mask) + " before it is ordered behind the " +
                   access_text(r.write, false, Proxy::kGeneric) + " by " + agent_text(r.agent) +
                   "\n    " + reporter_->describe(Site{o.info.site.kernel, r.pc}) +
                   "\n  dealloc: " + reporter_->describe(site) +
                   "\n  needed: tcgen05.wait or commit and wait, then a barrier to the warp that "
                   "deallocates",
               !pending || options_.strict_tcgen);
      }
    }
  }
}

void Detector::on_free(Space space, uint64_t addr, uint64_t size, const char* how, AgentId by,
                       const Site& site) {
  if (space == Space::kGlobal) {
    allocations_.erase(addr);
  } else if (space == Space::kTmem) {
    auto it = ctas_.find(static_cast<uint32_t>(addr >> 32));
    if (it == ctas_.end() || !it->second.tmem) return;
    uint32_t column = addr & 0xffff;
    AgentState* warp = find(by);
    if (warp && how && !std::strcmp(how, "tcgen05.dealloc"))
      check_dealloc(it->first, column, static_cast<uint32_t>(size), *warp, site);
    for (uint32_t lane = 0; lane < 128; ++lane) {
      for (uint64_t c = column / kCellUnits; c < (column + size + kCellUnits - 1) / kCellUnits;
           ++c) {
        if (Cell* cell = it->second.tmem->at(lane * 32 + static_cast<uint32_t>(c))) cell->clear();
      }
    }
  }
}

}  // namespace race
}  // namespace ptxsim
