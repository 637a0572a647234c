// SPDX-License-Identifier: Apache-2.0
// C interface for the Python side (mpfa/sim) and for programs that know they run under the
// simulator.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "ranges.h"
#include "runtime.h"

using namespace ptxsim;

namespace {

char* to_c(const std::string& s) {
  char* p = static_cast<char*>(malloc(s.size() + 1));
  std::memcpy(p, s.c_str(), s.size() + 1);
  return p;
}

std::string json_string(const std::string& s) {
  std::string r = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') {
      r += '\\';
      r += c;
    } else if (static_cast<unsigned char>(c) < 32) {
      r += format("\\u%04x", c);
    } else {
      r += c;
    }
  }
  return r + "\"";
}

}  // namespace

extern "C" {

// Strings returned by these functions are released with ptxsim_free.
void ptxsim_free(void* p) { free(p); }

// Sets an option (names as in PTXSIM_<NAME>). Returns null, or the error text.
char* ptxsim_set(const char* name, const char* value) {
  finish_launches();
  try {
    config().set(name, value);
    return nullptr;
  } catch (const std::exception& e) {
    return to_c(e.what());
  }
}

char* ptxsim_last_message() {
  finish_launches();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  return to_c(runtime().last_message);
}

void ptxsim_clear() {
  finish_launches();
  std::lock_guard<std::recursive_mutex> lock(runtime().mutex);
  runtime().last_error = runtime().pending_error = Err::kSuccess;
  runtime().last_message.clear();
  launch_records().clear();
  launch_counter() = 0;
}

// JSON list of the launches since the last ptxsim_clear.
char* ptxsim_launches() {
  finish_launches();
  std::string s = "[";
  for (auto& r : launch_records()) {
    if (s.size() > 1) s += ",";
    s += "{\"kernel\":" + json_string(r.kernel) +
         format(
             ",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"cluster\":[%u,%u,%u],\"warp_"
             "instructions\":%llu,\"tcgen05_mma\":%llu,"
             "\"mma_sync\":%llu,\"wgmma\":%llu,\"seconds\":%.6f,\"error\":",
             r.grid[0], r.grid[1], r.grid[2], r.block[0], r.block[1], r.block[2], r.cluster[0],
             r.cluster[1], r.cluster[2], (unsigned long long)r.warp_instructions,
             (unsigned long long)r.tcgen_mma, (unsigned long long)r.mma_sync,
             (unsigned long long)r.wgmma, r.seconds) +
         json_string(r.error) + "}";
  }
  return to_c(s + "]");
}

// Host memory (a tensor) that kernels may access; the bounds watcher then judges every global
// access.
void ptxsim_register_range(void* p, size_t n, const char* what) {
  add_range(reinterpret_cast<uint64_t>(p), n, what, true);
}
void ptxsim_unregister_range(void* p) {
  finish_launches();
  remove_range(reinterpret_cast<uint64_t>(p));
}

// Parses a PTX text and lowers every function. Returns JSON {"target", "kernels": [...],
// "unsupported": ["file:line: ..."]}.
char* ptxsim_check_ptx(const char* text, const char* name, int device) {
  std::string out;
  try {
    auto m = parse_module(text, name);
    int arch = device ? device : m->arch();
    auto messages = check_module(m, arch);
    out = "{\"target\":" + json_string(m->target) + ",\"kernels\":[";
    bool first = true;
    for (auto& f : m->functions) {
      if (!f.second.is_entry) continue;
      if (!first) out += ",";
      first = false;
      out += json_string(f.first);
    }
    out += "],\"unsupported\":[";
    for (size_t k = 0; k < messages.size(); ++k) out += (k ? "," : "") + json_string(messages[k]);
    out += "]}";
  } catch (const std::exception& e) {
    out = "{\"target\":\"\",\"kernels\":[],\"unsupported\":[" + json_string(e.what()) + "]}";
  }
  return to_c(out);
}

// PTX images inside a file (executable, shared library, fatbin), concatenated as JSON [{"arch",
// "text"}].
char* ptxsim_extract(const char* path, char** error) {
  *error = nullptr;
  try {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw SimError(Err::kInvalidValue, std::string("cannot read ") + path);
    std::stringstream ss;
    ss << in.rdbuf();
    std::string data = ss.str();
    std::string out = "[";
    const std::string magic("\x50\xED\x55\xBA", 4);
    for (size_t at = data.find(magic); at != std::string::npos; at = data.find(magic, at + 4)) {
      if (data.size() - at < 16 || data[at + 4] != 1 || data[at + 5] != 0) continue;
      for (auto& i : extract_ptx(data.data() + at, data.size() - at)) {
        if (out.size() > 1) out += ",";
        out += format("{\"arch\":%d,\"text\":", i.arch) + json_string(i.text) + "}";
      }
    }
    return to_c(out + "]");
  } catch (const std::exception& e) {
    *error = to_c(e.what());
    return nullptr;
  }
}

// Launches a kernel of a PTX text without the runtime front: params are raw bytes per parameter.
// Returns null or the error text.
char* ptxsim_run_ptx(const char* text, const char* name, const char* kernel, const uint32_t* grid,
                     const uint32_t* block, uint32_t smem, void** args) {
  try {
    auto m = parse_module(text, name);
    if (config().device == 0) choose_device(m->target);
    Program p;
    p.adopt(m);
    std::string error;
    try {
      launch(p.kernel(kernel), grid, block, smem, args, {});
    } catch (const SimError& e) {
      error = format("[%d] ", static_cast<int>(e.code)) + e.what();
    }
    p.release();
    return error.empty() ? nullptr : to_c(error);
  } catch (const std::exception& e) {
    return to_c(e.what());
  }
}

// One row per form of the instruction table: "pattern<TAB>sm<TAB>section".
char* ptxsim_isa() {
  std::string s;
  for (auto& f : isa_table()) s += format("%s\t%d\t%s\n", f.pattern, f.sm, f.section);
  return to_c(s);
}

}  // extern "C"
