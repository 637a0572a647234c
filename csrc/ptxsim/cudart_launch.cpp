// SPDX-License-Identifier: Apache-2.0
// Replacement libcudart, part 1: registration, launches, function attributes, occupancy, streams,
// events, graphs.
#include <chrono>

#include "cudart_abi.h"
#include "runtime.h"

using ptxsim::Err;
using ptxsim::guarded;
using ptxsim::runtime;
using ptxsim::SimError;

namespace {

struct FatbinWrapper {
  int magic, version;
  const void* data;
  void* extra;
};
constexpr int kWrapperMagic = 0x466243b1;

struct PendingCall {
  SimDim3 grid, block;
  size_t smem;
  void* stream;
};
thread_local std::vector<PendingCall> call_stack;

struct Event {
  double t = 0;
};
double now_ms() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int launch_now(const void* func, SimDim3 g, SimDim3 b, void** args, size_t smem, void* stream,
               const ptxsim::LaunchAttributes& attr = {}) {
  return guarded([&] {
    uint32_t grid[3] = {g.x, g.y, g.z}, block[3] = {b.x, b.y, b.z};
    ptxsim::launch_function(runtime().function(func), grid, block, smem, args, stream, attr);
  });
}

// Errors of earlier launches surface at the next synchronisation.
int synchronise() {
  ptxsim::finish_launches();
  Err e = runtime().pending_error;
  runtime().pending_error = Err::kSuccess;
  return static_cast<int>(e);
}

ptxsim::Program* program_of(void** handle) { return reinterpret_cast<ptxsim::Program*>(handle); }

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  auto* w = static_cast<FatbinWrapper*>(wrapper);
  auto p = std::make_unique<ptxsim::Program>();
  p->fatbin = w->magic == kWrapperMagic ? w->data : wrapper;
  auto* raw = p.get();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().programs.push_back(std::move(p));
  return reinterpret_cast<void**>(raw);
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
  ptxsim::finish_launches();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  auto* p = program_of(handle);
  auto& r = runtime();
  for (auto it = r.functions.begin(); it != r.functions.end();)
    it = it->second->program == p ? r.functions.erase(it) : std::next(it);
  for (auto it = r.host_variables.begin(); it != r.host_variables.end();) {
    it = it->second.program == p ? r.host_variables.erase(it) : std::next(it);
  }
  for (auto it = r.programs.begin(); it != r.programs.end(); ++it) {
    if (it->get() != p) continue;
    p->release();
    r.programs.erase(it);
    break;
  }
}

void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  auto f = std::make_unique<ptxsim::FunctionEntry>();
  f->program = program_of(handle);
  f->name = name;
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().functions[host] = std::move(f);
}

void __cudaRegisterVar(void** handle, char* host, char*, const char* name, int, size_t size, int,
                       int) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().host_variables[host] = {program_of(handle), name, size};
}

void __cudaRegisterManagedVar(void** handle, void** host, char*, const char* name, int, size_t size,
                              int, int) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().host_variables[host] = {program_of(handle), name, size};
  guarded([&] {
    ptxsim::Program* p = program_of(handle);
    p->load();
    *host = p->managed[name] = p->current->variables.at(name);
  });
}

char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(SimDim3 grid, SimDim3 block, size_t smem, void* stream) {
  call_stack.push_back({grid, block, smem, stream});
  return 0;
}

int __cudaPopCallConfiguration(SimDim3* grid, SimDim3* block, size_t* smem, void* stream) {
  if (call_stack.empty()) return static_cast<int>(Err::kInvalidConfiguration);
  PendingCall c = call_stack.back();
  call_stack.pop_back();
  *grid = c.grid;
  *block = c.block;
  *smem = c.smem;
  *static_cast<void**>(stream) = c.stream;
  return 0;
}

int __cudaGetKernel(void** kernel, const void* func) {
  return guarded([&] { *kernel = &runtime().function(func); });
}

int __cudaLaunchKernel(void* kernel, SimDim3 grid, SimDim3 block, void** args, size_t smem,
                       void* stream) {
  return launch_now(kernel, grid, block, args, smem, stream);
}
int __cudaLaunchKernel_ptsz(void* kernel, SimDim3 grid, SimDim3 block, void** args, size_t smem,
                            void* stream) {
  return launch_now(kernel, grid, block, args, smem, stream);
}
int cudaLaunchKernel(const void* func, SimDim3 grid, SimDim3 block, void** args, size_t smem,
                     void* stream) {
  return launch_now(func, grid, block, args, smem, stream);
}
int cudaLaunchKernel_ptsz(const void* func, SimDim3 grid, SimDim3 block, void** args, size_t smem,
                          void* stream) {
  return launch_now(func, grid, block, args, smem, stream);
}
int cudaLaunchCooperativeKernel(const void* func, SimDim3 grid, SimDim3 block, void** args,
                                size_t smem, void* stream) {
  ptxsim::LaunchAttributes a;
  a.cooperative = true;
  return launch_now(func, grid, block, args, smem, stream, a);
}

