// SPDX-License-Identifier: Apache-2.0
// Vocabulary shared by the semantic functions: element types, rounding modes and the error
// convention.
#pragma once

#include <cstdint>
#include <string>

namespace ptxsim::sem {

// Every function that can refuse its input returns an Error; the empty string means success.
// Outputs are unspecified (but never undefined behaviour) when the returned string is not empty.
using Error = std::string;

enum class Elem : uint8_t {
  kF64,
  kF32,
  kTf32,
  kF16,
  kBf16,
  kE4m3,
  kE5m2,
  kE2m3,
  kE3m2,
  kE2m1,
  kUe8m0,
  kUe4m3,
  kS8,
  kU8,
  kS4,
  kU4,
  kS32,
};

const char* elem_name(Elem e);

// Width of the encoding: 6 for e2m3/e3m2, 4 for e2m1, 8 for ue4m3 (its top bit is zero), 32 for
// tf32.
int elem_bits(Elem e);

// PTX rounding modifiers of floating-point results: .rn .rna .rz .rm .rp .rs. kRs (stochastic) adds
// the caller's random bits to the discarded bits and rounds the magnitude by the carry.
enum class Round : uint8_t { kRn, kRna, kRz, kRm, kRp, kRs };

// How an MMA sums its products (docs/simulator.md, "Numerics"). Integer-valued data that fits the
// accumulator gives the same bits in all three.
enum class Accumulate : uint8_t {
  kExact,       // all products in double, one rounding when added to the accumulator
  kSequential,  // one fp32 rounding (to nearest even) per product, k ascending
  // Products and accumulator truncated to multiples of 2^(E - 25), E the largest sum of operand
  // exponents (or the accumulator's exponent), summed, truncated to fp32. Bit-exact with an H200
  // for mma.sync and wgmma of f16, bf16, tf32, e4m3 and e5m2; other hardware was not at hand.
  kTruncating,
};

}  // namespace ptxsim::sem
