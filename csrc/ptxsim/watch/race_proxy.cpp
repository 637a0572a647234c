// SPDX-License-Identifier: Apache-2.0
// Proxy rules (PTX ISA 8.6, 9.7.9.25.2, 9.7.15.4, 9.7.16.6.5) and the text of reports.
#include <cstdio>

#include "race_detector.h"

namespace ptxsim {
namespace race {
namespace {

std::string hex(uint64_t v) {
  char b[24];
  std::snprintf(b, sizeof b, "0x%llx", static_cast<unsigned long long>(v));
  return b;
}

const char* kind_name(AgentKind k) {
  switch (k) {
    case AgentKind::kWarp:
      return "warp";
    case AgentKind::kCpAsync:
      return "cp.async";
    case AgentKind::kBulkLoad:
      return "bulk copy into shared memory";
    case AgentKind::kBulkStore:
      return "bulk copy out of shared memory";
    case AgentKind::kTcgenMma:
      return "tcgen05.mma";
    case AgentKind::kTcgenCp:
      return "tcgen05.cp";
    case AgentKind::kTcgenShift:
      return "tcgen05.shift";
    case AgentKind::kTcgenCommit:
      return "tcgen05.commit";
    case AgentKind::kTcgenLd:
      return "tcgen05.ld";
    case AgentKind::kTcgenSt:
      return "tcgen05.st";
    case AgentKind::kWgmma:
      return "wgmma.mma_async";
    case AgentKind::kCpAsyncArrive:
      return "cp.async.mbarrier.arrive";
    case AgentKind::kOther:
      return "asynchronous operation";
  }
  return "?";
}

// The wait that an unfinished operation of this kind needs.
Missing wait_of(AgentKind k, bool write) {
  switch (k) {
    case AgentKind::kCpAsync:
      return Missing::kCpAsyncWait;
    case AgentKind::kBulkStore:
      return Missing::kBulkWait;
    case AgentKind::kTcgenMma:
    case AgentKind::kTcgenCp:
    case AgentKind::kTcgenShift:
    case AgentKind::kTcgenCommit:
      return Missing::kTcgenCommit;
    case AgentKind::kTcgenLd:
    case AgentKind::kTcgenSt:
      return Missing::kTcgenWait;
    case AgentKind::kWgmma:
      return Missing::kWgmmaWait;
    case AgentKind::kBulkLoad:
    case AgentKind::kOther:
      return write ? Missing::kMbarrierWait : Missing::kBulkWait;
    default:
      return Missing::kBarrier;
  }
}

}  // namespace

const char* missing_name(Missing m) {
  switch (m) {
    case Missing::kBarrier:
      return "barrier";
    case Missing::kMbarrierWait:
      return "mbarrier-wait";
    case Missing::kBulkWait:
      return "bulk-wait";
    case Missing::kCpAsyncWait:
      return "cp-async-wait";
    case Missing::kTcgenWait:
      return "tcgen05-wait";
    case Missing::kTcgenCommit:
      return "tcgen05-commit";
    case Missing::kTcgenFence:
      return "tcgen05-fence";
    case Missing::kWgmmaWait:
      return "wgmma-wait";
    case Missing::kWgmmaFence:
      return "wgmma-fence";
    case Missing::kProxyFence:
      return "proxy-fence";
    case Missing::kTensormapFence:
      return "tensormap-fence";
    case Missing::kMbarrierInit:
      return "mbarrier-init";
    case Missing::kInitFence:
      return "init-fence";
    case Missing::kGridWait:
      return "griddepcontrol-wait";
  }
  return "?";
}

// Lanes of `r` that executed no proxy fence between the access and tick `known` of their warp.
uint32_t Detector::lanes_without_fence(const Record& r, Tick known, int space) const {
  const std::vector<ProxyFence>& list = state(r.agent).fences;
  uint32_t left = r.lanes;
  for (auto f = list.rbegin(); left && f != list.rend() && f->tick >= r.tick; ++f) {
    if (f->tick <= known && f->space[space]) left &= ~f->lanes;
  }
  return left;
}

// Whether a proxy fence stands between a generic access and what `v` knows.
bool Detector::fenced(const Record& r, const View& v, int space) const {
  const Clock& f = v.k->fenced[space];
  const AgentState& o = state(r.agent);
  if (o.is_warp()) {
    Tick known = f.get(o.slot);
    if (known < r.tick) return false;
    // With path-fence, and for tensor maps, the fence of another thread counts.
    if (options_.path_fence || space == kTensormapSpace) return true;
    return lanes_without_fence(r, known, space) == 0;
  }
  for (const Alt& alt : o.alts) {
    if (!(alt.reads_only && r.write) && f.get(alt.slot) >= alt.tick) return true;
  }
  return false;
}

// `r` happens before `a`. Completion of a bulk copy, wgmma or tcgen05.mma implies the fence towards
// the generic proxy, so only the generic-to-async direction needs an explicit one.
void Detector::check_proxy(const Record& r, uint16_t mask, uint64_t addr, const Access& a,
                           const View& v) {
  auto from = static_cast<Proxy>(r.proxy);
  if (from != Proxy::kGeneric || a.proxy == Proxy::kGeneric) return;
  bool write = a.rw != Rw::kRead;
  if (!r.write && !(options_.war_fence && write)) return;
  int space = a.proxy == Proxy::kTensormap ? kTensormapSpace
              : a.space == Space::kShared  ? kSharedSpace
                                           : kGlobalSpace;
  if (fenced(r, v, space)) return;
  report_pair(a.proxy == Proxy::kTensormap ? Missing::kTensormapFence : Missing::kProxyFence, r,
              mask, addr, a, v);
}

// Names the edge whose absence made the two accesses unordered.
Missing Detector::missing_edge(const Record& r, const Access& a, const View& v) const {
  const AgentState& o = state(r.agent);
  const AgentInfo& me = v.agent->info;
  if (o.info.launch != me.launch) return Missing::kGridWait;
  if (!o.is_warp()) {
    bool only_reads = true;
    for (const Alt& alt : o.alts) only_reads &= alt.reads_only;
    // Not observed by anybody: the wait itself is missing. Otherwise the observer did not pass it
    // on.
    if (o.alts.empty() || (only_reads && r.write)) return wait_of(o.info.kind, r.write);
    if (is_pipe_kind(o.info.kind)) {
      if (a.space == Space::kTmem && options_.strict_tcgen) {
        for (const Alt& alt : o.alts) {
          if (v.k->hb.get(alt.slot) >= alt.tick) return Missing::kTcgenFence;
        }
      }
      return Missing::kTcgenCommit;
    }
    if (a.space == Space::kTmem && options_.strict_tcgen) {
      for (const Alt& alt : o.alts) {
        if (known(alt.slot, alt.tick, v)) return Missing::kTcgenFence;
      }
    }
    return r.write && wait_of(o.info.kind, true) == Missing::kMbarrierWait ? Missing::kMbarrierWait
                                                                           : Missing::kBarrier;
  }
  // A warp came first in this execution, but it may have come after the issue: then the operation
  // was not waited for.
  if (!v.agent->is_warp()) {
    bool after_issue = r.agent == me.parent;
    if (!after_issue && o.warp) after_issue = o.warp->k->hb.get(v.own) > v.own_tick;
    if (after_issue) return wait_of(me.kind, a.rw != Rw::kRead);
  }
  return Missing::kBarrier;
}

std::string Detector::hint(Missing m, const Record& r, const Access& a, const View& v) const {
  const AgentInfo& o = state(r.agent).info;
  switch (m) {
    case Missing::kBarrier:
      return "no barrier, mbarrier phase or release/acquire pair orders the two";
    case Missing::kMbarrierWait:
      return "no successful wait on the mbarrier phase that the copy completes stands between them";
    case Missing::kBulkWait:
      return a.rw == Rw::kRead && r.write ? "cp.async.bulk.wait_group by the issuing thread, and a "
                                            "barrier from it to the reader"
                                          : "cp.async.bulk.wait_group(.read) by the issuing thread "
                                            "before the buffer is used again";
    case Missing::kCpAsyncWait:
      return "cp.async.wait_group (or cp.async.mbarrier.arrive and a wait), then a barrier to "
             "other threads";
    case Missing::kTcgenWait: {
      AgentKind k = o.kind == AgentKind::kTcgenLd || o.kind == AgentKind::kTcgenSt
                        ? o.kind
                        : v.agent->info.kind;
      return std::string("tcgen05.wait::") + (k == AgentKind::kTcgenSt ? "st" : "ld") +
             " by the issuing warp, then a barrier to other threads";
    }
    case Missing::kTcgenCommit:
      return "tcgen05.commit by the issuing thread and a wait on its mbarrier";
    case Missing::kTcgenFence:
      return "tcgen05.fence::before_thread_sync on the first side and ::after_thread_sync on the "
             "second";
    case Missing::kWgmmaWait:
      return "wgmma.commit_group and wgmma.wait_group, then a barrier to other threads";
    case Missing::kProxyFence: {
      std::string s =
          "the two use different proxies: fence.proxy.async by the writing thread, between its "
          "access and the barrier that orders them";
      int space = a.space == Space::kShared ? kSharedSpace : kGlobalSpace;
      Tick known = state(r.agent).is_warp() ? v.k->fenced[space].get(state(r.agent).slot) : 0;
      if (known >= r.tick && r.tick) {
        char lanes[96];
        std::snprintf(lanes, sizeof lanes,
                      " (other lanes ran one, lanes %08x of the writers did not)",
                      lanes_without_fence(r, known, space));
        s += lanes;
      }
      return s;
    }
    case Missing::kGridWait:
      return "griddepcontrol.wait in the dependent launch, before its access and ordered before "
             "it: the launches overlap";
    case Missing::kTensormapFence:
      return "fence.proxy.tensormap::generic.acquire on the map by the issuing thread";
    default:
      return "";
  }
}

// Ids go on along a chain of dependent launches; texts name the CTA of its own grid.
std::string Detector::cta_text(uint32_t cta) const {
  uint32_t base = 0;
  for (auto& l : launch_ctas_) {
    if (l.second <= cta) base = l.second;
  }
  return "CTA " + std::to_string(cta - base);
}

std::string Detector::agent_text(AgentId id) const {
  const AgentInfo& i = state(id).info;
  std::string s;
  if (i.kind != AgentKind::kWarp) s = std::string(kind_name(i.kind)) + " issued by ";
  s += "warp " + std::to_string(i.warp) + " of " + cta_text(i.cta);
  if (number_ > 0) s += " of launch " + std::to_string(i.launch) + " of the chain";
  return s;
}

std::string Detector::place_text(Space space, uint64_t addr, uint16_t mask) const {
  uint32_t first = mask ? static_cast<uint32_t>(__builtin_ctz(mask)) : 0,
           count = static_cast<uint32_t>(__builtin_popcount(mask));
  if (space == Space::kTmem) {
    return std::to_string(count) + " columns at TMEM lane " + std::to_string(addr >> 16 & 0x7f) +
           " column " + std::to_string((addr & 0xffff) + first) + " of " +
           cta_text(static_cast<uint32_t>(addr >> 32));
  }
  if (space == Space::kShared) {
    auto at = cta_at_.find(addr >> 24);
    uint64_t base = 0;
    std::string cta = "rank " + std::to_string(addr >> 24 & 0xff);
    if (at != cta_at_.end()) {
      base = ctas_.at(at->second).smem_addr & 0xffffff;
      cta = cta_text(at->second);
    }
    return std::to_string(count) + " bytes at shared memory offset " +
           hex((addr & 0xffffff) + first - base) + " of " + cta;
  }
  addr += first;
  auto it = allocations_.upper_bound(addr);
  if (it != allocations_.begin()) {
    --it;
    if (addr < it->first + it->second) {
      return std::to_string(count) + " bytes at offset " + hex(addr - it->first) + " of the " +
             std::to_string(it->second) + "-byte allocation " + hex(it->first);
    }
  }
  return std::to_string(count) + " bytes at global address " + hex(addr);
}

std::string Detector::access_text(bool write, bool atomic, Proxy proxy) {
  std::string s = atomic ? "atomic" : write ? "write" : "read";
  if (proxy == Proxy::kAsync) s += " (async proxy)";
  if (proxy == Proxy::kTensormap) s += " (tensor map)";
  return s;
}

void Detector::report_pair(Missing m, const Record& r, uint16_t mask, uint64_t addr,
                           const Access& a, const View& v) {
  int kind = static_cast<int>(a.space) << 8 | static_cast<int>(state(r.agent).info.kind) << 4 |
             (r.write ? 2 : 0) | (a.rw != Rw::kRead);
  auto key = std::make_tuple(static_cast<uint8_t>(m), r.pc, a.site.pc, kind);
  if (seen_.count(key))
    return;  // before the text is built: a race in a loop is found again and again
  const char* what =
      m == Missing::kProxyFence || m == Missing::kTensormapFence ? "proxy error" : "data race";
  const Kernel* by = state(r.agent).info.site.kernel;
  Site first{by ? by : a.site.kernel, r.pc};
  std::string text = std::string(what) + " on " + place_text(a.space, addr, mask) + "\n  " +
                     access_text(r.write, r.atomic, static_cast<Proxy>(r.proxy)) + " by " +
                     agent_text(r.agent) + "\n    " + reporter_->describe(first) + "\n  " +
                     access_text(a.rw != Rw::kRead, a.rw == Rw::kAtomic, a.proxy) + " by " +
                     agent_text(a.agent) + "\n    " + reporter_->describe(a.site) +
                     "\n  needed: " + hint(m, r, a, v);
  // `old = *p; do { ... } while (atomicCAS(p, ...))` reads weakly what others change by atomics.
  // What the loaded value decides is checked by the atomic, or else shows as a race on other data.
  bool benign = m == Missing::kBarrier && !options_.strict_atomics &&
                (r.atomic ? a.rw == Rw::kRead : a.rw == Rw::kAtomic && !r.write);
  report(m, r.pc, a.site.pc, kind, text, !benign);
}

void Detector::report(Missing m, uint32_t pc_a, uint32_t pc_b, int kind, const std::string& text,
                      bool fatal) {
  if (!reporter_ ||
      !seen_.insert(std::make_tuple(static_cast<uint8_t>(m), pc_a, pc_b, kind)).second)
    return;
  if (reports_++ >= options_.max_reports) return;
  reporter_->report(
      "race", "[missing " + std::string(missing_name(m)) + "] " + (fatal ? "" : "note: ") + text,
      fatal);
}

}  // namespace race
}  // namespace ptxsim