int cudaLaunchKernelExC(const SimLaunchConfig* c, const void* func, void** args) {
  ptxsim::LaunchAttributes a;
  for (unsigned i = 0; i < c->num_attrs; ++i) {
    const SimLaunchAttribute& at = c->attrs[i];
    if (at.id == 2) a.cooperative = at.value.cooperative != 0;
    if (at.id == 4) {
      a.cluster[0] = at.value.cluster_dim.x;
      a.cluster[1] = at.value.cluster_dim.y;
      a.cluster[2] = at.value.cluster_dim.z;
    }
    if (at.id == 6) a.programmatic = at.value.programmatic_stream_serialization != 0;
  }
  return launch_now(func, c->grid, c->block, args, c->dynamic_smem, c->stream, a);
}
int cudaLaunchKernelExC_ptsz(const SimLaunchConfig* c, const void* func, void** args) {
  return cudaLaunchKernelExC(c, func, args);
}

int cudaGetKernel(void** kernel, const void* func) { return __cudaGetKernel(kernel, func); }

int cudaFuncSetAttribute(const void* func, int attr, int value) {
  return guarded([&] {
    auto& f = runtime().function(func);
    if (attr == 8) {
      uint32_t stat = f.program->kernel(f.name).smem_static;
      uint32_t limit = ptxsim::config().smem_optin();
      if (value < 0 || static_cast<uint32_t>(value) + stat > limit) {
        throw SimError(Err::kInvalidValue,
                       ptxsim::format("%s: %d bytes of dynamic shared memory plus %u static exceed "
                                      "the device limit of %u",
                                      f.name.substr(0, 100).c_str(), value, stat, limit));
      }
      f.max_dynamic_smem = value;
    } else if (attr == 14) {
      f.non_portable_cluster = value != 0;
    }
  });
}

int cudaFuncSetCacheConfig(const void*, int) { return 0; }

int cudaFuncGetAttributes(SimFuncAttributes* a, const void* func) {
  return guarded([&] {
    auto& f = runtime().function(func);
    const ptxsim::Kernel& k = f.program->kernel(f.name);
    std::memset(a, 0, sizeof(*a));
    a->shared_size = k.smem_static;
    a->local_size = k.local_bytes;
    a->max_threads = static_cast<int>(k.max_threads);
    a->num_regs = 32;
    a->ptx_version = k.module->version_major * 10 + k.module->version_minor;
    a->binary_version = ptxsim::config().arch();
    a->max_dynamic_shared = f.max_dynamic_smem ? f.max_dynamic_smem : 48 * 1024;
    a->cluster_width = static_cast<int>(k.cluster[0]);
    a->cluster_height = static_cast<int>(k.cluster[1]);
    a->cluster_depth = static_cast<int>(k.cluster[2]);
    a->cluster_must_be_set = k.cluster[0] != 0;
    a->non_portable_cluster = f.non_portable_cluster;
  });
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* func, int threads,
                                                           size_t smem, unsigned) {
  return guarded([&] {
    auto& f = runtime().function(func);
    const ptxsim::Kernel& k = f.program->kernel(f.name);
    size_t per_block = k.smem_static + smem + 1024, total = ptxsim::config().smem_optin() + 1024;
    *n = 0;
    if (threads <= 0 || threads > 1024 || per_block > total) return;
    *n = static_cast<int>(
        std::min<size_t>({total / per_block, static_cast<size_t>(2048 / threads), 32}));
  });
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* func, int threads,
                                                  size_t smem) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, func, threads, smem, 0);
}
int cudaOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, const void* func, int, int) {
  return guarded([&] {
    auto& f = runtime().function(func);
    *bytes = ptxsim::config().smem_optin() - f.program->kernel(f.name).smem_static;
  });
}
int cudaOccupancyMaxActiveClusters(int* n, const void* func, const SimLaunchConfig* c) {
  return guarded([&] {
    runtime().function(func);
    unsigned ctas = 1;
    for (unsigned i = 0; i < c->num_attrs; ++i) {
      if (c->attrs[i].id == 4)
        ctas = c->attrs[i].value.cluster_dim.x * c->attrs[i].value.cluster_dim.y *
               c->attrs[i].value.cluster_dim.z;
    }
    *n = static_cast<int>(
        std::max(1u, static_cast<unsigned>(ptxsim::config().sms) / std::max(1u, ctas)));
  });
}
int cudaOccupancyMaxPotentialClusterSize(int* n, const void* func, const SimLaunchConfig*) {
  return guarded([&] { *n = runtime().function(func).non_portable_cluster ? 16 : 8; });
}

