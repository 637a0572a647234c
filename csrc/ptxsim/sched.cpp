// SPDX-License-Identifier: Apache-2.0
// The schedule: which split of a warp, which warp of a cluster, when asynchronous operations land,
// deadlock detection.
#include <algorithm>
#include <chrono>

#include "machine.h"
#include "special.h"

namespace ptxsim {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void merge_splits(Warp& w) {
  auto& v = w.splits;
  v.erase(std::remove_if(v.begin(), v.end(), [](const Split& s) { return s.mask == 0; }), v.end());
  if (v.size() < 2) return;
  for (size_t i = 0; i < v.size(); ++i) {
    if (v[i].stage) continue;
    for (size_t j = i + 1; j < v.size();) {
      if (v[j].pc == v[i].pc && v[j].stage == 0) {
        v[i].mask |= v[j].mask;
        v[i].tried = false;
        v.erase(v.begin() + static_cast<long>(j));
        for (auto& s : v) s.tried = false;  // a convergence wait elsewhere may be satisfied now
      } else {
        ++j;
      }
    }
  }
}

// Runs the current split until it stalls, meets another split, or the quantum is used up. Returns
// false when it stalled.
bool run_split(Warp& w, int& quantum) {
  const Insn* code = w.kernel->code.data();
  uint32_t stop = ~0u;
  if (w.splits.size() > 1) {
    for (size_t k = 0; k < w.splits.size(); ++k) {
      if (k != w.cur && w.splits[k].pc > w.splits[w.cur].pc) stop = std::min(stop, w.splits[k].pc);
    }
  }
  size_t nsplits = w.splits.size();
  w.backward = 0;
  uint8_t* f = w.f;
  while (quantum > 0) {
    Split& s = w.splits[w.cur];
    const Insn& i = code[s.pc];
    uint32_t m = s.mask;
    if (i.guard) {
      uint32_t p = *reinterpret_cast<uint32_t*>(f + i.guard);
      m &= (i.flags & kGuardNot) ? ~p : p;
      if (!m && !(i.flags & kAlwaysRun)) {
        ++s.pc;
        --quantum;
        ++w.steps;
        if (s.pc >= stop) return true;
        continue;
      }
      if ((i.flags & kBlocking) && m != s.mask) {
        Split rest = s;
        rest.mask &= ~m;
        ++rest.pc;
        s.mask = m;
        w.splits.push_back(rest);
        return true;
      }
    }
    w.at = &i;
    if (__builtin_expect(w.trace, 0)) {
      fprintf(stderr, "ptxsim trace: cta %u warp %u pc %u mask %08x: %s\n", w.cta->linear, w.id,
              s.pc, m, w.kernel->describe(s.pc).c_str());
    }
    Status st = i.fn(w, i, m);
    --quantum;
    if (__builtin_expect(st == Status::kNext, 1)) {
      ++w.steps;
      if (++s.pc >= stop) return true;
      continue;
    }
    switch (st) {
      case Status::kJump:
        ++w.steps;
        if (w.splits.size() != nsplits || w.splits[w.cur].mask == 0) return true;
        if (w.splits[w.cur].pc >= stop) return true;
        if (nsplits > 1 && w.backward > 64) {  // a spin that waits for lanes further down
          w.splits[w.cur].tried = true;
          return false;
        }
        break;
      case Status::kYield:
      case Status::kPause:
        ++w.steps;
        ++w.splits[w.cur].pc;
        w.splits[w.cur].stage = 0;
        w.splits[w.cur].tried = true;
        w.waiting = st == Status::kYield;
        return false;
      case Status::kBlock:
      case Status::kConverge:
        w.splits[w.cur].tried = true;
        w.waiting = true;
        return false;
      default:
        break;
    }
  }
  w.waiting = false;
  return true;
}

// One turn of a warp. Returns true if it did anything but wait.
bool run_warp(Warp& w, int quantum) {
  bool worked = false;
  for (auto& s : w.splits) s.tried = false;
  w.waiting = false;
  uint64_t before = w.steps;
  while (quantum > 0 && w.live) {
    merge_splits(w);
    if (w.splits.empty()) break;
    int best = -1;
    for (size_t k = 0; k < w.splits.size(); ++k) {
      if (!w.splits[k].tried && (best < 0 || w.splits[k].pc < w.splits[best].pc))
        best = static_cast<int>(k);
    }
    if (best < 0) break;
    w.cur = static_cast<uint32_t>(best);
    bool went_on = run_split(w, quantum);
    worked |= went_on;
  }
  merge_splits(w);
  (void)before;
  return worked;
}

void start_warp(Warp& w) {
  const Kernel& k = *w.kernel;
  Grid& g = *w.cl->grid;
  for (const Preset& p : k.presets) {
    if (p.bytes == 0) {
      uint64_t v =
          p.kind == Preset::kSpecial ? special_value(w, static_cast<int>(p.value), 0) : p.value;
      *w.cell<uint32_t>(p.offset) = static_cast<uint32_t>(v);
      continue;
    }
    for (int l = 0; l < kLanes; ++l) {
      uint64_t v = p.value;
      switch (p.kind) {
        case Preset::kValue:
          break;
        case Preset::kSpecial:
          v = special_value(w, static_cast<int>(p.value), l);
          break;
        case Preset::kParam:
          v += reinterpret_cast<uint64_t>(g.param_ptr);
          break;
        case Preset::kShared:
          v += (static_cast<uint64_t>(w.cta->rank) << kRankShift) + kSmemBase;
          break;
        case Preset::kLocal:
          v += reinterpret_cast<uint64_t>(w.local) + static_cast<uint64_t>(l) * k.local_bytes;
          break;
      }
      if (p.bytes == 2) {
        w.cell<uint16_t>(p.offset)[l] = static_cast<uint16_t>(v);
      } else if (p.bytes == 4) {
        w.cell<uint32_t>(p.offset)[l] = static_cast<uint32_t>(v);
      } else {
        w.cell<uint64_t>(p.offset)[l] = v;
      }
    }
  }
}

}  // namespace

