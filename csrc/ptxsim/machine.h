// SPDX-License-Identifier: Apache-2.0
// Machine state: kernels as instruction lists, warps, CTAs, clusters, grids. Semantics are in
// ops_*.cpp, the schedule in sched.cpp.
//
// Registers live in a per-warp frame of cells. A cell is one register of all 32 lanes: 32 x u16 (8-
// and 16-bit types), 32 x u32, 32 x u64, 32 x 2 u64 (b128: low words first, then high words), or
// one u32 lane mask (predicates). Immediates, symbols and special registers are cells too, so an
// operand is always a byte offset into the frame.
//
// Addresses. Global memory is host memory. The shared memory of a resident cluster is a 256 MB
// window of host address space, 16 MB per CTA rank: a shared address is (rank << 24) | (0x400 +
// offset) and the generic address is window + shared address, so mapa and generic accesses need no
// translation. Local and parameter memory are host addresses.
#ifndef PTXSIM_MACHINE_H_
#define PTXSIM_MACHINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base.h"
#include "ptx.h"
#include "sem/types.h"
#include "watch.h"

namespace ptxsim {

constexpr int kLanes = 32;
constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kSmemBase = 0x400;  // the first KB of the window is reserved by the system
constexpr uint32_t kRankShift = 24;
constexpr uint64_t kWindow = 256ull << 20;

struct Warp;
struct Cta;
struct Cluster;
struct Insn;

enum class Status : uint8_t {
  kNext,      // go on behind the instruction
  kJump,      // control flow already updated the splits
  kBlock,     // not done: call the handler again later
  kConverge,  // not done: needs more lanes of the warp at this instruction
  kYield,     // done, but nothing to do until something else happens (failed try_wait)
  kPause,     // done; let the others run (nanosleep)
};

using Handler = Status (*)(Warp&, const Insn&, uint32_t mask);

// Decoded extra data of one instruction (TMA shapes, MMA descriptions, vector operands).
struct Extra {
  virtual ~Extra() = default;
};

enum InsnFlag : uint8_t {
  kGuardNot = 1,
  kBlocking = 2,   // may return kBlock/kConverge: executes with all lanes of its split
  kAlwaysRun = 4,  // runs even if the guard leaves no lane (branches)
};

struct Insn {
  Handler fn = nullptr;
  uint32_t guard = 0;  // frame offset of a predicate, 0 = none
  uint8_t flags = 0;
  uint8_t n = 0;     // small parameter (vector length, ...)
  uint16_t aux = 0;  // small parameter
  uint32_t d = 0, a = 0, b = 0, c = 0;
  int64_t imm = 0;
  const Extra* x = nullptr;
  uint32_t stmt = 0;  // Kernel::sources
};

struct Source {
  int line = 0;  // of the PTX module text
  int file = 0, cuda_line = 0, at_file = 0, at_line = 0;
};

// A frame cell that must hold a value before the first instruction.
struct Preset {
  enum Kind : uint8_t { kValue, kSpecial, kParam, kShared, kLocal };
  uint32_t offset = 0;
  uint8_t bytes = 4;  // per lane; 0 = predicate
  Kind kind = kValue;
  uint64_t value = 0;  // constant, special register id, or byte offset in the space
};

enum Special : uint16_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kSmId,
  kNsmId,
  kGridId,
  kClusterIdX,
  kClusterIdY,
  kClusterIdZ,
  kNclusterIdX,
  kNclusterIdY,
  kNclusterIdZ,
  kClusterCtaidX,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidX,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterCtarank,
  kClusterNctarank,
  kIsExplicitCluster,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kDynamicSmem,
  kTotalSmem,
  kAggrSmem,
  kReservedSmemBegin,
  kReservedSmemEnd,
  kReservedSmemCap,
  kSpecialFixed,  // the rest change while a warp runs and are read by `mov` handlers
  kClock,
  kClockHi,
  kClock64,
  kGlobalTimer,
  kGlobalTimerLo,
  kGlobalTimerHi,
};

struct ParamDesc {
  uint32_t offset, size, align;
};

class Kernel {
 public:
  std::shared_ptr<Module> module;
  std::string name;
  std::vector<Insn> code;
  std::vector<Source> sources;  // by Insn::stmt
  std::vector<std::unique_ptr<Extra>> extras;
  std::vector<Preset> presets;
  uint32_t frame_bytes = 0;
  uint32_t register_bytes = 0;  // frame part that is zeroed/poisoned at warp start
  uint32_t smem_static = 0;     // bytes, dynamic part begins behind it
  uint32_t smem_dynamic_align = 1;
  uint32_t local_bytes = 0;  // per lane
  uint32_t param_bytes = 0;
  std::vector<ParamDesc> params;
  uint32_t cluster[3] = {0, 0, 0};  // .reqnctapercluster
  uint32_t max_threads = 1024;
  int arch = 0;
  std::string describe(uint32_t pc) const;
};

