// SPDX-License-Identifier: Apache-2.0
// Negative controls: PTXSIM_FAULT=<name> makes one semantic function wrong on
// purpose, so that tests can show that a proof program notices. Where it is
// off, it costs one comparison of a byte.
#pragma once

#include <cstdint>

namespace ptxsim::sem {

enum class Fault : uint8_t {
  kNone,
  kUmmaScaleRows,    // tcgen05.mma: neighbouring rows of A swap their scales
  kMmaScaleRows,     // mma.sync: the same
  kByteId,           // mma.sync: byte-id selectors ignored
  kThreadId,         // mma.sync: thread-id selectors ignored
  kTmaSwizzle,       // tensor copies without swizzle
  kOperandSwizzle,   // tcgen05 and wgmma operands without swizzle
  kAccumulate,       // enable-input-d and scale-d ignored: D is always an input
  kTmemQuadrant,     // tcgen05.ld always reads the first 32 lanes
  kTxCount,          // mbarriers do not count transactions
  kParity,           // mbarrier waits succeed at once
  kLdmatrixTrans,    // .trans ignored
  kOutOfBoundsFill,  // tensor copies fill with ones instead of zeros
};

inline constexpr const char* kFaultNames[] = {
    "none",        "umma-scale-rows", "mma-scale-rows", "byte-id",       "thread-id",
    "tma-swizzle", "operand-swizzle", "accumulate",     "tmem-quadrant", "tx-count",
    "parity",      "ldmatrix-trans",  "oob-fill",
};

inline Fault injected_fault = Fault::kNone;
inline bool faulty(Fault f) { return __builtin_expect(injected_fault == f, false); }

}  // namespace ptxsim::sem
