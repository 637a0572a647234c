// SPDX-License-Identifier: Apache-2.0
// Replacement libcudart, part 2: memory, device queries, errors, driver entry points.
#include <algorithm>

#include "cudart_abi.h"
#include "ranges.h"
#include "runtime.h"
#include "sem/tma.h"

using ptxsim::config;
using ptxsim::Err;
using ptxsim::guarded;
using ptxsim::runtime;
using ptxsim::SimError;

namespace {

void* variable_address(const void* symbol, size_t* size = nullptr) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  auto it = runtime().host_variables.find(symbol);
  if (it == runtime().host_variables.end())
    throw SimError(Err::kInvalidSymbol, "unknown device symbol");
  it->second.program->load();
  auto& variables = it->second.program->current->variables;
  auto v = variables.find(it->second.name);
  if (v == variables.end())
    throw SimError(Err::kInvalidSymbol, "the PTX has no variable " + it->second.name);
  if (size) *size = it->second.size;
  return v->second;
}

int copy(void* dst, const void* src, size_t n, void* stream) {
  return guarded([&] {
    if (n && (!dst || !src)) throw SimError(Err::kInvalidValue, "cudaMemcpy: null pointer");
    ptxsim::submit(stream, [=] { std::memmove(dst, src, n); });
  });
}

int copy2d(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
           void* stream) {
  return guarded([&] {
    if (width > dpitch || width > spitch)
      throw SimError(Err::kInvalidValue, "cudaMemcpy2D: width exceeds a pitch");
    ptxsim::submit(stream, [=] {
      for (size_t y = 0; y < height; ++y) {
        std::memmove(static_cast<char*>(dst) + y * dpitch,
                     static_cast<const char*>(src) + y * spitch, width);
      }
    });
  });
}

int allocate(void** p, size_t n, const char* what) {
  return guarded([&] {
    if (!p) throw SimError(Err::kInvalidValue, "cudaMalloc: null result pointer");
    *p = n ? ptxsim::device_alloc(n, what) : nullptr;
  });
}

int release(void* p, const char* what) {
  ptxsim::finish_launches();
  return guarded([&] {
    if (p && !ptxsim::device_free(p))
      throw SimError(Err::kInvalidDevicePointer, std::string(what) + ": not an allocation");
  });
}