// ---- Configuration ------------------------------------------------------------------------------
enum class Mode : uint8_t { kEager, kRandom, kLazy };
// When a grid launched with the programmatic attribute begins: behind its primary; once all CTAs of
// the primary have executed griddepcontrol.launch_dependents or exited; at once.
enum class Pdl : uint8_t { kOff, kTrigger, kStart };

struct Config {
  int device = 0;  // compute capability * 10; 0 = that of the first registered program
  int sms = 16;
  uint64_t seed = 1;
  Mode mode = Mode::kRandom;
  Pdl pdl = Pdl::kOff;
  int threads = 0;                // 0: one per core
  int resident = 1;               // clusters that run interleaved on one thread
  double timeout_s = 600;         // of one launch
  bool tmem_st_at_issue = false;  // tcgen05.st lands at issue instead of anywhere up to wait::st
  bool stats = false;
  std::string trace;  // "cta:warp" or empty
  std::string watch = "none";
  std::string ptx;           // file whose PTX replaces the image with the same entry names
  uint64_t ptx_version = 0;  // counts changes of `ptx`
  sem::Accumulate accumulate = sem::Accumulate::kExact;
  uint32_t smem_optin() const;
  int auto_arch = 0;  // the target of the program in use, while device is 0
  int arch() const { return device ? device : auto_arch ? auto_arch : 100; }
  // Sets one option by its environment name without the PTXSIM_ prefix; throws
  // SimError(kInvalidValue) on a bad name or value.
  void set(const std::string& name, const std::string& value);
};
Config& config();  // initialised from the environment

// What a launch did, kept for tests.
struct LaunchRecord {
  std::string kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint64_t warp_instructions = 0;
  uint64_t tcgen_mma = 0, mma_sync = 0, wgmma = 0;
  double seconds = 0;
  std::string error;
};
std::vector<LaunchRecord>& launch_records();
// Launches so far; part of the seed of a schedule. ptxsim_clear() resets it, so that a test does
// not depend on its neighbours.
std::atomic<uint64_t>& launch_counter();

// ---- Barriers -----------------------------------------------------------------------------------
// The 8 bytes of an mbarrier in shared memory are the packed state; the simulator keeps the truth
// here and compares at each use, so a stray write to a barrier is noticed.
struct Mbarrier {
  uint32_t expected = 0;
  int64_t pending = 0;
  int64_t tx = 0;
  uint64_t phase = 0;
  uint64_t packed() const;
};

struct NamedBarrier {
  uint32_t arrived = 0;   // threads
  uint32_t expected = 0;  // threads, 0 until somebody named it
  bool all = false;       // expects the whole CTA
  uint64_t phase = 0;
  uint32_t waiting = 0;
  uint32_t red_and = 1, red_or = 0, red_popc = 0;     // of the running phase
  uint32_t done_and = 1, done_or = 0, done_popc = 0;  // of the last completed phase
};

// ---- Asynchronous operations --------------------------------------------------------------------
struct AsyncOp {
  AgentId agent = 0;
  AgentKind kind = AgentKind::kOther;
  Warp* warp = nullptr;
  Cta* cta = nullptr;
  Site site;
  // The effect, in up to two steps: `read` takes its operands out of shared memory (bulk stores),
  // `run` does the rest.
  std::function<void()> read, run;
  bool did_read = false;
  bool done = false;
  bool in_pool = false;   // may complete at any time by itself
  bool held = false;      // not all participants have issued it yet
  AgentId parts[4] = {};  // wgmma: the agents of the four warps that issued it together
};
using AsyncPtr = std::shared_ptr<AsyncOp>;

struct Split {
  uint32_t pc = 0;
  uint32_t mask = 0;
  uint32_t stage = 0;  // progress inside a blocking instruction; 0 = not entered
  uint64_t key = 0;    // what the stage waits for
  bool tried = false;  // stalled since the last change
};

// Async bookkeeping of one lane: committed groups not yet waited for.
struct LaneGroups {
  std::vector<AsyncPtr> open;                   // not committed
  std::deque<std::vector<AsyncPtr>> committed;  // oldest first
};

