// SPDX-License-Identifier: Apache-2.0
// State of the race detector. Events are in race.cpp, the check of one access in race_access.cpp,
// proxies and reports in race_proxy.cpp.
#ifndef PTXSIM_WATCH_RACE_DETECTOR_H_
#define PTXSIM_WATCH_RACE_DETECTOR_H_

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "race.h"
#include "race_clock.h"
#include "race_shadow.h"

namespace ptxsim {
namespace race {

inline bool acquires(Order o) {
  return o == Order::kAcquire || o == Order::kAcqRel || o == Order::kSeqCst;
}
inline bool releases(Order o) {
  return o == Order::kRelease || o == Order::kAcqRel || o == Order::kSeqCst;
}
// Runs in the order of issue (9.7.16.6.2).
inline bool is_pipe_kind(AgentKind k) {
  return k == AgentKind::kTcgenMma || k == AgentKind::kTcgenCp || k == AgentKind::kTcgenShift ||
         k == AgentKind::kTcgenCommit;
}

// "Whoever knows `slot` up to `tick` knows the operation." An operation has one entry for each way
// in which it was observed.
struct Alt {
  Slot slot;
  Tick tick = 0;
  bool reads_only = false;  // cp.async.bulk.wait_group.read: nothing is said about its writes
  uint32_t place = ~0u;  // mbarriers: CTA rank that holds it, for copies that signal several CTAs
};

struct WarpState {
  Shared k = std::make_shared<Knowledge>();
  Slot slot, pipe;
  Tick now = 1;
  Tick pipe_seq = 0;
  Clock tmem_published, piped_published;  // at the last tcgen05.fence::before_thread_sync
  Clock tmem_pending, piped_pending;      // received, waits for ::after_thread_sync
  Released pending;  // seen by relaxed reads and waits, waits for an acquire fence
  Shared fence_k;    // at the last release fence
  Tick fence_tick = 0;
  Scope fence_scope = Scope::kNone;
  Slot fence_slot;
  bool wgmma_fenced = false;
  AgentId last_op = 0;  // and the tick behind it
  Tick last_op_tick = 0;
  const Payload* last_join = nullptr;
  uint64_t last_version = 0;
};

struct OpState {
  Shared k;
  Slot parent_slot;
  Tick parent_tick = 0;
  Slot pipe;
  Tick pipe_tick = 0;
  std::vector<AgentId> joined;  // cp.async.mbarrier.arrive: the copies it speaks for
};

// A proxy fence that a warp executed, at a tick of it.
struct ProxyFence {
  Tick tick = 0;
  uint32_t lanes = 0;
  bool space[2] = {false, false};  // kSharedSpace, kGlobalSpace
};

struct AgentState {
  AgentInfo info;
  Slot slot;                       // of a warp
  std::vector<ProxyFence> fences;  // of a warp, oldest first; outlives the warp
  std::vector<Alt> alts;
  AgentId group = 0;  // first of the operations that the lanes of a warp issued by one instruction
  std::unique_ptr<WarpState> warp;
  std::unique_ptr<OpState> op;
  bool is_warp() const { return info.kind == AgentKind::kWarp; }
};

// What an agent knows at this moment.
struct View {
  const AgentState* agent = nullptr;
  const Knowledge* k = nullptr;
  Slot own;  // of the warp, or of the issuing warp
  Tick own_tick = 0;
  Slot pipe;
  Tick pipe_tick = 0;
};

struct BarrierState {
  Payload done;                        // mbarrier: all completed phases
  std::map<uint64_t, Payload> phases;  // arrivals by phase; of an mbarrier only the running one
  // mbarrier only
  Slot slot;
  AgentId init_by = 0;
  Slot init_slot;
  Tick init_tick = 0;
  Site init_site;
  uint64_t addr = 0;
  bool for_cp_async = false;
};

// Release/acquire state of one address that strong operations touch.
struct ReleaseEntry {
  Scope scope = Scope::kGpu;
  uint32_t cluster = 0, cta = 0;
  AgentId by = 0;
  Released released;
  Clock tmem, piped;  // tcgen05.fence composes with strong loads and stores too
};

enum class Missing : uint8_t {
  kBarrier,         // nothing orders the two
  kMbarrierWait,    // wait on the mbarrier that the copy signals
  kBulkWait,        // cp.async.bulk.wait_group(.read)
  kCpAsyncWait,     // cp.async.wait_group / cp.async.mbarrier.arrive
  kTcgenWait,       // tcgen05.wait::ld / ::st
  kTcgenCommit,     // tcgen05.commit and a wait on its mbarrier
  kTcgenFence,      // tcgen05.fence::before/after_thread_sync
  kWgmmaWait,       // wgmma.commit_group / wait_group
  kWgmmaFence,      // wgmma.fence before the first wgmma
  kProxyFence,      // fence.proxy.async
  kTensormapFence,  // fence.proxy.tensormap
  kMbarrierInit,    // init of the mbarrier not visible
  kInitFence,       // fence.mbarrier_init
  kGridWait,        // griddepcontrol.wait
};
const char* missing_name(Missing m);

class Detector : public Observer {
 public:
  explicit Detector(const RaceOptions& options)
      : options_(options), global_(options.shadow_limit) {}

