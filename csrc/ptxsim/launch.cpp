// SPDX-License-Identifier: Apache-2.0
// Launches: checks, storage of resident clusters, host threads, faults of simulated code.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <csetjmp>
#include <csignal>
#include <thread>

#include "lanes.h"
#include "machine.h"

namespace ptxsim {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Window and frames of one resident cluster, reused by later clusters of the same host thread.
struct Slot {
  uint8_t* reserve = nullptr;
  uint8_t* window = nullptr;
  size_t committed[16] = {};
  std::vector<uint8_t> frames;
  uint8_t* frames_aligned = nullptr;
  std::vector<uint8_t> local;
};

Slot& slot_of(uint32_t host_thread, uint32_t slot) {
  static std::mutex mutex;
  static auto& slots = *new std::map<std::pair<uint32_t, uint32_t>, std::unique_ptr<Slot>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& s = slots[{host_thread, slot}];
  if (!s) s = std::make_unique<Slot>();
  return *s;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void prepare_window(Slot& s, uint32_t ranks, uint32_t bytes) {
  if (!s.window) {
    void* p =
        mmap(nullptr, 2 * kWindow, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
      throw SimError(Err::kMemoryAllocation, "cannot reserve the shared memory window");
    s.reserve = static_cast<uint8_t*>(p);
    s.window = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(p), kWindow));
  }
  size_t need = round_up(kSmemBase + bytes, 4096);
  for (uint32_t r = 0; r < ranks; ++r) {
    uint8_t* base = s.window + (static_cast<size_t>(r) << kRankShift);
    if (s.committed[r] < need) {
      if (mprotect(base, need, PROT_READ | PROT_WRITE))
        throw SimError(Err::kMemoryAllocation, "cannot commit shared memory");
      s.committed[r] = need;
    }
    std::memset(base, 0xff, kSmemBase + bytes);  // poison: NaN in every float format
  }
}

// ---- faults: an access of simulated code to unmapped host memory becomes an error of the launch
thread_local sigjmp_buf fault_jump;
thread_local volatile sig_atomic_t fault_armed = 0;
thread_local void* volatile fault_address = nullptr;
struct sigaction old_segv, old_bus;
std::mutex handler_mutex;
int handler_users = 0;

void on_fault(int sig, siginfo_t* info, void* context) {
  if (fault_armed) {
    fault_armed = 0;
    fault_address = info->si_addr;
    siglongjmp(fault_jump, 1);
  }
  struct sigaction& old = sig == SIGSEGV ? old_segv : old_bus;
  if (old.sa_flags & SA_SIGINFO) {
    old.sa_sigaction(sig, info, context);
  } else if (old.sa_handler != SIG_IGN && old.sa_handler != SIG_DFL) {
    old.sa_handler(sig);
  } else {
    signal(sig, SIG_DFL);
    raise(sig);
  }
}

struct FaultGuard {
  FaultGuard() {
    std::lock_guard<std::mutex> lock(handler_mutex);
    if (handler_users++ == 0) {
      struct sigaction a = {};
      a.sa_sigaction = on_fault;
      a.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
      sigaction(SIGSEGV, &a, &old_segv);
      sigaction(SIGBUS, &a, &old_bus);
    }
  }
  ~FaultGuard() {
    std::lock_guard<std::mutex> lock(handler_mutex);
    if (--handler_users == 0) {
      sigaction(SIGSEGV, &old_segv, nullptr);
      sigaction(SIGBUS, &old_bus, nullptr);
    }
  }
};

thread_local Warp* current_warp = nullptr;
thread_local const AsyncOp* current_op = nullptr;
thread_local Grid* current_grid = nullptr;      // whose code ran last on this thread
thread_local std::vector<Cluster*> used_slots;  // by slot number; null = free

void run_thread(const std::vector<Grid*>& chain, uint32_t host_thread) {
  Grid& g = *chain[0];
  current_grid = &g;
  ++g.running;
  used_slots.clear();  // a failed launch leaves its slots behind
  current_warp = nullptr;
  current_op = nullptr;
  try {
    if (sigsetjmp(fault_jump, 1)) {
      std::string where = "an unknown place";
      if (current_op) {
        where = "the asynchronous operation of " +
                current_op->site.kernel->describe(current_op->site.pc);
      } else if (current_warp) {
        where = current_warp->kernel->describe(current_warp->pc());
      }
      current_grid->fail(Err::kIllegalAddress, format("access to unmapped address %p by %s",
                                                      fault_address, where.c_str()));
    } else {
      fault_armed = 1;
      run_cluster_set(chain, host_thread);
    }
  } catch (const SimError& e) {
    current_grid->fail(e.code, e.what());
  } catch (const std::exception& e) {
    current_grid->fail(Err::kUnknown, std::string("internal error: ") + e.what());
  }
  fault_armed = 0;
  --g.running;
}

}  // namespace