struct Warp {
  uint8_t* f = nullptr;
  const Kernel* kernel = nullptr;
  Cta* cta = nullptr;
  Cluster* cl = nullptr;
  uint32_t id = 0;    // in the CTA
  uint32_t live = 0;  // lanes that have not exited
  uint32_t all = 0;   // lanes that exist
  AgentId agent = 0;
  std::vector<Split> splits;
  uint32_t cur = 0;    // index of the running split
  uint64_t steps = 0;  // executed instructions
  const Insn* at = nullptr;
  uint8_t* local = nullptr;    // 32 lanes x Kernel::local_bytes
  uint64_t cluster_phase = 0;  // barrier.cluster phase that the last arrive joined
  uint32_t cluster_arrived = 0;
  uint64_t warp_barrier_phase = 0;
  uint32_t backward = 0;
  bool waiting = false;      // stalled on a barrier, not computing
  bool failed_wait = false;  // the last mbarrier test failed
  uint32_t wait_kernel_pc = 0;
  uint32_t last_wait_addr = 0;
  uint64_t last_wait_phase = 0;
  LaneGroups cp_async[kLanes];
  std::unique_ptr<LaneGroups[]> bulk;     // allocated at first use
  std::deque<AsyncPtr> tmem_ld, tmem_st;  // until tcgen05.wait
  // In-order pipe of the tcgen05.mma/cp/shift/commit that this warp issued. The order between warps
  // is not guaranteed, so pipes of different warps advance independently.
  std::deque<AsyncPtr> tcgen;
  AgentId last_pipe_agent = 0;
  LaneGroups wgmma;  // groups of the warp
  uint64_t wgmma_count = 0;
  AgentId last_wgmma = 0;
  bool trace = false;

  template <class T>
  T* cell(uint32_t offset) const {
    return reinterpret_cast<T*>(f + offset);
  }
  Split& split() { return splits[cur]; }
  uint32_t pc() const { return static_cast<uint32_t>(at - kernel->code.data()); }
  Site site() const { return Site{kernel, pc()}; }
};

struct TmemState {
  std::vector<uint32_t> cells;  // [128][512], allocated at first use
  uint16_t owner[512] =
      {};  // 0 = free, else allocation number (per 32 columns granularity, stored per column)
  uint16_t next = 1;
  bool relinquished = false;
  uint32_t allocated = 0;  // columns
  Site last_alloc;
};

struct Cta {
  Cluster* cl = nullptr;
  uint32_t linear = 0;     // in the grid
  uint32_t key = 0;        // names it to watchers, unique over dependent launches
  bool triggered = false;  // griddepcontrol.launch_dependents, or exited
  uint32_t rank = 0;       // in the cluster
  uint32_t id[3] = {0, 0, 0};
  uint8_t* smem = nullptr;  // host address of shared address (rank << 24)
  uint32_t smem_end = 0;    // first invalid offset inside the rank's window
  std::vector<Warp> warps;
  uint32_t live_warps = 0;
  NamedBarrier barriers[16];
  std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by offset inside the rank's window
  TmemState tmem;
  std::map<std::pair<uint32_t, uint64_t>, std::shared_ptr<void>>
      wgmma_pending;  // (warpgroup, sequence)
};

struct ClusterBarrier {
  uint32_t arrived = 0;  // threads
  uint64_t phase = 0;
};

struct Grid;

struct Cluster {
  Grid* grid = nullptr;
  uint32_t linear = 0;
  uint32_t key = 0;  // as Cta::key
  uint32_t id[3] = {0, 0, 0};
  uint8_t* window = nullptr;
  std::vector<Cta> ctas;
  ClusterBarrier barrier;
  uint32_t live_threads = 0;
  std::vector<AsyncPtr> pool;  // operations that may complete at any time
  std::vector<Warp*> pipes;    // warps with a non-empty tcgen05 pipe
  Rng rng;
  bool progress = false;  // something other than register work happened since the scheduler looked
  uint64_t steps = 0, tcgen_mma = 0, mma_sync = 0, wgmma = 0;
  Observers* observers = nullptr;  // null when nobody watches
  uint8_t* frames = nullptr;       // storage of all warps
  uint32_t host_thread = 0;
  std::function<void()> release_slot;
};

struct LaunchAttributes {
  uint32_t cluster[3] = {0, 0, 0};
  bool cooperative = false;
  bool programmatic = false;
  bool dependent = false;  // programmatic, and a kernel is what came before it in its stream
};

struct Grid {
  const Kernel* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  uint32_t clusters[3] = {1, 1, 1};
  bool explicit_cluster = false;
  uint32_t smem_dynamic = 0;
  std::vector<uint8_t> params;  // 64-byte aligned copy below
  uint8_t* param_ptr = nullptr;
  uint64_t launch = 0;
  uint32_t number = 0;  // LaunchInfo::number
  uint32_t total = 0;
  std::atomic<uint32_t> next{0};  // next cluster to start; try_cancel takes from here too
  std::atomic<bool> abort{false};
  std::atomic<uint64_t> steps{0};
  std::atomic<uint32_t> running{0};
  std::atomic<uint64_t> tcgen_mma{0}, mma_sync{0}, wgmma{0};
  std::mutex error_mutex;
  bool failed = false;
  Err code = Err::kSuccess;
  std::string error;
  bool cooperative = false;
  Observers* observers = nullptr;
  uint32_t cluster_base = 0, cta_base = 0;  // of the keys
  Grid* prerequisite = nullptr;             // runs together with this grid and comes first
  bool in_chain = false;                    // others run together with it
  uint32_t triggered = 0;                   // CTAs
  bool complete = false;
  double deadline = 0;
  std::unordered_map<AgentId, AgentInfo> agents;  // only while watched
  void fail(Err code, const std::string& text);
};

