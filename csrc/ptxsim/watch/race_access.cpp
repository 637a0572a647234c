// SPDX-License-Identifier: Apache-2.0
// The check of one memory access against the shadow memory, and release/acquire through ordinary
// memory (PTX ISA 8.7.1, 8.8).
#include "race_detector.h"

namespace ptxsim {
namespace race {
namespace {

// Readers of one cell of global memory that are remembered; with more, the oldest is forgotten.
constexpr uint32_t kGlobalReaders = 8;
constexpr uint32_t kStrongRecords = 64;

Scope scope_or_default(Scope s) { return s == Scope::kNone ? Scope::kGpu : s; }

}  // namespace

bool Detector::known(Slot slot, Tick tick, const View& v) const {
  if (slot == v.own) return tick <= v.own_tick;
  if (v.pipe.valid() && slot == v.pipe && tick <= v.pipe_tick) return true;
  return v.k->hb.get(slot) >= tick;
}

// TMEM: tcgen05.fence on both sides of any synchronisation, or causality order of completed
// operations (9.7.16.6.3: "the standard memory consistency model synchronization mechanisms also
// apply").
bool Detector::known_tmem(Slot slot, Tick tick, const View& v, bool pipe_record) const {
  if (slot == v.own && tick <= v.own_tick) return true;
  if (v.pipe.valid() && slot == v.pipe && tick <= v.pipe_tick) return true;
  if (v.k->tmem.get(slot) >= tick) return true;
  if (pipe_record && v.pipe.valid() && v.k->piped.get(slot) >= tick) return true;
  return !options_.strict_tcgen && v.k->hb.get(slot) >= tick;
}

bool Detector::ordered(const Record& r, const View& v, Space space, uint64_t addr) const {
  if (r.agent == v.agent->info.id) return true;
  const AgentState& o = state(r.agent);
  uint32_t launch = v.agent->info.launch;
  if (o.info.launch != launch) return o.info.launch < launch && launch_known(o.info.launch, v);
  if (o.group && o.group == v.agent->group) return true;
  if (o.is_warp()) {
    return space == Space::kTmem ? known_tmem(o.slot, r.tick, v, false) : known(o.slot, r.tick, v);
  }
  // A copy into several CTAs signals the barrier of each; the one in the CTA of these bytes counts.
  bool local = false;
  if (space == Space::kShared && r.write && o.alts.size() > 1) {
    for (const Alt& alt : o.alts) local |= alt.place == static_cast<uint32_t>(addr >> 24);
  }
  bool pipe = is_pipe_kind(o.info.kind);
  for (const Alt& alt : o.alts) {
    if (alt.reads_only && r.write) continue;
    if (local && alt.place != ~0u && alt.place != static_cast<uint32_t>(addr >> 24)) continue;
    if (space == Space::kTmem ? known_tmem(alt.slot, alt.tick, v, pipe)
                              : known(alt.slot, alt.tick, v))
      return true;
  }
  return false;
}

bool Detector::scope_includes(Scope s, const AgentInfo& a, const AgentInfo& b) const {
  switch (s) {
    case Scope::kCta:
      return a.cta == b.cta;
    case Scope::kCluster:
      return a.cluster == b.cluster;
    default:
      return true;
  }
}

// Morally strong (8.7): both strong, same proxy, and each scope includes the other agent.
bool Detector::strong_pair(const Record& r, const Access& a, const AgentState& me) const {
  if (!r.strong || a.order == Order::kWeak) return false;
  const AgentInfo& other = state(r.agent).info;
  return scope_includes(scope_or_default(static_cast<Scope>(r.scope)), other, me.info) &&
         scope_includes(scope_or_default(a.scope), me.info, other);
}

void Detector::check_cell(Cell* cell, uint64_t addr, uint16_t mask, const Access& a,
                          const View& v) {
  bool write = a.rw != Rw::kRead;
  bool strong = a.order != Order::kWeak;
  Tick tick = v.agent->is_warp() ? v.own_tick : 0;
  if (!write) {
    // A read that this agent has already made since its last synchronisation: any write in between
    // would have taken these bytes out of the record.
    for (uint32_t k = 0; k < cell->size(); ++k) {
      const Record& r = (*cell)[k];
      if (r.agent == a.agent && r.tick == tick && !r.write && !(mask & ~r.mask)) return;
    }
  }
  Record mine;
  mine.agent = a.agent;
  mine.tick = tick;
  mine.pc = a.site.pc;
  mine.lanes = a.lane < 32 ? 1u << a.lane : 0;
  mine.mask = mask;
  mine.write = write;
  mine.strong = strong;
  mine.atomic = a.rw == Rw::kAtomic;
  mine.proxy = static_cast<uint8_t>(a.proxy) & 3;
  mine.scope = static_cast<uint8_t>(a.scope) & 7;
  bool merged = false;
  uint32_t readers = 0, strongs = 0;
  for (uint32_t k = 0; k < cell->size();) {
    Record& r = (*cell)[k];
    uint16_t both = r.mask & mask;
    if (!both) {
      if (!merged && r.agent == mine.agent && r.tick == mine.tick && r.pc == mine.pc &&
          r.write == mine.write) {
        r.mask |= mask;
        r.lanes |= mine.lanes;
        merged = true;
      }
      ++k;
      continue;
    }
    bool supersede = true;
    if (r.agent != mine.agent) {
      if (a.space == Space::kGlobal && !write && !r.write) {
        supersede = false;  // weights and tensors that everybody reads: not worth the comparison
      } else if (ordered(r, v, a.space, addr)) {
        // The end of a launch orders the proxies as well.
        if (a.space != Space::kTmem && state(r.agent).info.launch == v.agent->info.launch)
          check_proxy(r, both, addr, a, v);
      } else if (!(r.write || write)) {
        supersede = false;
      } else if (strong_pair(r, a, *v.agent)) {
        supersede = false;
      } else {
        report_pair(missing_edge(r, a, v), r, both, addr, a, v);
      }
    }
    // A write replaces what came before it, a read only earlier reads: who is ordered behind the
    // later one is behind both.
    if (supersede && (write || !r.write)) {
      r.mask &= static_cast<uint16_t>(~both);
      if (!r.mask) {
        cell->erase(k);
        continue;
      }
    }
    readers += !r.write;
    strongs += r.strong;
    ++k;
  }
  if (merged) return;
  bool drop_reader = a.space == Space::kGlobal && !write && readers >= kGlobalReaders;
  if (drop_reader || strongs >= kStrongRecords) {
    for (uint32_t k = 0; k < cell->size(); ++k) {
      if (drop_reader ? !(*cell)[k].write : (*cell)[k].strong) {
        (*cell)[k] = mine;
        return;
      }
    }
  }
  size_t grown = cell->push(mine);
  if (a.space == Space::kGlobal) global_.grew(grown);
}

void Detector::on_access(const Access& a) {
  if (a.space == Space::kLocal || a.space == Space::kParam || a.size == 0) return;
  AgentState* me = find(a.agent);
  if (!me || (!me->warp && !me->op)) return;
  View v = view(*me);
  uint64_t first = a.addr, end;
  uint32_t tmem_base = 0;
  Region* region = nullptr;
  if (a.space == Space::kGlobal) {
    end = first + a.size;
  } else {
    uint64_t key = a.space == Space::kShared ? a.addr >> 24 : 1ull << 63 | a.addr >> 32;
    if (key != region_key_) {
      region_ = nullptr;
      region_key_ = key;
      if (a.space == Space::kShared) {
        auto at = cta_at_.find(key);
        if (at != cta_at_.end()) region_ = ctas_[at->second].smem.get();
      } else {
        auto at = ctas_.find(static_cast<uint32_t>(a.addr >> 32));
        if (at != ctas_.end()) {
          if (!at->second.tmem) at->second.tmem.reset(new Region(128 * 32));
          region_ = at->second.tmem.get();
        }
      }
    }
    region = region_;
    if (!region) return;
    if (a.space == Space::kShared) {
      first = a.addr & 0xffffff;
    } else {
      first = a.addr & 0xffff;
      tmem_base = static_cast<uint32_t>(a.addr >> 16 & 0x7f) * 32;
    }
    end = first + a.size;
  }
  uint32_t rows = a.space == Space::kTmem ? std::max(1u, a.rows) : 1;
  uint64_t high = a.addr - first;  // what the address names above the cell index
  for (uint32_t row = 0; row < rows; ++row, tmem_base += 32, high += 1 << 16) {
    for (uint64_t c = first / kCellUnits; c * kCellUnits < end; ++c) {
      uint64_t lo = std::max<uint64_t>(first, c * kCellUnits) - c * kCellUnits;
      uint64_t hi = std::min<uint64_t>(end, (c + 1) * kCellUnits) - c * kCellUnits;
      auto mask = static_cast<uint16_t>(((1u << hi) - 1) & ~((1u << lo) - 1));
      Cell* cell = a.space == Space::kGlobal ? global_.at(c)
                                             : region->at(tmem_base + static_cast<uint32_t>(c));
      if (cell) check_cell(cell, high + c * kCellUnits, mask, a, v);
    }
  }
  if (a.order != Order::kWeak && me->warp && a.space != Space::kTmem) synchronise(a, me);
}

// Release and acquire patterns on one location (8.8). The value that a strong operation reads comes
// from the last write in this execution, so a release pattern that wrote it, or that an unbroken
// chain of atomics leads back to, synchronises with the reader.
void Detector::synchronise(const Access& a, AgentState* me) {
  WarpState& w = *me->warp;
  uint64_t key = a.addr ^ (a.space == Space::kShared ? 1ull << 63 : 0);
  bool reads = a.rw != Rw::kWrite, writes = a.rw != Rw::kRead;
  auto it = releases_.find(key);
  if (reads && it != releases_.end()) {
    for (const ReleaseEntry& e : it->second) {
      bool in_scope = e.scope == Scope::kCta       ? e.cta == me->info.cta
                      : e.scope == Scope::kCluster ? e.cluster == me->info.cluster
                                                   : true;
      Scope mine = scope_or_default(a.scope);
      in_scope &= mine == Scope::kCta       ? e.cta == me->info.cta
                  : mine == Scope::kCluster ? e.cluster == me->info.cluster
                                            : true;
      if (!in_scope) continue;
      if (acquires(a.order)) {
        e.released.into(&mut(&w.k));
      } else {
        w.pending.join(e.released);
      }
      w.tmem_pending.join(e.tmem);
      w.piped_pending.join(e.piped);
    }
  }
  if (!writes) return;
  std::vector<ReleaseEntry>& list = it != releases_.end() ? it->second : releases_[key];
  if (a.rw == Rw::kWrite) {
    // A plain store ends the chain, except that a release of the same thread before it still counts
    // (pattern 2).
    list.erase(std::remove_if(list.begin(), list.end(),
                              [&](const ReleaseEntry& e) { return e.by != a.agent; }),
               list.end());
  }
  ReleaseEntry e;
  e.cluster = me->info.cluster;
  e.cta = me->info.cta;
  e.by = a.agent;
  e.tmem = w.tmem_published;
  e.piped = w.piped_published;
  if (releases(a.order)) {
    e.scope = scope_or_default(a.scope);
    e.released.join(*w.k);
    e.released.hb.raise(w.slot, w.now);
  } else if (w.fence_k) {
    e.scope = w.fence_scope;
    e.released.join(*w.fence_k);
    e.released.hb.raise(w.slot, w.fence_tick);
  } else if (e.tmem.empty() && e.piped.empty()) {
    ++w.now;
    return;
  }
  ++w.now;
  for (ReleaseEntry& old : list) {
    if (old.scope == e.scope && (e.scope == Scope::kCta       ? old.cta == e.cta
                                 : e.scope == Scope::kCluster ? old.cluster == e.cluster
                                                              : true)) {
      // With a wider scope on both sides, who released does not matter to the acquirer.
      old.released.join(e.released);
      old.tmem.join(e.tmem);
      old.piped.join(e.piped);
      old.by = e.by;
      old.cta = e.cta;
      old.cluster = e.cluster;
      return;
    }
  }
  list.push_back(std::move(e));
}

}  // namespace race
}  // namespace ptxsim
