// SPDX-License-Identifier: Apache-2.0
// State behind the replacement runtime: registered programs, kernels, streams, pending errors.
#ifndef PTXSIM_RUNTIME_H_
#define PTXSIM_RUNTIME_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fatbin.h"
#include "lower.h"
#include "machine.h"

namespace ptxsim {

// A program on one simulated device: the image for it, memory of the variables, kernels.
struct Loaded {
  std::shared_ptr<Module> module;
  std::map<std::string, void*> variables;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
  bool replaced = false;     // the module came from PTXSIM_PTX
  uint64_t ptx_version = 0;  // Config::ptx_version that the module was loaded under
};

// One registered fatbin. At the first use on a device its image is chosen, scanned and given memory
// for its variables; as with several GPUs, each device keeps its own.
struct Program {
  const void* fatbin = nullptr;
  size_t size = 0;
  int auto_arch = 0;          // the device of PTXSIM_DEVICE=auto, 0 until that is asked for
  std::map<int, Loaded> on;   // by compute capability * 10
  Loaded* current = nullptr;  // that of the device in force at the last load()
  std::map<std::string, void*> managed;  // variables that all devices share
  // Kernels of modules that PTXSIM_PTX replaced: recorded graphs may still name them.
  std::vector<std::unique_ptr<Kernel>> retired;
  void load();  // sets `current`
  // The one module of a program without a fatbin, for the device in force.
  void adopt(std::shared_ptr<Module> module);
  void release();  // frees the variables of all devices
  const Kernel& kernel(const std::string& name);

 private:
  void fill(Loaded* l);
  void place_variables(Loaded* l);  // memory and initial values of the module's variables
};

struct FunctionEntry {
  Program* program = nullptr;
  std::string name;
  int max_dynamic_smem = 0;  // set by cudaFuncSetAttribute, 0 = the default of 48 KB
  bool non_portable_cluster = false;
};

struct VariableEntry {
  Program* program = nullptr;
  std::string name;
  size_t size = 0;
};

// Work recorded by stream capture.
struct Graph {
  std::vector<std::function<void()>> nodes;
};

struct Stream {
  std::shared_ptr<Graph> capture;
  bool invalidated = false;
};

struct Runtime {
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Program>> programs;
  std::map<const void*, std::unique_ptr<FunctionEntry>> functions;  // by host stub address
  std::map<const void*, VariableEntry> host_variables;
  std::map<void*, std::unique_ptr<Stream>> streams;
  Err last_error = Err::kSuccess;
  Err pending_error = Err::kSuccess;  // of a launch, reported by the next synchronisation too
  std::string last_message;
  // Programmatic dependent launch: the stream whose last work is a kernel, and with
  // PTXSIM_PDL=trigger or start the launches that have not run yet.
  bool kernel_is_last = false;
  void* kernel_stream = nullptr;
  std::vector<std::unique_ptr<Launch>> waiting;
  FunctionEntry& function(
      const void* handle);  // host stub or cudaKernel_t; throws kInvalidDeviceFunction
};
Runtime& runtime();

// Runs f, turns a SimError into its code, prints the message once and remembers it.
int guarded(const std::function<void()>& f);

// Device selection for PTXSIM_DEVICE=auto.
void choose_device(const std::string& target);
void choose_device_early();

// Runs launches that wait for a dependent, and ends the chain of programmatic launches. Every call
// that synchronises or touches device memory begins with it. Errors are reported as those of any
// launch.
void finish_launches();

Stream* stream_of(void* handle);
// Executes now, or records when the stream is capturing.
// Work other than kernel launches first finishes those that wait for a dependent.
void submit(void* stream, std::function<void()> work, bool launches = false);
void launch_function(FunctionEntry& f, const uint32_t grid[3], const uint32_t block[3], size_t smem,
                     void** args, void* stream, const LaunchAttributes& attributes);

// Device memory with a guard page behind it: an access past the end (rounded up to 256 bytes)
// faults at once.
void* device_alloc(size_t bytes, const char* what);
bool device_free(void* p);

}  // namespace ptxsim

#endif  // PTXSIM_RUNTIME_H_