std::unique_ptr<Cluster> start_cluster(Grid& g, uint32_t linear, uint32_t host_thread);
void finish_cluster(Cluster& cl);

namespace {

bool all_exited(const Cluster& cl) { return cl.live_threads == 0; }

void warp_ended(Warp& w) {
  --w.cta->live_warps;
  w.cl->progress = true;
  named_barriers_after_exit(w);
  if (watched(w)) {
    for (Observer* o : *w.cl->observers) o->on_agent_end(w.agent);
  }
}

// One round: each live warp of the cluster gets a turn. Returns false when nothing moved.
bool round(Cluster& cl) {
  std::vector<Warp*> order;
  for (auto& cta : cl.ctas) {
    for (auto& w : cta.warps) {
      if (w.live) order.push_back(&w);
    }
  }
  Mode mode = config().mode;
  if (mode == Mode::kEager) {
    if (!order.empty())
      std::rotate(order.begin(), order.begin() + static_cast<long>(cl.rng.state++ % order.size()),
                  order.end());
  } else {
    for (size_t k = order.size(); k > 1; --k)
      std::swap(order[k - 1], order[cl.rng.below(static_cast<uint32_t>(k))]);
  }
  bool moved = false;
  for (Warp* w : order) {
    int quantum = mode == Mode::kEager ? 4096 : 16 << cl.rng.below(8);
    uint64_t before = w->steps;
    set_current_warp(w);
    run_warp(*w, quantum);
    cl.steps += w->steps - before;
    set_current_warp(nullptr);
    if (!w->live) warp_ended(*w);
    moved |= w->live && !w->waiting;
    pump_some(cl);
  }
  bool progress = cl.progress || moved;
  cl.progress = false;
  return progress;
}

}  // namespace

