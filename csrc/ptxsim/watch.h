// SPDX-License-Identifier: Apache-2.0
// Observer interface of the simulator. The core emits events; watchers (races, uninitialised data,
// bounds, phases, trace) consume them and never change what the program computes. An event is
// emitted AFTER its effect on values, in execution order of one cluster; the events of one cluster
// come from one OS thread. While any observer is attached, launches run on one thread, so a watcher
// needs no locks.
//
// Agents. Every warp is an agent from its first instruction to its exit; every asynchronous
// operation (TMA or bulk copy, cp.async, tcgen05.mma/cp/commit/ld/st, wgmma) is an agent of its
// own, created by the warp that issued it (on_agent_begin(child, parent): everything the parent did
// before the issue happens before the child). Agent ids are never reused within a launch.
//
// Happens-before edges, and the event that carries each:
//   program order of a warp                              implicit (same agent)
//   issue of an asynchronous operation                   on_agent_begin
//   in-order pipes (tcgen05.mma/cp/commit of one warp)   on_order(before, after)
//   completion seen by the issuer (wait_group, wait::ld) on_join
//   commit / complete_tx / arrive on an mbarrier         on_arrive(agent, barrier, phase)
//   successful wait on an mbarrier phase                 on_wait(agent, barrier, phase)
//   bar.sync, bar.arrive, barrier.cluster, bar.warp.sync on_arrive + on_wait on a barrier of that
//   kind acquire/release/fence on generic memory              Access::order and on_fence kernel
//   boundaries                                    on_launch_begin / on_launch_end (everything
//   before, everything after)
#ifndef PTXSIM_WATCH_H_
#define PTXSIM_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ptxsim {

enum class Space : uint8_t { kGlobal, kShared, kTmem, kLocal, kParam };

// Which hardware path made the access. kAsync: TMA, cp.async.bulk and the smem operands of
// wgmma/tcgen05 (the "async proxy"); non-bulk cp.async is generic. kTensormap: descriptor fetch of
// a tensor copy.
enum class Proxy : uint8_t { kGeneric, kAsync, kTensormap };

enum class Rw : uint8_t { kRead, kWrite, kAtomic };

// Memory order of a generic access or fence. kWeak accesses race with anything unordered; kRelaxed
// (and stronger) ones do not race with each other.
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst };
enum class Scope : uint8_t { kNone, kCta, kCluster, kGpu, kSys };

enum class AgentKind : uint8_t {
  kWarp,
  kCpAsync,    // non-bulk cp.async of one warp instruction
  kBulkLoad,   // cp.async.bulk(.tensor) into shared memory
  kBulkStore,  // cp.async.bulk(.tensor / reduce) out of shared memory
  kTcgenMma,
  kTcgenCp,
  kTcgenShift,
  kTcgenCommit,
  kTcgenLd,
  kTcgenSt,
  kWgmma,
  kCpAsyncArrive,  // cp.async.mbarrier.arrive
  kOther,
};

using AgentId = uint32_t;

// Where an event comes from. `pc` indexes the kernel's instruction list; describe() below turns it
// into text with the PTX line and the CUDA source line.
struct Site {
  const class Kernel* kernel = nullptr;
  uint32_t pc = 0;
};

struct AgentInfo {
  AgentId id = 0;
  AgentKind kind = AgentKind::kWarp;
  AgentId parent = 0;     // the issuing warp; itself for a warp
  uint32_t cluster = 0;   // linear cluster id in the grid (+ LaunchInfo::cluster_base)
  uint32_t cta = 0;       // linear CTA id in the grid (+ LaunchInfo::cta_base)
  uint32_t launch = 0;    // LaunchInfo::number
  uint32_t cta_rank = 0;  // rank inside the cluster
  uint32_t warp = 0;      // warp index inside the CTA (of the issuer, for asynchronous operations)
  Site site;
};

// One contiguous piece of memory. Shared: addr = (cluster << 32) | (cta_rank << 24) | offset, so it
// names one byte of the grid. Tmem: addr = (cta << 32) | (lane << 16) | column, size = number of
// consecutive 32-bit columns, rows = number of consecutive lanes. Others: the host address.
struct Access {
  AgentId agent = 0;
  Space space = Space::kGlobal;
  Rw rw = Rw::kRead;
  Proxy proxy = Proxy::kGeneric;
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  uint64_t addr = 0;
  uint32_t size = 0;    // bytes (columns for Tmem)
  uint32_t rows = 1;    // Tmem: consecutive lanes of the rectangle
  uint32_t lane = ~0u;  // lane of the warp that made the access, ~0 for asynchronous operations
  Site site;
};

enum class BarrierKind : uint8_t { kNamed, kCluster, kWarp, kMbarrier };

// kNamed: index = barrier number, owner = CTA id in the grid. kCluster: owner = cluster id. kWarp:
// owner = CTA id, index = warp. kMbarrier: addr as in Access (space kShared), owner = CTA id that
// holds it.
struct BarrierRef {
  BarrierKind kind = BarrierKind::kNamed;
  uint32_t owner = 0;
  uint32_t index = 0;
  uint64_t addr = 0;
};

