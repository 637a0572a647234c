// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "ranges.h"

namespace ptxsim {

Runtime& runtime() {
  static Runtime* r = new Runtime;  // outlives static destructors of the program
  return *r;
}

int guarded(const std::function<void()>& f) {
  Runtime& r = runtime();
  Err code = Err::kSuccess;
  std::string text;
  try {
    f();
    return 0;
  } catch (const SimError& e) {
    code = e.code;
    text = e.what();
  } catch (const std::bad_alloc&) {
    code = Err::kMemoryAllocation;
    text = "out of memory";
  } catch (const std::exception& e) {
    code = Err::kUnknown;
    text = std::string("internal error: ") + e.what();
  }
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.last_error = code;
  r.last_message = text;
  fprintf(stderr, "ptxsim: error %d: %s\n", static_cast<int>(code), text.c_str());
  return static_cast<int>(code);
}

// ---- memory -------------------------------------------------------------------------------------
namespace {
struct Mapping {
  void* base;
  size_t bytes;
};
std::map<void*, Mapping>& mappings() {
  static auto* m = new std::map<void*, Mapping>;
  return *m;
}
constexpr size_t kPage = 4096;
}  // namespace

void* device_alloc(size_t bytes, const char* what) {
  size_t body = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  size_t pages = (body + kPage - 1) / kPage * kPage;
  void* base = mmap(nullptr, pages + 2 * kPage, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    throw SimError(Err::kMemoryAllocation, format("cannot allocate %zu bytes", bytes));
  uint8_t* first = static_cast<uint8_t*>(base) + kPage;
  if (mprotect(first, pages, PROT_READ | PROT_WRITE)) {
    munmap(base, pages + 2 * kPage);
    throw SimError(Err::kMemoryAllocation, format("cannot allocate %zu bytes", bytes));
  }
  uint8_t* p = first + (pages - body);
  std::memset(p, 0xff, body);  // poison: NaN in every float format
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  mappings()[p] = {base, pages + 2 * kPage};
  add_range(reinterpret_cast<uint64_t>(p), bytes, what);
  return p;
}

bool device_free(void* p) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  auto it = mappings().find(p);
  if (it == mappings().end()) return false;
  munmap(it->second.base, it->second.bytes);
  mappings().erase(it);
  remove_range(reinterpret_cast<uint64_t>(p));
  return true;
}

// ---- programs -----------------------------------------------------------------------------------
namespace {

// Suffix of a target: 'a' code runs on that chip only, 'f' on its family, none on all later chips.
bool runs_on(const std::string& target, int device) {
  size_t at = target.find("sm_");
  if (at == std::string::npos) return false;
  int arch = atoi(target.c_str() + at + 3);
  char suffix = target.back();
  if (suffix == 'a') return arch == device;
  if (suffix == 'f') return arch / 10 == device / 10 && arch <= device;
  return arch <= device;
}

std::string target_of(const std::string& text) {
  size_t p = text.find(".target");
  if (p == std::string::npos) return "";
  p = text.find("sm_", p);
  size_t e = p;
  while (e < text.size() && (isalnum(static_cast<unsigned char>(text[e])) || text[e] == '_')) ++e;
  return p == std::string::npos ? "" : text.substr(p, e - p);
}

std::set<std::string> entries(const Module& m) {
  std::set<std::string> names;
  for (auto& f : m.functions) {
    if (f.second.is_entry) names.insert(f.first);
  }
  return names;
}

// The image for the simulated device.
std::string pick_image(std::vector<PtxImage> images) {
  PtxImage* best = nullptr;
  std::string have;
  for (auto& i : images) {
    std::string t = target_of(i.text);
    have += (have.empty() ? "" : ", ") + t;
    if (runs_on(t, config().arch()) &&
        (!best || i.arch > best->arch || (i.arch == best->arch && !isdigit(t.back()))))
      best = &i;
  }
  if (!best) {
    throw SimError(
        Err::kNoKernelImageForDevice,
        format("no PTX for the simulated device sm_%d (PTXSIM_DEVICE); the program has %s",
               config().arch(), have.c_str()));
  }
  return std::move(best->text);
}

// PTXSIM_DEVICE=auto: the newest target of the program in use.
int newest_target(const Program& p) {
  int best = 0;
  for (auto& i : extract_ptx(p.fatbin, p.size)) best = std::max(best, i.arch);
  return best ? std::max(80, best) : 0;
}

// The module of PTXSIM_PTX, parsed once per setting.
struct Replacement {
  uint64_t version = 0;
  std::shared_ptr<Module> module;
  std::set<std::string> names;
  bool wanted = false;  // some registered program has these entries
};

Replacement& replacement() {
  static auto& r = *new Replacement;
  if (r.version == config().ptx_version) return r;
  Replacement n;
  const std::string& file = config().ptx;
  if (!file.empty()) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    if (!in || !(text << in.rdbuf()))
      throw SimError(Err::kInvalidValue, "PTXSIM_PTX='" + file + "': cannot read the file");
    size_t slash = file.rfind('/');
    n.module = parse_module(text.str(), slash == std::string::npos ? file : file.substr(slash + 1));
    n.names = entries(*n.module);
  }
  n.version = config().ptx_version;
  r = std::move(n);
  return r;
}

// A replacement that nothing uses would let a mutation test pass on the original.
void require_use(Replacement& r) {
  if (r.wanted || !r.module) return;
  for (auto& p : runtime().programs) {
    try {
      for (auto& i : extract_ptx(p->fatbin, p->size)) {
        if (entries(*parse_module(std::move(i.text), "<ptx>")) == r.names) r.wanted = true;
      }
    } catch (const SimError&) {
      continue;  // reported when that program is used
    }
  }
  if (!r.wanted) {
    throw SimError(
        Err::kInvalidValue,
        format("PTXSIM_PTX='%s': no module of the program has exactly its %zu entries (%s)",
               config().ptx.c_str(), r.names.size(),
               r.names.empty() ? "none" : r.names.begin()->substr(0, 100).c_str()));
  }
}

}  // namespace

