// SPDX-License-Identifier: Apache-2.0
// Matrix arithmetic on decoded operands, and mma.sync on registers.
#pragma once

#include <cstdint>

#include "types.h"

namespace ptxsim::sem {

// Parameters of the truncating mode. Exponents of subnormal operands count as min_exp of their
// format.
struct Numerics {
  Accumulate mode = Accumulate::kExact;
  int a_min_exp = -1022, b_min_exp = -1022;
  int align_bits = 25;  // fraction bits kept below the largest exponent
  int out_bits = 23;    // mantissa bits of the result (truncated)

  Numerics(Accumulate m) : mode(m) {}
  Numerics(Accumulate m, Elem a, Elem b);
};

// d[m][n] = sum_k a[m][k] * b[n][k] + c[m][n]. a, b: exact decoded (and scaled) operands,
// row-major, k contiguous. c may be null (zero) and may equal d. ld: row stride of c and d in
// elements. NaN results are 0x7fffffff.
void mma_f32(int m, int n, int k, const double* a, const double* b, const float* c, float* d,
             int ld, const Numerics& num);
// f16 accumulators: as mma_f32, then one rounding to f16 (rn) held as its bits. NaN: 0x7fff.
void mma_f16(int m, int n, int k, const double* a, const double* b, const uint16_t* c, uint16_t* d,
             int ld, const Numerics& num);
// Integer accumulators: wraps, or clamps the final sum with .satfinite.
void mma_s32(int m, int n, int k, const int32_t* a, const int32_t* b, const int32_t* c, int32_t* d,
             int ld, bool satfinite);
// f64: fused multiply-add chain, k ascending, in rounding mode `round`.
void mma_f64(int m, int n, int k, const double* a, const double* b, const double* c, double* d,
             int ld, Round round);

enum class MmaKind : uint8_t { kPlain, kF8f6f4, kMxf8f6f4, kMxf4, kMxf4nvf4 };

struct MmaSync {
  int m = 16, n = 8, k = 16;
  Elem a = Elem::kF16, b = Elem::kF16;
  Elem c = Elem::kF32, d = Elem::kF32;  // kF16, kF32, kS32 or kF64
  MmaKind kind = MmaKind::kPlain;
  int scale_vec = 0;          // 1, 2, 4 for block-scaled kinds
  Elem scale = Elem::kUe8m0;  // kUe8m0 or kUe4m3
  bool satfinite = false;
  Round round = Round::kRn;  // f64
};

// Legal shapes, types, kinds (PTX 9.7.14.5.14); run once when the instruction is parsed.
Error check_mma_sync(const MmaSync& op);
// Registers per lane of each operand (32-bit; for f64 64-bit).
int mma_sync_a_regs(const MmaSync& op);
int mma_sync_b_regs(const MmaSync& op);
int mma_sync_c_regs(const MmaSync& op);
int mma_sync_d_regs(const MmaSync& op);

// Selectors of the block-scaled kinds; must be warp-uniform. Checked here because they are runtime
// values.
struct MmaScales {
  const uint32_t* a = nullptr;  // scale-a-data, 32 lanes
  const uint32_t* b = nullptr;
  int byte_a = 0, thread_a = 0, byte_b = 0, thread_b = 0;
};
Error check_mma_scales(const MmaSync& op, const MmaScales& s);

// All lanes of the warp; reg[r][lane]. d registers may alias c, a or b registers.
Error mma_sync(const MmaSync& op, const uint32_t* const* a, const uint32_t* const* b,
               const uint32_t* const* c, uint32_t* const* d, const MmaScales* scales,
               Accumulate mode);
Error mma_sync_f64(const MmaSync& op, const double* const* a, const double* const* b,
                   const double* const* c, double* const* d);

}  // namespace ptxsim::sem
