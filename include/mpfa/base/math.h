// SPDX-License-Identifier: Apache-2.0
// Integer helpers shared by host and device code.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MPFA_HOST_DEVICE __host__ __device__
#else
#define MPFA_HOST_DEVICE
#endif

namespace mpfa {

constexpr float kLog2e = 1.4426950408889634f;

// Both take non-negative values and a positive divisor.
template <typename T>
MPFA_HOST_DEVICE constexpr T ceil_div(T value, T divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

template <typename T>
MPFA_HOST_DEVICE constexpr T round_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace mpfa