struct ErrorName {
  int code;
  const char *name, *text;
};
const ErrorName kErrors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {17, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {209, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {218, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    {222, "cudaErrorUnsupportedPtxVersion",
     "the provided PTX was compiled with an unsupported toolchain."},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {999, "cudaErrorUnknown", "unknown error"},
};

int device_attribute(int attr) {
  ptxsim::choose_device_early();
  int arch = config().arch();
  switch (attr) {
    case 1:
      return 1024;
    case 2:
    case 3:
      return 1024;
    case 4:
      return 64;
    case 5:
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case 8:
      return 49152;
    case 9:
      return 65536;
    case 10:
      return 32;
    case 11:
      return 2147483647;
    case 12:
    case 82:
      return 65536;
    case 13:
      return 1000000;
    case 14:
      return 512;
    case 16:
      return config().sms;
    case 19:
    case 31:
    case 41:
    case 78:
    case 79:
    case 80:
    case 83:
    case 88:
    case 89:
    case 91:
    case 95:
    case 99:
    case 115:
      return 1;
    case 36:
      return 1000000;
    case 37:
      return 4096;
    case 38:
      return 1 << 26;
    case 39:
      return 2048;
    case 40:
      return 1;
    case 51:
      return 32;
    case 75:
      return arch / 10;
    case 76:
      return arch % 10;
    case 81:
      return static_cast<int>(config().smem_optin()) + 1024;
    case 87:
      return 2;
    case 97:
      return static_cast<int>(config().smem_optin());
    case 106:
      return 32;
    case 111:
      return 1024;
    case 120:
      return arch >= 90;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

int cudaMalloc(void** p, size_t n) { return allocate(p, n, "cudaMalloc"); }
int cudaMallocManaged(void** p, size_t n, unsigned) { return allocate(p, n, "cudaMallocManaged"); }
int cudaMallocAsync(void** p, size_t n, void*) { return allocate(p, n, "cudaMallocAsync"); }
int cudaMallocFromPoolAsync(void** p, size_t n, void*, void*) {
  return allocate(p, n, "cudaMallocAsync");
}
int cudaMallocHost(void** p, size_t n) { return allocate(p, n, "cudaMallocHost"); }
int cudaHostAlloc(void** p, size_t n, unsigned) { return allocate(p, n, "cudaHostAlloc"); }
int cudaMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return allocate(p, *pitch * height, "cudaMallocPitch");
}
int cudaFree(void* p) { return release(p, "cudaFree"); }
int cudaFreeAsync(void* p, void*) { return release(p, "cudaFreeAsync"); }
int cudaFreeHost(void* p) { return release(p, "cudaFreeHost"); }
int cudaHostRegister(void* p, size_t n, unsigned) {
  ptxsim::add_range(reinterpret_cast<uint64_t>(p), n, "cudaHostRegister");
  return 0;
}
int cudaHostUnregister(void* p) {
  ptxsim::remove_range(reinterpret_cast<uint64_t>(p));
  return 0;
}
int cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return 0;
}

int cudaMemcpy(void* d, const void* s, size_t n, int) { return copy(d, s, n, nullptr); }
int cudaMemcpyAsync(void* d, const void* s, size_t n, int, void* stream) {
  return copy(d, s, n, stream);
}
int cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) { return copy(d, s, n, nullptr); }
int cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, int) {
  return copy2d(d, dp, s, sp, w, h, nullptr);
}
int cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, int,
                      void* stream) {
  return copy2d(d, dp, s, sp, w, h, stream);
}
int cudaMemsetAsync(void* p, int value, size_t n, void* stream) {
  return guarded([&] {
    if (n && !p) throw SimError(Err::kInvalidValue, "cudaMemset: null pointer");
    ptxsim::submit(stream, [=] { std::memset(p, value, n); });
  });
}
int cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
int cudaMemset2DAsync(void* p, size_t pitch, int value, size_t w, size_t h, void* stream) {
  return guarded([&] {
    ptxsim::submit(stream, [=] {
      for (size_t y = 0; y < h; ++y) std::memset(static_cast<char*>(p) + y * pitch, value, w);
    });
  });
}
int cudaMemset2D(void* p, size_t pitch, int value, size_t w, size_t h) {
  return cudaMemset2DAsync(p, pitch, value, w, h, nullptr);
}
int cudaMemcpyToSymbolAsync(const void* symbol, const void* src, size_t n, size_t offset, int,
                            void* stream) {
  return guarded([&] {
    size_t size = 0;
    char* p = static_cast<char*>(variable_address(symbol, &size));
    if (offset + n > size)
      throw SimError(Err::kInvalidValue, "cudaMemcpyToSymbol: past the end of the variable");
    ptxsim::submit(stream, [=] { std::memcpy(p + offset, src, n); });
  });
}
int cudaMemcpyToSymbol(const void* symbol, const void* src, size_t n, size_t offset, int kind) {
  return cudaMemcpyToSymbolAsync(symbol, src, n, offset, kind, nullptr);
}
int cudaMemcpyFromSymbolAsync(void* dst, const void* symbol, size_t n, size_t offset, int,
                              void* stream) {
  return guarded([&] {
    size_t size = 0;
    const char* p = static_cast<const char*>(variable_address(symbol, &size));
    if (offset + n > size)
      throw SimError(Err::kInvalidValue, "cudaMemcpyFromSymbol: past the end of the variable");
    ptxsim::submit(stream, [=] { std::memcpy(dst, p + offset, n); });
  });
}
int cudaMemcpyFromSymbol(void* dst, const void* symbol, size_t n, size_t offset, int kind) {
  return cudaMemcpyFromSymbolAsync(dst, symbol, n, offset, kind, nullptr);
}
int cudaGetSymbolAddress(void** p, const void* symbol) {
  return guarded([&] { *p = variable_address(symbol); });
}
int cudaGetSymbolSize(size_t* n, const void* symbol) {
  return guarded([&] { variable_address(symbol, n); });
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = *total = 16ull << 30;
  return 0;
}
int cudaPointerGetAttributes(SimPointerAttributes* a, const void* p) {
  std::memset(a, 0, sizeof(*a));
  ptxsim::MemoryRange r;
  bool device = ptxsim::find_range(reinterpret_cast<uint64_t>(p), &r);
  a->type = device ? 2 : 0;
  a->device_pointer = const_cast<void*>(p);
  a->host_pointer = const_cast<void*>(p);
  return 0;
}

