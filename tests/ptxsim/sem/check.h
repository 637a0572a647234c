// SPDX-License-Identifier: Apache-2.0
// Minimal check macros of the native tests: count, print the first failures with their coordinates.
#pragma once

#include <cstdarg>
#include <cstdio>

inline int g_checks = 0;
inline int g_failures = 0;

inline void check_fail(const char* file, int line, const char* format, ...) {
  if (++g_failures > 20) return;
  std::printf("FAIL %s:%d: ", file, line);
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::printf("\n");
}

#define CHECK(cond, ...)                                      \
  do {                                                        \
    ++g_checks;                                               \
    if (!(cond)) check_fail(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

inline int check_report(const char* name) {
  std::printf("%s: %d checks, %d failures\n", name, g_checks, g_failures);
  return g_failures == 0 && g_checks > 0 ? 0 : 1;
}

// Small deterministic generator (splitmix64).
struct Rng {
  unsigned long long state;
  explicit Rng(unsigned long long seed) : state(seed) {}
  unsigned long long next() {
    unsigned long long z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<unsigned long long>(n)); }
};