void set_current_warp(Warp* w) {
  current_warp = w;
  if (w) current_grid = w->cl->grid;
}

const AsyncOp* set_current_op(const AsyncOp* op) {
  const AsyncOp* before = current_op;
  current_op = op;
  if (op) current_grid = op->warp->cl->grid;
  return before;
}

void Grid::fail(Err c, const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!failed) {
    failed = true;
    code = c;
    error = text;
  }
  abort = true;
}

std::string Kernel::describe(uint32_t pc) const {
  if (pc >= code.size()) return format("pc %u", pc);
  const Source& s = sources[code[pc].stmt];
  std::string t = format("PTX line %d", s.line);
  auto file = [&](int f) {
    auto it = module->files.find(f);
    if (it == module->files.end()) return format("file%d", f);
    size_t slash = it->second.rfind('/');
    return slash == std::string::npos ? it->second : it->second.substr(slash + 1);
  };
  if (s.cuda_line) t += " (" + file(s.file) + ":" + std::to_string(s.cuda_line);
  if (s.cuda_line && s.at_line)
    t += " inlined at " + file(s.at_file) + ":" + std::to_string(s.at_line);
  if (s.cuda_line) t += ")";
  return t + ": " + source_line(*module, s.line);
}

void trap(const Warp& w, Err code, const std::string& text) {
  std::string who = format("CTA %u (%u,%u,%u) warp %u", w.cta->linear, w.cta->id[0], w.cta->id[1],
                           w.cta->id[2], w.id);
  std::string at;
  if (current_op) {
    at = "completing " + w.kernel->describe(current_op->site.pc);
  } else {
    at = format("lanes %08x at ", w.splits.empty() ? 0 : w.splits[w.cur].mask) +
         (w.at ? w.kernel->describe(w.pc()) : "?");
  }
  throw SimError(code, text + "\n  by " + who + " " + at);
}

void need(const Warp& w, const sem::Error& error) {
  if (!error.empty()) trap(w, Err::kIllegalInstruction, error);
}

std::atomic<uint64_t>& launch_counter() {
  static std::atomic<uint64_t> n{0};
  return n;
}

std::vector<LaunchRecord>& launch_records() {
  static auto* list = new std::vector<LaunchRecord>;
  return *list;
}

Observers& observers() {
  static auto* list = new Observers;
  return *list;
}