  void on_launch_begin(const LaunchInfo& info, Reporter* reporter) override;
  void on_launch_end(const LaunchInfo& info) override;
  void on_cta_begin(uint32_t cluster, uint32_t cta, uint32_t rank, uint64_t smem_addr,
                    uint32_t smem_size) override;
  void on_cta_end(uint32_t cluster, uint32_t cta) override;
  void on_agent_begin(const AgentInfo& info) override;
  void on_agent_end(AgentId id) override;
  void on_order(AgentId before, AgentId after) override;
  void on_join(AgentId joiner, AgentId op, Join what) override;
  void on_access(const Access& a) override;
  void on_barrier_init(AgentId id, const BarrierRef& b, uint32_t count, const Site& site) override;
  void on_barrier_inval(AgentId id, const BarrierRef& b, const Site& site) override;
  void on_arrive(AgentId id, const BarrierRef& b, uint64_t phase, uint32_t count, int64_t tx,
                 Order order, const Site& site, uint32_t lanes) override;
  void on_phase_complete(const BarrierRef& b, uint64_t phase) override;
  void on_wait(AgentId id, const BarrierRef& b, uint64_t phase, Order order,
               const Site& site) override;
  void on_wait_failed(AgentId id, const BarrierRef& b, uint64_t phase, const Site& site) override;
  void on_grid_wait(AgentId id, const Site& site) override;
  void on_fence(AgentId id, Fence fence, Order order, Scope scope, const Site& site,
                uint32_t lanes) override;
  void on_alloc(Space space, uint64_t addr, uint64_t size, const char* how) override;
  void on_free(Space space, uint64_t addr, uint64_t size, const char* how, AgentId by,
               const Site& site) override;

 private:
  using BarrierKey = std::tuple<BarrierKind, uint64_t, uint32_t>;
  struct CtaState {
    uint32_t cluster = 0, rank = 0;
    uint64_t smem_addr = 0;
    uint32_t smem_size = 0;
    std::unique_ptr<Region> smem, tmem;
    std::vector<AgentId> warps;
  };

  // race.cpp
  AgentState* find(AgentId id);
  const AgentState& state(AgentId id) const { return agents_[id - first_agent_]; }
  void forget_before(AgentId first);
  bool launch_known(uint32_t number, const View& v) const;
  std::string cta_text(uint32_t cta) const;
  View view(const AgentState& a) const;
  Slot new_slot(uint32_t cluster) { return Slot{cluster, slots_[cluster]++}; }
  static Knowledge& mut(Shared* k);
  static BarrierKey key_of(const BarrierRef& b);
  void arrive_warp(WarpState* w, Payload* p, bool release);
  void arrive_op(AgentState* a, BarrierState* b, Payload* p, uint64_t phase, bool mbarrier,
                 uint32_t place);
  void wait_payload(WarpState* w, const Payload& p, bool acquire);
  void release_fence(WarpState* w, Scope scope);
  void proxy_fence(AgentState* a, bool shared, bool global, uint32_t lanes);
  void check_dealloc(uint32_t cta, uint32_t column, uint32_t columns, const AgentState& by,
                     const Site& site);
  void check_wgmma_fence(const AgentState& a, const WarpState& w);
  void check_init(AgentState* a, BarrierState* b, const Site& site, bool bulk);

  // race_access.cpp
  bool known(Slot slot, Tick tick, const View& v) const;
  bool known_tmem(Slot slot, Tick tick, const View& v, bool pipe_record) const;
  bool ordered(const Record& r, const View& v, Space space, uint64_t addr) const;
  bool strong_pair(const Record& r, const Access& a, const AgentState& me) const;
  bool scope_includes(Scope s, const AgentInfo& a, const AgentInfo& b) const;
  void check_cell(Cell* cell, uint64_t addr, uint16_t mask, const Access& a, const View& v);
  void synchronise(const Access& a, AgentState* me);

  // race_proxy.cpp
  bool fenced(const Record& r, const View& v, int space) const;
  uint32_t lanes_without_fence(const Record& r, Tick known, int space) const;
  void check_proxy(const Record& r, uint16_t mask, uint64_t addr, const Access& a, const View& v);
  Missing missing_edge(const Record& r, const Access& a, const View& v) const;
  std::string hint(Missing m, const Record& r, const Access& a, const View& v) const;
  std::string agent_text(AgentId id) const;
  std::string place_text(Space space, uint64_t addr, uint16_t mask) const;
  static std::string access_text(bool write, bool atomic, Proxy proxy);
  void report_pair(Missing m, const Record& r, uint16_t mask, uint64_t addr, const Access& a,
                   const View& v);
  void report(Missing m, uint32_t pc_a, uint32_t pc_b, int kind, const std::string& text,
              bool fatal);

  RaceOptions options_;
  Reporter* reporter_ = nullptr;
  std::vector<AgentState> agents_;  // from first_agent_ on
  AgentId first_agent_ = 0;
  // A chain of programmatic launches: this one, those that executed griddepcontrol.wait, and where
  // agents and CTAs of each begin.
  uint32_t number_ = 0;
  std::set<uint32_t> waited_;
  std::map<uint32_t, AgentId> launch_agents_;
  std::map<uint32_t, uint32_t> launch_ctas_;
  std::unordered_map<uint32_t, uint32_t> slots_;  // by cluster: components handed out
  std::unordered_map<uint32_t, CtaState> ctas_;
  std::unordered_map<uint64_t, uint32_t> cta_at_;  // smem address >> 24 -> CTA
  std::map<BarrierKey, BarrierState> barriers_;
  std::unordered_map<uint64_t, std::vector<ReleaseEntry>> releases_;
  std::unordered_map<uint32_t, std::vector<Slot>>
      cp_async_slots_;  // by cluster: mbarriers that cp.async signals
  Paged global_;
  std::map<uint64_t, uint64_t> allocations_;  // cudaMalloc: begin -> size
  std::set<std::tuple<uint8_t, uint32_t, uint32_t, int>> seen_;
  int reports_ = 0;
  uint64_t region_key_ = ~0ull;
  Region* region_ = nullptr;
};

}  // namespace race
}  // namespace ptxsim

#endif  // PTXSIM_WATCH_RACE_DETECTOR_H_
