// SPDX-License-Identifier: Apache-2.0
// Warp MMA of 16-bit floats and the transpose of its fragments. PTX ISA, "mma.sync" (sm_80) and
// "movmatrix" (sm_75).
//
// Fragments of m16n8k16 in lane 4g + t, two values per register, the lower k in the low half:
//   a[0] row g, k = 2t, 2t+1    a[1] row g+8    a[2] row g, k + 8    a[3] row g+8, k + 8
//   b0 column g, k = 2t, 2t+1   b1 k + 8        c[i] row g + 8 (i >> 1), column 2t + (i & 1)
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transpose of an 8 x 8 matrix of which lane 4g + t holds columns 2t and 2t+1 of row g.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