void Program::load() {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  if (config().device == 0) {
    if (auto_arch == 0) auto_arch = newest_target(*this);
    config().auto_arch = auto_arch;
  }
  auto it = on.find(config().arch());
  if (it != on.end() && it->second.ptx_version == config().ptx_version) {
    current = &it->second;
    return;
  }
  Replacement& other = replacement();
  if (it != on.end()) {
    Loaded& l = it->second;
    l.ptx_version = config().ptx_version;
    if (!l.replaced && !(other.module && entries(*l.module) == other.names)) {
      require_use(other);
      current = &l;
      return;
    }
    finish_launches();
    // The new module starts with fresh variables; old ones stay, addresses of them may be around.
    for (auto& k : l.kernels) retired.push_back(std::move(k.second));
    current = nullptr;
    on.erase(it);
  }
  Loaded l;
  fill(&l);
  current = &(on[config().arch()] = std::move(l));
}

void Program::fill(Loaded* l) {
  Replacement& other = replacement();
  int cubins = 0;
  std::vector<PtxImage> images = extract_ptx(fatbin, size, &cubins);
  if (images.empty()) {
    throw SimError(Err::kNoKernelImageForDevice,
                   format("the program holds no PTX (%d cubins): compile with -gencode "
                          "arch=compute_NNN,code=compute_NNN",
                          cubins));
  }
  std::string text = pick_image(std::move(images));
  std::string target = target_of(text);
  l->module = parse_module(std::move(text), format("<ptx %s>", target.c_str()));
  if (other.module && entries(*l->module) == other.names) {
    if (!runs_on(other.module->target, config().arch())) {
      throw SimError(Err::kNoKernelImageForDevice,
                     format("PTXSIM_PTX='%s' is for %s, the simulated device is sm_%d",
                            config().ptx.c_str(), other.module->target.c_str(), config().arch()));
    }
    l->module = other.module;
    l->replaced = other.wanted = true;
  }
  require_use(other);
  place_variables(l);
  l->ptx_version = config().ptx_version;
}

void Program::adopt(std::shared_ptr<Module> module) {
  auto_arch = config().arch();
  current = &on[auto_arch];
  current->module = std::move(module);
  place_variables(current);
  current->ptx_version = config().ptx_version;  // a text that the caller names is never replaced
}

void Program::release() {
  for (auto& l : on) {
    for (auto& v : l.second.variables) device_free(v.second);  // a shared one frees once
  }
}

void Program::place_variables(Loaded* l) {
  std::map<std::string, void*>& variables = l->variables;
  for (auto& v : l->module->variables) {
    if (v.space == "shared") continue;
    if (v.is_extern)
      throw SimError(Err::kNotSupported, "external variable " + v.name +
                                             ": separately compiled device code is not supported");
    auto shared = managed.find(v.name);
    if (shared != managed.end()) {
      variables[v.name] = shared->second;
      continue;
    }
    void* p = device_alloc(v.size, "variable");
    std::memset(p, 0, v.size);
    if (!v.init.empty()) std::memcpy(p, v.init.data(), std::min<size_t>(v.init.size(), v.size));
    variables[v.name] = p;
  }
  for (auto& v : l->module->variables) {
    if (managed.count(v.name)) continue;
    for (auto& r : v.relocs) {
      auto it = variables.find(r.symbol);
      if (it == variables.end())
        throw SimError(Err::kNotSupported, "initialiser of " + v.name + " names " + r.symbol +
                                               ", which is no global variable");
      uint64_t value = reinterpret_cast<uint64_t>(it->second) + static_cast<uint64_t>(r.addend);
      std::memcpy(static_cast<uint8_t*>(variables[v.name]) + r.offset, &value,
                  std::min<uint32_t>(r.bytes, 8));
    }
  }
}

const Kernel& Program::kernel(const std::string& name) {
  load();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  Loaded* l = current;
  auto& slot = l->kernels[name];
  if (!slot) {
    auto resolve = [l](const std::string& symbol) {
      auto it = l->variables.find(symbol);
      if (it == l->variables.end()) throw SimError(Err::kInvalidPtx, "undefined symbol " + symbol);
      return reinterpret_cast<uint64_t>(it->second);
    };
    slot = lower_kernel(l->module, name, resolve, config().arch());
  }
  return *slot;
}