// ---- streams, events, graphs
int cudaStreamCreateWithPriority(void** s, unsigned, int) {
  auto p = std::make_unique<ptxsim::Stream>();
  *s = p.get();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().streams[*s] = std::move(p);
  return 0;
}
int cudaStreamCreate(void** s) { return cudaStreamCreateWithPriority(s, 0, 0); }
int cudaStreamCreateWithFlags(void** s, unsigned f) {
  return cudaStreamCreateWithPriority(s, f, 0);
}
int cudaStreamDestroy(void* s) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().streams.erase(s);
  return 0;
}
int cudaStreamSynchronize(void*) { return synchronise(); }
int cudaStreamQuery(void*) { return synchronise(); }
int cudaStreamWaitEvent(void*, void*, unsigned) {
  ptxsim::finish_launches();
  return 0;
}
int cudaStreamGetPriority(void*, int* p) {
  *p = 0;
  return 0;
}
int cudaStreamGetFlags(void*, unsigned* f) {
  *f = 0;
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cudaLaunchHostFunc(void* stream, void (*fn)(void*), void* data) {
  return guarded([&] { ptxsim::submit(stream, [fn, data] { fn(data); }); });
}
int cudaDeviceSynchronize() { return synchronise(); }

int cudaEventCreateWithFlags(void** e, unsigned) {
  *e = new Event;
  return 0;
}
int cudaEventCreate(void** e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventDestroy(void* e) {
  delete static_cast<Event*>(e);
  return 0;
}
int cudaEventRecord(void* e, void*) {
  ptxsim::finish_launches();
  static_cast<Event*>(e)->t = now_ms();
  return 0;
}
int cudaEventRecordWithFlags(void* e, void* s, unsigned) { return cudaEventRecord(e, s); }
int cudaEventSynchronize(void*) { return synchronise(); }
int cudaEventQuery(void*) { return synchronise(); }
int cudaEventElapsedTime(float* ms, void* a, void* b) {
  *ms = static_cast<float>(static_cast<Event*>(b)->t - static_cast<Event*>(a)->t);
  return 0;
}

int cudaStreamBeginCapture(void* s, int) {
  return guarded([&] {
    ptxsim::Stream* st = ptxsim::stream_of(s);
    if (!st) throw SimError(Err::kNotSupported, "capture needs a stream made by cudaStreamCreate");
    if (st->capture) throw SimError(Err::kInvalidValue, "the stream is already capturing");
    st->capture = std::make_shared<ptxsim::Graph>();
  });
}
int cudaStreamEndCapture(void* s, void** graph) {
  return guarded([&] {
    ptxsim::Stream* st = ptxsim::stream_of(s);
    if (!st || !st->capture) throw SimError(Err::kInvalidValue, "the stream is not capturing");
    *graph = new std::shared_ptr<ptxsim::Graph>(std::move(st->capture));
    st->capture = nullptr;
  });
}
int cudaStreamIsCapturing(void* s, int* status) {
  ptxsim::Stream* st = ptxsim::stream_of(s);
  *status = st && st->capture ? 1 : 0;
  return 0;
}
int cudaThreadExchangeStreamCaptureMode(int*) { return 0; }
int cudaGraphInstantiate(void** exec, void* graph, unsigned long long) {
  *exec = new std::shared_ptr<ptxsim::Graph>(*static_cast<std::shared_ptr<ptxsim::Graph>*>(graph));
  return 0;
}
int cudaGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long f) {
  return cudaGraphInstantiate(exec, graph, f);
}
int cudaGraphLaunch(void* exec, void* stream) {
  auto g = *static_cast<std::shared_ptr<ptxsim::Graph>*>(exec);
  return guarded([&] {
    auto replay = [g] {
      for (auto& node : g->nodes) node();
    };
    ptxsim::submit(stream, replay, true);
  });
}
int cudaGraphExecDestroy(void* exec) {
  delete static_cast<std::shared_ptr<ptxsim::Graph>*>(exec);
  return 0;
}
int cudaGraphDestroy(void* graph) {
  delete static_cast<std::shared_ptr<ptxsim::Graph>*>(graph);
  return 0;
}
int cudaGraphGetNodes(void* graph, void**, size_t* n) {
  *n = (*static_cast<std::shared_ptr<ptxsim::Graph>*>(graph))->nodes.size();
  return 0;
}

}  // extern "C"
