// SPDX-License-Identifier: Apache-2.0
// mbarrier discipline: waits that would alias (a waiter two phases behind), transactions or
// arrivals left over at CTA exit, barriers re-initialised while in use.
#include <unordered_map>

#include "../base.h"
#include "watchers.h"

namespace ptxsim {
namespace {

class PhaseWatcher : public Observer {
 public:
  void on_launch_begin(const LaunchInfo&, Reporter* r) override {
    reporter_ = r;
    bars_.clear();
  }
  void on_barrier_init(AgentId, const BarrierRef& b, uint32_t, const Site& site) override {
    auto& s = bars_[b.addr];
    if (s.live && s.tx != 0) {
      reporter_->report(
          "phase", format("mbarrier.init of a barrier with %lld transaction bytes in flight, %s",
                          (long long)s.tx, reporter_->describe(site).c_str()));
    }
    s = State();
    s.live = true;
    s.owner = b.owner;
  }
  void on_barrier_inval(AgentId, const BarrierRef& b, const Site& site) override {
    auto& s = bars_[b.addr];
    if (s.tx != 0) {
      reporter_->report("phase", format("mbarrier.inval with %lld transaction bytes in flight, %s",
                                        (long long)s.tx, reporter_->describe(site).c_str()));
    }
    s.live = false;
  }
  void on_arrive(AgentId, const BarrierRef& b, uint64_t, uint32_t, int64_t tx, Order,
                 const Site& site, uint32_t) override {
    if (b.kind != BarrierKind::kMbarrier) return;
    auto& s = bars_[b.addr];
    s.tx += tx;
    s.last = site;
  }
  // An agent whose last test of the barrier failed in phase p and that has not looked since: when
  // phase p + 1 completes too, its parity test would report the old phase again.
  void on_wait_failed(AgentId a, const BarrierRef& b, uint64_t phase, const Site&) override {
    bars_[b.addr].waiting[a] = phase;
  }
  void on_wait(AgentId a, const BarrierRef& b, uint64_t, Order, const Site&) override {
    if (b.kind == BarrierKind::kMbarrier) bars_[b.addr].waiting.erase(a);
  }
  void on_agent_end(AgentId a) override {
    for (auto& b : bars_) b.second.waiting.erase(a);
  }
  void on_phase_complete(const BarrierRef& b, uint64_t phase) override {
    if (b.kind != BarrierKind::kMbarrier) return;
    auto& s = bars_[b.addr];
    s.tx = 0;
    for (auto& w : s.waiting) {
      if (phase >= w.second + 1) {
        const AgentInfo* a = reporter_->agent(w.first);
        reporter_->report("phase", format("mbarrier phase %llu completes while warp %u of CTA %u "
                                          "still waits for phase %llu of it (parity aliasing)",
                                          (unsigned long long)phase, a ? a->warp : 0,
                                          a ? a->cta : 0, (unsigned long long)w.second));
      }
    }
  }
  void on_cta_end(uint32_t, uint32_t cta) override {
    for (auto it = bars_.begin(); it != bars_.end();) {
      State& s = it->second;
      if (s.owner != cta) {
        ++it;
        continue;
      }
      if (s.live && s.tx != 0) {
        reporter_->report("phase", format("CTA %u exits with %lld transaction bytes outstanding on "
                                          "the mbarrier at offset 0x%llx; last arrival %s",
                                          cta, (long long)s.tx,
                                          (unsigned long long)(it->first & 0xffffff) - 0x400,
                                          reporter_->describe(s.last).c_str()));
      }
      it = bars_.erase(it);
    }
  }

 private:
  struct State {
    bool live = false;
    uint32_t owner = 0;
    int64_t tx = 0;
    Site last;
    std::unordered_map<AgentId, uint64_t> waiting;
  };
  Reporter* reporter_ = nullptr;
  std::unordered_map<uint64_t, State> bars_;
};

}  // namespace

Observer* make_phase_watcher() { return new PhaseWatcher; }

}  // namespace ptxsim
