// SPDX-License-Identifier: Apache-2.0
// Options: PTXSIM_<NAME> in the environment, or ptxsim_set(name, value).
#include <cstdlib>

#include "machine.h"
#include "sem/fault.h"

namespace ptxsim {
namespace {

[[noreturn]] void bad(const std::string& name, const std::string& value, const char* allowed) {
  throw SimError(Err::kInvalidValue, "PTXSIM_" + name + "='" + value + "': allowed is " + allowed);
}

int64_t integer(const std::string& name, const std::string& value, int64_t lo, int64_t hi) {
  char* end = nullptr;
  long long v = strtoll(value.c_str(), &end, 0);
  if (value.empty() || *end || v < lo || v > hi)
    bad(name, value, format("an integer in %lld .. %lld", (long long)lo, (long long)hi).c_str());
  return v;
}

// "10.0", "100", "sm_100a", "120" -> 100, 120; "auto" -> 0.
int parse_device(const std::string& value) {
  if (value == "auto" || value.empty()) return 0;
  std::string v = value.compare(0, 3, "sm_") == 0 ? value.substr(3) : value;
  while (!v.empty() && (v.back() == 'a' || v.back() == 'f')) v.pop_back();
  std::string digits;
  for (char c : v) {
    if (c != '.') digits += c;
  }
  for (int d : {80, 86, 89, 90, 100, 103, 110, 120, 121}) {
    if (digits == std::to_string(d)) return d;
  }
  bad("DEVICE", value, "8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1 or auto");
}

void parse_fault(const std::string& value) {
  std::string names;
  for (size_t k = 0; k < sizeof(sem::kFaultNames) / sizeof(*sem::kFaultNames); ++k) {
    if (value == sem::kFaultNames[k]) {
      sem::injected_fault = static_cast<sem::Fault>(k);
      if (k) fprintf(stderr, "ptxsim: fault %s is injected, results are wrong\n", value.c_str());
      return;
    }
    names += (k ? " " : "") + std::string(sem::kFaultNames[k]);
  }
  bad("FAULT", value, names.c_str());
}

}  // namespace

uint32_t Config::smem_optin() const {
  switch (arch() / 10) {
    case 12:
      return 101376;
    case 8:
      return arch() == 80 ? 166912 : 101376;
    default:
      return 232448;
  }
}

void Config::set(const std::string& name, const std::string& v) {
  if (name == "DEVICE") {
    device = parse_device(v);
  } else if (name == "SMS") {
    sms = static_cast<int>(integer(name, v, 1, 1024));
  } else if (name == "SEED") {
    seed = static_cast<uint64_t>(integer(name, v, 0, INT64_MAX));
  } else if (name == "MODE") {
    if (v == "eager") {
      mode = Mode::kEager;
    } else if (v == "random") {
      mode = Mode::kRandom;
    } else if (v == "lazy") {
      mode = Mode::kLazy;
    } else {
      bad(name, v, "eager, random or lazy");
    }
  } else if (name == "PDL") {
    if (v == "off") {
      pdl = Pdl::kOff;
    } else if (v == "trigger") {
      pdl = Pdl::kTrigger;
    } else if (v == "start") {
      pdl = Pdl::kStart;
    } else {
      bad(name, v, "off, trigger or start");
    }
  } else if (name == "THREADS") {
    threads = static_cast<int>(integer(name, v, 0, 256));
  } else if (name == "RESIDENT") {
    resident = static_cast<int>(integer(name, v, 1, 64));
  } else if (name == "TIMEOUT") {
    timeout_s = static_cast<double>(integer(name, v, 1, 1000000));
  } else if (name == "STATS") {
    stats = integer(name, v, 0, 1) != 0;
  } else if (name == "TRACE") {
    trace = v;
  } else if (name == "WATCH") {
    watch = v;
    select_watchers(v);
  } else if (name == "PTX") {
    ptx = v;
    ++ptx_version;
  } else if (name == "TMEM_ST") {
    if (v != "deferred" && v != "issue") bad(name, v, "deferred or issue");
    tmem_st_at_issue = v == "issue";
  } else if (name == "ACCUMULATE") {
    if (v == "exact") {
      accumulate = sem::Accumulate::kExact;
    } else if (v == "sequential") {
      accumulate = sem::Accumulate::kSequential;
    } else if (v == "truncating") {
      accumulate = sem::Accumulate::kTruncating;
    } else {
      bad(name, v, "exact, sequential or truncating");
    }
  } else if (name == "FAULT") {
    parse_fault(v);
  } else {
    throw SimError(Err::kInvalidValue, "unknown option PTXSIM_" + name +
                                           "; known: DEVICE SMS SEED MODE THREADS RESIDENT TIMEOUT "
                                           "STATS TRACE WATCH TMEM_ST ACCUMULATE PDL PTX FAULT");
  }
}

Config& config() {
  static Config& c = *[] {
    auto* p = new Config;
    Config& cfg = *p;
    for (const char* name :
         {"DEVICE", "SMS", "SEED", "MODE", "THREADS", "RESIDENT", "TIMEOUT", "STATS", "TRACE",
          "WATCH", "TMEM_ST", "ACCUMULATE", "PDL", "PTX", "FAULT"}) {
      const char* v = getenv((std::string("PTXSIM_") + name).c_str());
      if (!v || !*v) continue;
      try {
        cfg.set(name, v);
      } catch (const SimError& e) {
        fprintf(stderr, "ptxsim: %s; the option is ignored\n", e.what());
      }
    }
    return p;
  }();
  return c;
}

}  // namespace ptxsim