std::unique_ptr<Cluster> start_cluster(Grid& g, uint32_t linear, uint32_t host_thread) {
  const Kernel& k = *g.kernel;
  auto& used = used_slots;
  size_t free_slot = 0;
  while (free_slot < used.size() && used[free_slot]) ++free_slot;
  if (free_slot == used.size()) used.push_back(nullptr);
  Slot& s = slot_of(host_thread, static_cast<uint32_t>(free_slot));
  auto cl = std::make_unique<Cluster>();
  used[free_slot] = cl.get();
  cl->release_slot = [free_slot] { used_slots[free_slot] = nullptr; };
  cl->grid = &g;
  cl->linear = linear;
  cl->key = g.cluster_base + linear;
  cl->id[0] = linear % g.clusters[0];
  cl->id[1] = linear / g.clusters[0] % g.clusters[1];
  cl->id[2] = linear / (g.clusters[0] * g.clusters[1]);
  cl->host_thread = host_thread;
  cl->observers = g.observers;
  cl->rng = Rng(config().seed * 0x100000001b3ull + g.launch * 1000003 + linear);
  uint32_t ranks = g.cluster[0] * g.cluster[1] * g.cluster[2];
  uint32_t threads = g.block[0] * g.block[1] * g.block[2];
  uint32_t nwarps = (threads + kLanes - 1) / kLanes;
  uint32_t smem = k.smem_static + g.smem_dynamic;
  prepare_window(s, ranks, smem);
  cl->window = s.window;
  size_t frame = round_up(k.frame_bytes, 64);
  size_t total = frame * nwarps * ranks + 64;
  if (s.frames.size() < total) s.frames.resize(total);
  s.frames_aligned =
      reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(s.frames.data()), 64));
  size_t local = round_up(k.local_bytes, 16) * kLanes;
  if (s.local.size() < local * nwarps * ranks) s.local.resize(local * nwarps * ranks);
  cl->ctas = std::vector<Cta>(ranks);
  cl->live_threads = threads * ranks;
  for (uint32_t r = 0; r < ranks; ++r) {
    Cta& cta = cl->ctas[r];
    cta.cl = cl.get();
    cta.rank = r;
    cta.id[0] = cl->id[0] * g.cluster[0] + r % g.cluster[0];
    cta.id[1] = cl->id[1] * g.cluster[1] + r / g.cluster[0] % g.cluster[1];
    cta.id[2] = cl->id[2] * g.cluster[2] + r / (g.cluster[0] * g.cluster[1]);
    cta.linear = (cta.id[2] * g.grid[1] + cta.id[1]) * g.grid[0] + cta.id[0];
    cta.key = g.cta_base + cta.linear;
    cta.smem = s.window + (static_cast<size_t>(r) << kRankShift);
    cta.smem_end = kSmemBase + smem;
    cta.live_warps = nwarps;
    cta.warps = std::vector<Warp>(nwarps);
    if (g.observers) {
      for (Observer* o : *g.observers) {
        o->on_cta_begin(cl->key, cta.key, r, shared_key(*cl, r << kRankShift | kSmemBase), smem);
      }
    }
    for (uint32_t n = 0; n < nwarps; ++n) {
      Warp& w = cta.warps[n];
      w.kernel = &k;
      w.cta = &cta;
      w.cl = cl.get();
      w.id = n;
      w.f = s.frames_aligned + frame * (r * nwarps + n);
      std::memset(w.f, 0xff, k.register_bytes);  // registers start with rubbish, not with zeros
      if (k.local_bytes) {
        w.local = s.local.data() + local * (r * nwarps + n);
        std::memset(w.local, 0xff, local);
      }
      uint32_t count = std::min<uint32_t>(kLanes, threads - n * kLanes);
      w.all = w.live = count == 32 ? kFull : (1u << count) - 1;
      Split split;
      split.mask = w.live;
      w.splits.push_back(split);
      w.agent = new_agent(w, AgentKind::kWarp);
      w.trace = config().trace == format("%u:%u", cta.linear, n) || config().trace == "all";
    }
  }
  return cl;
}

void finish_cluster(Cluster& cl) {
  // Stores still in flight complete before the kernel ends; loads into the memory of a finished CTA
  // are an error.
  while (pump_one(cl)) {
  }
  for (auto& cta : cl.ctas) {
    if (cta.tmem.allocated) {
      throw SimError(Err::kLaunchFailure,
                     format("CTA %u exited with %u Tensor Memory columns allocated (missing "
                            "tcgen05.dealloc); the last allocation was at %s",
                            cta.linear, cta.tmem.allocated,
                            cta.tmem.last_alloc.kernel->describe(cta.tmem.last_alloc.pc).c_str()));
    }
    if (cl.observers) {
      for (Observer* o : *cl.observers) o->on_cta_end(cl.key, cta.key);
    }
    if (cl.grid->in_chain) trigger_dependents(cta);
  }
  cl.release_slot();
}