// PTXSIM_DEVICE=auto: the device is the target of the program in use.
void choose_device(const std::string& target) {
  size_t at = target.find("sm_");
  if (at != std::string::npos) config().auto_arch = std::max(80, atoi(target.c_str() + at + 3));
}

// Programs ask for device properties before their first kernel: the newest registered target
// decides.
void choose_device_early() {
  if (config().device != 0 || config().auto_arch != 0) return;
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  int best = 0;
  for (auto& p : runtime().programs) {
    try {
      best = std::max(best, newest_target(*p));
    } catch (const SimError&) {
      continue;  // reported when the program is used
    }
  }
  if (best) config().auto_arch = best;
}

FunctionEntry& Runtime::function(const void* handle) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = functions.find(handle);
  if (it != functions.end()) return *it->second;
  for (auto& f : functions) {
    if (f.second.get() == handle) return *f.second;
  }
  throw SimError(Err::kInvalidDeviceFunction, format("%p is no registered kernel", handle));
}

// ---- streams and launches -----------------------------------------------------------------------
Stream* stream_of(void* handle) {
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  auto it = runtime().streams.find(handle);
  return it == runtime().streams.end() ? nullptr : it->second.get();
}

void submit(void* stream, std::function<void()> work, bool launches) {
  if (!launches) {
    work = [inner = std::move(work)] {
      finish_launches();
      inner();
    };
  }
  Stream* s = stream_of(stream);
  if (s && s->capture) {
    s->capture->nodes.push_back(std::move(work));
    return;
  }
  work();
}

namespace {

void run_waiting() {
  Runtime& r = runtime();
  std::vector<std::unique_ptr<Launch>> chain;
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    chain.swap(r.waiting);
  }
  if (chain.empty()) return;
  try {
    run_launches(chain);
  } catch (const SimError& e) {
    r.pending_error = e.code;
    throw;
  }
}

void launch_in_stream(std::unique_ptr<Launch> l, void* stream) {
  Runtime& r = runtime();
  bool dependent = l->attributes.programmatic && r.kernel_is_last && r.kernel_stream == stream;
  l->attributes.dependent = dependent;
  if (!dependent) run_waiting();
  {
    std::lock_guard<std::recursive_mutex> lock(r.mutex);
    r.kernel_is_last = true;
    r.kernel_stream = stream;
    r.waiting.push_back(std::move(l));
  }
  if (config().pdl == Pdl::kOff) run_waiting();
}

}  // namespace

void finish_launches() {
  Runtime& r = runtime();
  r.kernel_is_last = false;
  if (!r.waiting.empty()) guarded(run_waiting);
}

void launch_function(FunctionEntry& f, const uint32_t grid[3], const uint32_t block[3], size_t smem,
                     void** args, void* stream, const LaunchAttributes& attributes) {
  const Kernel& k = f.program->kernel(f.name);
  size_t limit = f.max_dynamic_smem ? static_cast<size_t>(f.max_dynamic_smem) : 48 * 1024;
  if (smem > limit) {
    throw SimError(Err::kInvalidValue,
                   format("%s: %zu bytes of dynamic shared memory, the function allows %zu "
                          "(cudaFuncAttributeMaxDynamicSharedMemorySize)",
                          k.name.substr(0, 100).c_str(), smem, limit));
  }
  uint32_t ctas = 1;
  for (int i = 0; i < 3; ++i)
    ctas *= attributes.cluster[i] ? attributes.cluster[i] : k.cluster[i] ? k.cluster[i] : 1;
  if (ctas > 8 && !f.non_portable_cluster) {
    throw SimError(
        Err::kInvalidConfiguration,
        format("cluster of %u CTAs: above 8 needs cudaFuncAttributeNonPortableClusterSizeAllowed",
               ctas));
  }
  auto copies = std::make_shared<std::vector<std::vector<uint8_t>>>();
  for (size_t i = 0; i < k.params.size(); ++i) {
    if (!args || !args[i]) throw SimError(Err::kInvalidValue, k.name + ": null kernel argument");
    auto* p = static_cast<const uint8_t*>(args[i]);
    copies->emplace_back(p, p + k.params[i].size);
  }
  uint32_t g[3] = {grid[0], grid[1], grid[2]}, b[3] = {block[0], block[1], block[2]};
  const Kernel* kp = &k;
  submit(
      stream,
      [kp, stream, g0 = g[0], g1 = g[1], g2 = g[2], b0 = b[0], b1 = b[1], b2 = b[2], smem, copies,
       attributes] {
        std::vector<void*> argv;
        for (auto& c : *copies) argv.push_back(c.data());
        uint32_t grid[3] = {g0, g1, g2}, block[3] = {b0, b1, b2};
        std::unique_ptr<Launch> l;
        try {
          l = prepare_launch(*kp, grid, block, static_cast<uint32_t>(smem), argv.data(),
                             attributes);
        } catch (const SimError& e) {
          runtime().pending_error = e.code;
          throw;
        }
        launch_in_stream(std::move(l), stream);
      },
      true);
}

}  // namespace ptxsim