// A checked launch. Throws SimError. `args` as cudaLaunchKernel gets them.
struct Launch {
  Grid g;
  LaunchInfo info;
  LaunchAttributes attributes;
};
std::unique_ptr<Launch> prepare_launch(const Kernel& kernel, const uint32_t grid[3],
                                       const uint32_t block[3], uint32_t smem_dynamic, void** args,
                                       const LaunchAttributes& attributes);
// Runs launches to their end, each but the first a dependent of the one before it. Throws the first
// error.
void run_launches(const std::vector<std::unique_ptr<Launch>>& chain);
void launch(const Kernel& kernel, const uint32_t grid[3], const uint32_t block[3],
            uint32_t smem_dynamic, void** args, const LaunchAttributes& attributes);

// Attaches or detaches a watcher for all later launches.
Observers& observers();

// ---- Helpers of the instruction handlers --------------------------------------------------------
[[noreturn]] void trap(const Warp& w, Err code, const std::string& text);
void need(const Warp& w, const sem::Error& error);  // traps when the text is not empty

inline bool watched(const Warp& w) { return __builtin_expect(w.cl->observers != nullptr, 0); }

// Shared memory: host pointer of a shared address after the bounds check.
uint8_t* shared_ptr_checked(const Warp& w, uint64_t addr, uint32_t size);
Cta& cta_of_shared(const Warp& w, uint32_t addr);
// Canonical shared address for watchers.
inline uint64_t shared_key(const Cluster& cl, uint32_t addr) {
  return static_cast<uint64_t>(cl.key) << 32 | addr;
}

// mbarrier.cpp
void mbar_init(Warp& w, uint32_t addr, uint32_t count);
void mbar_inval(Warp& w, uint32_t addr);
Mbarrier& mbar_at(const Warp& w, uint32_t addr);
// Arrivals and transaction bytes; completes the phase when both counts reach zero. Returns the
// phase it joined. `lanes`: those that execute the arrive, for watchers.
uint64_t mbar_arrive(Warp& w, AgentId agent, uint32_t addr, uint32_t count, int64_t tx, Order order,
                     const Site& site, uint32_t lanes = kFull);

// async.cpp
std::atomic<AgentId>& next_agent_id();
AgentId new_agent(Warp& w, AgentKind kind);
AsyncPtr new_async(Warp& w, AgentKind kind);
void pool_add(Warp& w, const AsyncPtr& op);  // may complete by itself from now on
void pipe_add(Warp& w, const AsyncPtr& op);  // in-order tcgen05 pipe of the warp
void force_read(AsyncOp& op);
void force(AsyncOp& op);
bool pump_one(Cluster& cl);   // completes one pending operation; false if none
void pump_some(Cluster& cl);  // mode-dependent, called between warp turns

// Reports of watchers for one launch.
class WatchSink : public Reporter {
 public:
  explicit WatchSink(Grid& g) : grid_(g) {}
  void report(const char* watcher, const std::string& text, bool fatal) override;
  std::string describe(const Site& site) const override;
  const AgentInfo* agent(AgentId id) const override;

 private:
  Grid& grid_;
  int printed_ = 0;
};

void select_watchers(const std::string& names);  // watchers.cpp
void named_barriers_after_exit(Warp& w);         // ops_bar.cpp
void trigger_dependents(Cta& cta);               // ops_bar.cpp
void set_current_warp(Warp* w);                  // for fault reports
// The asynchronous operation whose effect is being applied on this thread, for reports; returns the
// previous one.
const AsyncOp* set_current_op(const AsyncOp* op);

// ops_mma.cpp: reads of 16-byte chunks at addresses of the CTA's shared window; `used` bytes of
// each (12 or 8 where 6- and 4-bit elements are padded).
void emit_chunks(Warp& w, const AsyncOp& op, Cta& cta, const std::vector<uint32_t>& chunks,
                 uint32_t used = 16);

// sched.cpp
void run_cluster_set(const std::vector<Grid*>& chain, uint32_t host_thread);
std::string deadlock_report(Cluster& cl);

}  // namespace ptxsim

#endif  // PTXSIM_MACHINE_H_