std::string deadlock_report(Cluster& cl) {
  std::string s = format(
      "deadlock: no warp of cluster %u can make progress and no asynchronous operation is "
      "pending\n",
      cl.linear);
  for (auto& cta : cl.ctas) {
    s += format("  CTA %u (%u,%u,%u) rank %u: %u warps left\n", cta.linear, cta.id[0], cta.id[1],
                cta.id[2], cta.rank, cta.live_warps);
    for (auto& w : cta.warps) {
      if (!w.live) continue;
      for (auto& sp : w.splits) {
        if (!sp.mask) continue;
        s += format("    warp %u lanes %08x at %s\n", w.id, sp.mask,
                    w.kernel->describe(sp.pc).c_str());
      }
      if (w.failed_wait) {
        s += format("      last failed wait: mbarrier at shared offset 0x%x in phase %llu, %s\n",
                    (w.last_wait_addr & ((1u << kRankShift) - 1)) - kSmemBase,
                    (unsigned long long)w.last_wait_phase,
                    w.kernel->describe(w.wait_kernel_pc).c_str());
      }
    }
    for (auto& b : cta.mbarriers) {
      s += format(
          "    mbarrier at shared offset 0x%x: phase %llu, pending %lld of %u arrivals, tx %lld "
          "bytes\n",
          b.first - kSmemBase, (unsigned long long)b.second.phase, (long long)b.second.pending,
          b.second.expected, (long long)b.second.tx);
    }
    for (int k = 0; k < 16; ++k) {
      auto& b = cta.barriers[k];
      if (b.arrived || b.waiting) {
        s += format("    barrier %d: %u threads arrived of %u\n", k, b.arrived, b.expected);
      }
    }
  }
  return s;
}

namespace {

struct Resident {
  std::unique_ptr<Cluster> cl;
  size_t grid = 0;  // index in the chain
  int idle = 0;     // rounds without progress
};

// The clusters of one launch, or of launches that run together, on one host thread.
class ClusterSet {
 public:
  ClusterSet(const std::vector<Grid*>& chain, uint32_t host_thread)
      : chain_(chain), host_thread_(host_thread), rng_(config().seed * 31 + chain[0]->launch) {
    auto resident = static_cast<size_t>(std::max(1, config().resident));
    for (const Grid* g : chain) {
      size_t ctas = g->cluster[0] * g->cluster[1] * g->cluster[2];
      // Of a chain several clusters are resident: the primary's so that all may come to their
      // trigger before one ends, the dependent's since each holds its place while it waits.
      limit_.push_back(g->cooperative ? g->total
                       : chain.size() == 1
                           ? resident
                           : std::max<size_t>(resident, (g == chain[0] ? 32 : 16) / ctas));
    }
  }

  void run() {
    hurry();
    admit();
    while (!resident_.empty() || started_ < chain_.size()) {
      for (const Grid* g : chain_) {
        if (g->abort.load(std::memory_order_relaxed)) return;
      }
      start_dependents();
      step();
      retire();
      check_stuck();
      admit();
      check_deadline();
    }
  }

 private:
  Grid& grid(const Resident& r) const { return *chain_[r.grid]; }

  void admit() {
    for (size_t k = 0; k < started_; ++k) {
      Grid& g = *chain_[k];
      size_t have = 0;
      for (auto& r : resident_) have += r.grid == k;
      while (have < limit_[k]) {
        uint32_t n = g.next.fetch_add(1);
        if (n >= g.total) {
          g.next.store(g.total);
          break;
        }
        resident_.push_back({start_cluster(g, n, host_thread_), k, 0});
        ++have;
        for (auto& cta : resident_.back().cl->ctas) {
          for (auto& w : cta.warps) start_warp(w);
        }
      }
    }
    if (chain_.size() == 1) return;
    for (size_t k = 0; k < started_; ++k) {
      bool live = chain_[k]->next.load() < chain_[k]->total;
      for (auto& r : resident_) live |= r.grid == k;
      chain_[k]->complete = !live;
    }
  }

