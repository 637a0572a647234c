// SPDX-License-Identifier: Apache-2.0
// Descriptors of tcgen05.mma and tcgen05.cp: shared-memory matrices and the instruction.
// PTX ISA, "Matrix descriptor format" and "Instruction descriptor" under tcgen05. Plain integers,
// so the encoders are checked at compile time below and run on the host as well.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MPFA_DESC_FN __host__ __device__ __forceinline__ constexpr
#else
#define MPFA_DESC_FN inline constexpr
#endif

namespace mpfa::ptx {

enum class Swizzle : uint32_t { kNone = 0, k128B = 2, k64B = 4, k32B = 6 };

// Upper word of a matrix descriptor, which does not change along K: stride between groups of eight
// rows (K-major) or eight k (MN-major, swizzled); without a swizzle see MatrixShape below.
// Bits 46-48 hold the constant 0b001; the tile is aligned to its swizzle pattern, so the base
// offset is 0.
MPFA_DESC_FN uint32_t matrix_desc_high(uint32_t sbo_bytes, Swizzle swizzle) {
  return (sbo_bytes >> 4) | (1u << 14) | (static_cast<uint32_t>(swizzle) << 29);
}

// Lower word: address of the tile in shared memory and the leading-dimension stride.
MPFA_DESC_FN uint32_t matrix_desc_low(uint32_t shared_address, uint32_t lbo_bytes) {
  return ((shared_address & 0x3ffffu) >> 4) | ((lbo_bytes >> 4) << 16);
}

MPFA_DESC_FN uint64_t matrix_desc(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

// Strides by layout (bytes):
//   K-major, swizzled     SBO: next 8 rows; LBO unused.
//   K-major, no swizzle   SBO: next 8 rows; LBO: next 16 bytes of K. Rows of 8x16-byte core
//                         matrices are 16 bytes apart.
//   MN-major, swizzled    LBO: next swizzle width along MN; SBO: next 8 k.
//   MN-major, no swizzle  SBO: next 16 bytes along MN; LBO: next 8 k; k rows are 16 bytes apart.
MPFA_DESC_FN uint64_t matrix_desc(uint32_t shared_address, uint32_t lbo_bytes, uint32_t sbo_bytes,
                                  Swizzle swizzle) {
  return matrix_desc(matrix_desc_low(shared_address, lbo_bytes),
                     matrix_desc_high(sbo_bytes, swizzle));
}

// The same tile `bytes` further; addresses stay below 256 KB, so no carry leaves the field.
MPFA_DESC_FN uint64_t advance(uint64_t desc, uint32_t bytes) { return desc + (bytes >> 4); }

// A scale atom (32 rows of 16 bytes) as tcgen05.cp.32x128b reads it.
MPFA_DESC_FN uint64_t scale_atom_desc(uint32_t shared_address) {
  return matrix_desc(shared_address, 0, 128, Swizzle::kNone);
}

enum class F16Kind : uint32_t { kF16 = 0, kBf16 = 1 };
enum class F8Kind : uint32_t { kE4m3 = 0, kE5m2 = 1, kE2m3 = 3, kE3m2 = 4, kE2m1 = 5 };

namespace detail {
MPFA_DESC_FN uint32_t dense_idesc(uint32_t a, uint32_t b, bool mn_major_a, bool mn_major_b, int m,
                                  int n) {
  return (1u << 4)  // fp32 accumulator
         | (a << 7) | (b << 10) | (static_cast<uint32_t>(mn_major_a) << 15) |
         (static_cast<uint32_t>(mn_major_b) << 16) | (static_cast<uint32_t>(n / 8) << 17) |
         (static_cast<uint32_t>(m / 16) << 24);
}
}  // namespace detail

// kind::f16, K = 16.
MPFA_DESC_FN uint32_t idesc_f16(F16Kind type, int m, int n, bool mn_major_a, bool mn_major_b) {
  const uint32_t t = static_cast<uint32_t>(type);
  return detail::dense_idesc(t, t, mn_major_a, mn_major_b, m, n);
}

// kind::f8f6f4, K = 32. With an MN-major 8-bit B, N must be a multiple of 16.
MPFA_DESC_FN uint32_t idesc_f8f6f4(F8Kind a, F8Kind b, int m, int n, bool mn_major_a,
                                   bool mn_major_b) {
  return detail::dense_idesc(static_cast<uint32_t>(a), static_cast<uint32_t>(b), mn_major_a,
                             mn_major_b, m, n);
}

// kind::mxf4nvf4.block_scale.block16: e2m1 x e2m1, both K-major, K = 64, M = 128, ue4m3 scales.
// The scales of the next K step are selected by their Tensor Memory column, never by the ids here.
MPFA_DESC_FN uint32_t idesc_nvfp4(int n) {
  return (1u << 7) | (1u << 10) | (static_cast<uint32_t>(n / 8) << 17) | (1u << 27);
}

// Values that CuTe's make_instr_desc and make_umma_desc give for the shapes used here.
static_assert(idesc_nvfp4(128) == 0x08200480);
static_assert(idesc_nvfp4(16) == 0x08040480);
static_assert(idesc_nvfp4(8) == 0x08020480);
static_assert(idesc_f16(F16Kind::kBf16, 128, 128, false, false) == 0x08200490);
static_assert(idesc_f16(F16Kind::kBf16, 128, 128, false, true) == 0x08210490);
static_assert(idesc_f8f6f4(F8Kind::kE4m3, F8Kind::kE4m3, 128, 128, false, true) == 0x08210010);
static_assert(idesc_f8f6f4(F8Kind::kE4m3, F8Kind::kE4m3, 128, 16, true, false) == 0x08048010);
static_assert(matrix_desc_high(512, Swizzle::k64B) == 0x80004020);
static_assert(matrix_desc_high(1024, Swizzle::k128B) == 0x40004040);
static_assert(matrix_desc_high(256, Swizzle::k32B) == 0xc0004010);
static_assert(matrix_desc_high(128, Swizzle::kNone) == 0x00004008);
static_assert(scale_atom_desc(0x400) == 0x0000400800000040ull);
static_assert(advance(matrix_desc(0x1000, 0, 1024, Swizzle::k128B), 4096) ==
              matrix_desc(0x2000, 0, 1024, Swizzle::k128B));

}  // namespace mpfa::ptx