std::unique_ptr<Launch> prepare_launch(const Kernel& k, const uint32_t grid[3],
                                       const uint32_t block[3], uint32_t smem_dynamic, void** args,
                                       const LaunchAttributes& attr) {
  auto result = std::make_unique<Launch>();
  Grid& g = result->g;
  g.kernel = &k;
  g.launch = launch_counter()++;
  g.cooperative = attr.cooperative;
  g.smem_dynamic = smem_dynamic;
  uint64_t threads = 1, ctas = 1;
  for (int i = 0; i < 3; ++i) {
    g.grid[i] = grid[i];
    g.block[i] = block[i];
    uint32_t c = attr.cluster[i] ? attr.cluster[i] : k.cluster[i] ? k.cluster[i] : 1;
    if (k.cluster[i] && attr.cluster[i] && k.cluster[i] != attr.cluster[i]) {
      throw SimError(Err::kInvalidConfiguration,
                     format("cluster dimension %u in launch attributes, %u in .reqnctapercluster",
                            attr.cluster[i], k.cluster[i]));
    }
    g.cluster[i] = c;
    g.explicit_cluster |= attr.cluster[i] || k.cluster[i];
    if (!grid[i] || !block[i] || grid[i] % c) {
      throw SimError(Err::kInvalidConfiguration,
                     format("%s: grid (%u,%u,%u), block (%u,%u,%u), cluster (%u,%u,%u): every size "
                            "must be positive and the grid divisible by the cluster",
                            k.name.c_str(), grid[0], grid[1], grid[2], block[0], block[1], block[2],
                            g.cluster[0], g.cluster[1], g.cluster[2]));
    }
    g.clusters[i] = grid[i] / c;
    threads *= block[i];
    ctas *= grid[i];
  }
  if (threads > 1024 || threads > k.max_threads) {
    throw SimError(Err::kInvalidConfiguration,
                   format("%s: %llu threads per block, the limit is %u", k.name.c_str(),
                          (unsigned long long)threads, std::min(1024u, k.max_threads)));
  }
  uint32_t ranks = g.cluster[0] * g.cluster[1] * g.cluster[2];
  if (ranks > 16)
    throw SimError(Err::kInvalidConfiguration,
                   format("cluster of %u CTAs, the limit is 16", ranks));
  if (ctas > 0xffffffffull) throw SimError(Err::kInvalidConfiguration, "grid too large");
  uint32_t limit = config().smem_optin();
  if (static_cast<uint64_t>(k.smem_static) + smem_dynamic > limit) {
    throw SimError(
        Err::kInvalidValue,
        format("%s: %u static + %u dynamic bytes of shared memory, the device limit is %u",
               k.name.c_str(), k.smem_static, smem_dynamic, limit));
  }
  g.total = static_cast<uint32_t>(ctas / ranks);
  g.params.resize(k.param_bytes + 256);
  g.param_ptr =
      reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(g.params.data()), 128));
  for (size_t i = 0; i < k.params.size(); ++i) {
    if (!args || !args[i]) throw SimError(Err::kInvalidValue, k.name + ": null kernel argument");
    std::memcpy(g.param_ptr + k.params[i].offset, args[i], k.params[i].size);
  }
  LaunchInfo& info = result->info;
  info.kernel = &k;
  info.index = g.launch;
  std::copy(g.grid, g.grid + 3, info.grid);
  std::copy(g.block, g.block + 3, info.block);
  std::copy(g.cluster, g.cluster + 3, info.cluster);
  info.smem_static = k.smem_static;
  info.smem_dynamic = smem_dynamic;
  result->attributes = attr;
  return result;
}