  void hurry() { ahead_ = chain_.size() > 1 && rng_.below(4) ? 4096 : 0; }

  void start_dependents() {
    if (started_ == chain_.size()) return;
    const Grid& before = *chain_[started_ - 1];
    uint32_t ctas = before.grid[0] * before.grid[1] * before.grid[2];
    bool may = config().pdl == Pdl::kStart || before.triggered == ctas;
    // The moment is open: in the random mode some time may pass.
    if (!may || (config().mode == Mode::kRandom && !before.complete && rng_.below(8) == 0)) return;
    ++started_;
    // Mostly the dependent runs ahead until it waits: its early reads and writes then come before
    // those of the primary.
    hurry();
    admit();
  }

  // A cluster that hurries: of the newest grid while that runs ahead of its primary, or on its way
  // to launch_dependents while dependents wait for it.
  bool preferred(const Resident& r) const {
    if (ahead_ == 0 || r.idle > 0 || r.grid != started_ - 1) return false;
    if (started_ == chain_.size()) return true;
    for (auto& cta : r.cl->ctas) {
      if (!cta.triggered) return true;
    }
    return false;
  }

  void step() {
    bool hurry = false;
    for (auto& r : resident_) hurry |= preferred(r);
    if (ahead_ > 0) --ahead_;
    for (auto& r : resident_) {
      if (hurry && !preferred(r)) continue;
      Cluster& cl = *r.cl;
      bool progress = round(cl);
      if (!progress && pump_one(cl)) progress = true;
      r.idle = progress ? 0 : r.idle + 1;
    }
  }

  void retire() {
    for (size_t k = 0; k < resident_.size();) {
      Cluster& cl = *resident_[k].cl;
      if (!all_exited(cl)) {
        ++k;
        continue;
      }
      Grid& g = grid(resident_[k]);
      finish_cluster(cl);
      g.steps += cl.steps;
      g.tcgen_mma += cl.tcgen_mma;
      g.mma_sync += cl.mma_sync;
      g.wgmma += cl.wgmma;
      resident_.erase(resident_.begin() + static_cast<long>(k));
      for (auto& r : resident_) r.idle = 0;  // a dependent may go on
    }
  }

  void check_stuck() {
    if (resident_.empty()) return;
    int least = resident_[0].idle;
    for (auto& r : resident_) least = std::min(least, r.idle);
    if (least <= 64) return;
    Grid& g = grid(resident_[0]);
    size_t& limit = limit_[resident_[0].grid];
    if (limit < g.total && g.next.load() < g.total && limit < 64) {
      ++limit;  // perhaps it waits for a CTA that has not started
    } else if (chain_[0]->running.load() <= 1 || least > 4096) {
      std::string text;
      for (auto& r : resident_) {
        if (text.empty() || r.grid != resident_[0].grid) text += deadlock_report(*r.cl);
      }
      throw SimError(Err::kLaunchTimeout, text);
    }
  }

  void check_deadline() {
    if ((++ticks_ & 63) != 0 || now_s() <= chain_[0]->deadline) return;
    std::string text = format("watchdog: the launch ran longer than PTXSIM_TIMEOUT = %.0f s\n",
                              config().timeout_s);
    throw SimError(Err::kLaunchTimeout,
                   resident_.empty() ? text : text + deadlock_report(*resident_[0].cl));
  }

  const std::vector<Grid*>& chain_;
  uint32_t host_thread_;
  Rng rng_;
  std::vector<Resident> resident_;
  std::vector<size_t> limit_;
  size_t started_ = 1;  // grids that may have clusters
  int ahead_ = 0;       // steps in which only preferred clusters run while they can
  uint64_t ticks_ = 0;
};

}  // namespace

void run_cluster_set(const std::vector<Grid*>& chain, uint32_t host_thread) {
  ClusterSet(chain, host_thread).run();
}

}  // namespace ptxsim
