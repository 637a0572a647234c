// SPDX-License-Identifier: Apache-2.0
// Errors and small helpers shared by all parts of the simulator.
#ifndef PTXSIM_BASE_H_
#define PTXSIM_BASE_H_

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ptxsim {

// CUDA runtime error codes that the simulator returns (numbers of driver_types.h).
enum class Err : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidConfiguration = 9,
  kInvalidSymbol = 13,
  kInvalidDevicePointer = 17,
  kInvalidDeviceFunction = 98,
  kInvalidDevice = 101,
  kInvalidKernelImage = 200,
  kNoKernelImageForDevice = 209,
  kUnsupportedPtxVersion = 222,
  kInvalidPtx = 218,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kAssert = 710,
  kMisalignedAddress = 716,
  kIllegalInstruction = 715,
  kLaunchFailure = 719,
  kNotSupported = 801,
  kStreamCaptureInvalidated = 901,
  kUnknown = 999,
};

// Any failure of simulated code or of its input. `code` is what the CUDA call returns, what() goes
// to stderr.
class SimError : public std::runtime_error {
 public:
  SimError(Err code, const std::string& text) : std::runtime_error(text), code(code) {}
  Err code;
};

inline std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* fmt, ...) {
  va_list ap, aq;
  va_start(ap, fmt);
  va_copy(aq, ap);
  int n = vsnprintf(nullptr, 0, fmt, ap);
  va_end(ap);
  std::string s(n, '\0');
  vsnprintf(&s[0], n + 1, fmt, aq);
  va_end(aq);
  return s;
}

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// splitmix64: the only random source of the simulator, so that a seed fixes a schedule on every
// platform.
struct Rng {
  uint64_t state = 0;
  explicit Rng(uint64_t seed = 0) : state(seed) {}
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t n) { return n ? static_cast<uint32_t>((next() >> 32) * n >> 32) : 0; }
};

}  // namespace ptxsim

#endif  // PTXSIM_BASE_H_