enum class Fence : uint8_t {
  kThread,            // fence / membar: order and scope given
  kMbarrierInit,      // fence.mbarrier_init.release.cluster
  kProxyAsync,        // fence.proxy.async (all spaces)
  kProxyAsyncShared,  // fence.proxy.async.shared::{cta,cluster}
  kProxyAsyncGlobal,  // fence.proxy.async.global
  kProxyAlias,
  kProxyTensormap,   // fence.proxy.tensormap::generic.{acquire,release}
  kTcgenBeforeSync,  // tcgen05.fence::before_thread_sync
  kTcgenAfterSync,   // tcgen05.fence::after_thread_sync
  kWgmma,            // wgmma.fence.sync.aligned
};

// What a join waits for. kFull: all effects of the operation are visible to the joiner. kRead: only
// its reads are over (cp.async.bulk.wait_group.read).
enum class Join : uint8_t { kFull, kRead };

struct LaunchInfo {
  const class Kernel* kernel = nullptr;
  uint64_t index = 0;  // launches so far in this process
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster[3] = {1, 1, 1};
  uint32_t smem_static = 0, smem_dynamic = 0;
  // Launched with the programmatic attribute behind another kernel: what that one did is visible
  // only behind griddepcontrol.wait. `number` counts from 0 along such a chain, and cluster, CTA
  // and agent ids go on along it.
  bool dependent = false;
  uint32_t number = 0;
  uint32_t cluster_base = 0, cta_base = 0;
  AgentId first_agent = 1;
};

// Reports of watchers go to this sink: printed on stderr with the site and, if `fatal`, the launch
// fails with cudaErrorLaunchFailure. Implemented by the core.
class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void report(const char* watcher, const std::string& text, bool fatal = true) = 0;
  // "warp 3 of CTA 0: `st.shared.b32 ...` (PTX line 120, kernel.cu:55)"
  virtual std::string describe(const Site& site) const = 0;
  virtual const AgentInfo* agent(AgentId id) const = 0;
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_launch_begin(const LaunchInfo&, Reporter*) {}
  virtual void on_launch_end(const LaunchInfo&) {}
  // CTA start and end; smem_base/size: canonical shared address range of the CTA. At the end all
  // its warps have exited.
  virtual void on_cta_begin(uint32_t cluster, uint32_t cta, uint32_t rank, uint64_t smem_addr,
                            uint32_t smem_size) {}
  virtual void on_cta_end(uint32_t cluster, uint32_t cta) {}

  virtual void on_agent_begin(const AgentInfo&) {}
  virtual void on_agent_end(AgentId) {}
  virtual void on_order(AgentId before, AgentId after) {}
  virtual void on_join(AgentId joiner, AgentId op, Join what) {}

  virtual void on_access(const Access&) {}

  virtual void on_barrier_init(AgentId, const BarrierRef&, uint32_t count, const Site&) {}
  virtual void on_barrier_inval(AgentId, const BarrierRef&, const Site&) {}
  // `count` arrivals by this agent join the phase `phase` (0, 1, 2, ...; not the parity) of the
  // barrier. Named and cluster barriers number their phases too. tx = transaction bytes added
  // (expect_tx, positive) or completed (complete_tx, negative).
  // lanes: those of the warp that executed the instruction; all for asynchronous operations.
  virtual void on_arrive(AgentId, const BarrierRef&, uint64_t phase, uint32_t count, int64_t tx,
                         Order, const Site&, uint32_t lanes = ~0u) {}
  virtual void on_phase_complete(const BarrierRef&, uint64_t phase) {}
  // A wait that was satisfied: `phase` is the completed phase that the agent observed.
  virtual void on_wait(AgentId, const BarrierRef&, uint64_t phase, Order, const Site&) {}
  // test_wait / try_wait that returned false.
  virtual void on_wait_failed(AgentId, const BarrierRef&, uint64_t phase, const Site&) {}

  // griddepcontrol.wait: the launch before this one is complete and visible.
  virtual void on_grid_wait(AgentId, const Site&) {}

  virtual void on_fence(AgentId, Fence, Order, Scope, const Site&, uint32_t lanes = ~0u) {}

  // Memory management. how: "cudaMalloc", "cudaFree", "tcgen05.alloc", "tcgen05.dealloc", "static".
  // Tmem: addr, size in columns with lane 0; `by` is the warp that executes the instruction.
  virtual void on_alloc(Space, uint64_t addr, uint64_t size, const char* how) {}
  virtual void on_free(Space, uint64_t addr, uint64_t size, const char* how, AgentId by = 0,
                       const Site& = {}) {}
};

// Fan-out used by the core; empty when nothing watches.
using Observers = std::vector<Observer*>;

}  // namespace ptxsim

#endif  // PTXSIM_WATCH_H_