int cudaGetDeviceCount(int* n) {
  *n = 1;
  return 0;
}
int cudaGetDevice(int* d) {
  *d = 0;
  return 0;
}
int cudaSetDevice(int d) { return d == 0 ? 0 : static_cast<int>(Err::kInvalidDevice); }
int cudaInitDevice(int d, unsigned, unsigned) { return cudaSetDevice(d); }
int cudaSetDeviceFlags(unsigned) { return 0; }
int cudaDeviceReset() { return 0; }
int cudaDeviceSetLimit(int, size_t) { return 0; }
int cudaDeviceGetLimit(size_t* v, int) {
  *v = 0;
  return 0;
}
int cudaDeviceSetCacheConfig(int) { return 0; }
int cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return 0;
}
int cudaProfilerStart() { return 0; }
int cudaProfilerStop() { return 0; }
int cudaDriverGetVersion(int* v) {
  // why: CUTLASS edits the opaque tensor map when the driver is 13.1 or older.
  *v = 13020;
  return 0;
}
int cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attr, int device) {
  if (device != 0) return static_cast<int>(Err::kInvalidDevice);
  *value = device_attribute(attr);
  return 0;
}
int cudaGetDeviceProperties(SimDeviceProp* p, int device) {
  if (device != 0) return static_cast<int>(Err::kInvalidDevice);
  std::memset(p, 0, sizeof(*p));
  ptxsim::choose_device_early();
  snprintf(p->name, sizeof(p->name), "ptxsim sm_%d", config().arch());
  p->total_global_mem = 16ull << 30;
  p->shared_mem_per_block = 49152;
  p->regs_per_block = p->regs_per_sm = 65536;
  p->warp_size = 32;
  p->mem_pitch = 2147483647;
  p->max_threads_per_block = 1024;
  for (int i = 0; i < 3; ++i) {
    p->max_threads_dim[i] = device_attribute(2 + i);
    p->max_grid_size[i] = device_attribute(5 + i);
  }
  p->total_const_mem = 65536;
  p->major = config().arch() / 10;
  p->minor = config().arch() % 10;
  p->texture_alignment = 512;
  p->multi_processor_count = config().sms;
  p->concurrent_kernels = p->unified_addressing = p->managed_memory = 1;
  p->l2_cache_size = 1 << 26;
  p->max_threads_per_sm = 2048;
  p->shared_mem_per_sm = config().smem_optin() + 1024;
  p->shared_mem_optin = config().smem_optin();
  p->max_blocks_per_sm = 32;
  p->reserved_shared_mem = 1024;
  p->cooperative_launch = p->memory_pools = 1;
  p->cluster_launch = config().arch() >= 90;
  return 0;
}
int cudaGetDeviceProperties_v2(SimDeviceProp* p, int device) {
  return cudaGetDeviceProperties(p, device);
}

int cudaGetLastError() {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  int e = static_cast<int>(runtime().last_error);
  runtime().last_error = Err::kSuccess;
  return e;
}
int cudaPeekAtLastError() { return static_cast<int>(runtime().last_error); }
const char* cudaGetErrorString(int code) {
  for (auto& e : kErrors) {
    if (e.code == code) return e.text;
  }
  return "unrecognized error code";
}
const char* cudaGetErrorName(int code) {
  for (auto& e : kErrors) {
    if (e.code == code) return e.name;
  }
  return "cudaErrorUnknown";
}

// ---- driver entry points
int ptxsim_cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address,
                                  const uint64_t* dim, const uint64_t* stride, const uint32_t* box,
                                  const uint32_t* element_stride, int interleave, int swizzle,
                                  int l2, int fill) {
  std::string e = ptxsim::sem::encode_tensor_map(
      map, type, static_cast<int>(rank), reinterpret_cast<uint64_t>(address), dim, stride, box,
      element_stride, interleave, swizzle, l2, fill);
  if (e.empty()) return 0;
  fprintf(stderr, "ptxsim: cuTensorMapEncodeTiled: %s\n", e.c_str());
  return 1;
}
int ptxsim_cuTensorMapReplaceAddress(void* map, void* address) {
  std::string e = ptxsim::sem::replace_tensor_map_field(map, ptxsim::sem::TmaField::kGlobalAddress,
                                                        0, reinterpret_cast<uint64_t>(address));
  return e.empty() ? 0 : 1;
}
int ptxsim_cuGetErrorString(int code, const char** s) {
  *s = code == 0 ? "no error" : code == 1 ? "invalid argument" : "unknown error";
  return 0;
}

int cudaGetDriverEntryPointByVersion(const char* symbol, void** fn, unsigned, unsigned long long,
                                     int* status) {
  static const std::pair<const char*, void*> table[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(ptxsim_cuTensorMapEncodeTiled)},
      {"cuTensorMapReplaceAddress", reinterpret_cast<void*>(ptxsim_cuTensorMapReplaceAddress)},
      {"cuGetErrorString", reinterpret_cast<void*>(ptxsim_cuGetErrorString)},
      {"cuGetErrorName", reinterpret_cast<void*>(ptxsim_cuGetErrorString)},
  };
  for (auto& e : table) {
    if (std::string(symbol) == e.first) {
      *fn = e.second;
      if (status) *status = 0;
      return 0;
    }
  }
  fprintf(stderr, "ptxsim: driver function %s is not provided\n", symbol);
  *fn = nullptr;
  if (status) *status = 1;
  return 0;
}
int cudaGetDriverEntryPoint(const char* symbol, void** fn, unsigned long long flags, int* status) {
  return cudaGetDriverEntryPointByVersion(symbol, fn, 13000, flags, status);
}

}  // extern "C"