namespace {

// Where the ids of a dependent launch go on.
struct Chain {
  uint32_t clusters = 0, ctas = 0, launches = 0;
};

void number_launch(Launch& l) {
  static Chain tail;
  uint64_t ctas = static_cast<uint64_t>(l.g.grid[0]) * l.g.grid[1] * l.g.grid[2];
  l.info.dependent = l.attributes.dependent && tail.ctas + ctas < (1u << 31);
  if (!l.info.dependent) {
    tail = Chain();
    next_agent_id() = 1;
  }
  l.g.number = l.info.number = tail.launches++;
  l.g.cluster_base = l.info.cluster_base = tail.clusters;
  l.g.cta_base = l.info.cta_base = tail.ctas;
  l.info.first_agent = next_agent_id();
  tail.clusters += l.g.total;
  tail.ctas += static_cast<uint32_t>(ctas);
}

void record_launch(const Launch& l, double seconds) {
  const Grid& g = l.g;
  LaunchRecord rec;
  rec.kernel = g.kernel->name;
  std::copy(g.grid, g.grid + 3, rec.grid);
  std::copy(g.block, g.block + 3, rec.block);
  std::copy(g.cluster, g.cluster + 3, rec.cluster);
  rec.warp_instructions = g.steps;
  rec.tcgen_mma = g.tcgen_mma;
  rec.mma_sync = g.mma_sync;
  rec.wgmma = g.wgmma;
  rec.seconds = seconds;
  rec.error = g.error;
  if (config().stats) {
    fprintf(
        stderr,
        "ptxsim: %s: %u clusters, %llu warp instructions, %llu tcgen05.mma, %.3f s, %.2f M/s\n",
        rec.kernel.substr(0, 60).c_str(), g.total, (unsigned long long)rec.warp_instructions,
        (unsigned long long)rec.tcgen_mma, rec.seconds,
        rec.seconds > 0 ? static_cast<double>(rec.warp_instructions) / rec.seconds * 1e-6 : 0.0);
  }
  launch_records().push_back(std::move(rec));
}

}  // namespace

void run_launches(const std::vector<std::unique_ptr<Launch>>& chain) {
  static std::mutex one_launch;  // slots and observers belong to one launch at a time
  std::lock_guard<std::mutex> serial(one_launch);
  Observers& obs = observers();
  std::vector<Grid*> grids;
  std::vector<std::unique_ptr<WatchSink>> sinks;
  for (auto& l : chain) {
    Grid& g = l->g;
    g.deadline = now_s() + config().timeout_s * static_cast<double>(chain.size());
    if (!obs.empty()) g.observers = &obs;
    number_launch(*l);
    g.in_chain = chain.size() > 1;
    if (!grids.empty()) g.prerequisite = grids.back();
    grids.push_back(&g);
    sinks.push_back(std::make_unique<WatchSink>(g));
    for (Observer* o : obs) o->on_launch_begin(l->info, sinks.back().get());
  }
  Grid& first = *grids[0];
  int n = config().threads > 0
              ? config().threads
              : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (first.observers || first.cooperative || first.in_chain) n = 1;
  n = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(n), first.total));
  double begin = now_s();
  {
    FaultGuard guard;
    std::vector<std::thread> threads;
    for (int t = 1; t < n; ++t)
      threads.emplace_back([&grids, t] { run_thread(grids, static_cast<uint32_t>(t)); });
    run_thread(grids, 0);
    for (auto& t : threads) t.join();
  }
  double seconds = (now_s() - begin) / static_cast<double>(chain.size());
  for (auto& l : chain) {
    for (Observer* o : obs) o->on_launch_end(l->info);
    record_launch(*l, seconds);
  }
  for (auto& l : chain) {
    const Grid& g = l->g;
    if (g.failed) {
      throw SimError(
          g.code,
          format("kernel %s (launch %llu, seed %llu):\n  %s", g.kernel->name.substr(0, 120).c_str(),
                 (unsigned long long)g.launch, (unsigned long long)config().seed, g.error.c_str()));
    }
  }
}

void launch(const Kernel& k, const uint32_t grid[3], const uint32_t block[3], uint32_t smem_dynamic,
            void** args, const LaunchAttributes& attr) {
  std::vector<std::unique_ptr<Launch>> one;
  one.push_back(prepare_launch(k, grid, block, smem_dynamic, args, attr));
  run_launches(one);
}

}  // namespace ptxsim
