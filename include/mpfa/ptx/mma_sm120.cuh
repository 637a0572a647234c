// SPDX-License-Identifier: Apache-2.0
// Block-scaled MMA of SM120. PTX ISA, "mma.sync ... .block_scale" (sm_120a/f, sm_121a/f).
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// D = (A * SFA)(B * SFB) + C, 16 x 8 x 32, e4m3 with one ue8m0 scale per row of A and column of B:
// one instruction covers exactly one MX block. Fragments of lane 4g + t:
//   a[r] byte b: row g + 8 (r & 1), k = 16 (r >> 1) + 4t + b      b_r byte b: k = 16 r + 4t + b,
//   c[i]: row g + 8 (i >> 1), column 2t + (i & 1)                             column g
// Scales: row m from byte ByteA of lane 4 (m % 8) + 2 ThreadA + m / 8; column n from byte ByteB of
// lane 4 n + ThreadB. why template selectors: one register per lane serves 4 k-blocks x 4 n-tiles,
// which atoms that hard-wire the selectors cannot use.
template <int ByteA, int ThreadA, int ByteB, int ThreadB>
__device__ __forceinline__ void mma_mxf8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1, const float (&c)[4], uint32_t sfa,
                                         uint32_t sfb) {
  static_assert(0 <= ByteA && ByteA < 4 && 0 <= ByteB && ByteB < 4, "a byte of the register");
  static_assert(0 <= ThreadA && ThreadA < 2 && 0 <= ThreadB && ThreadB < 4, "a lane of the quad");
  asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col"
      ".f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, "
      "%14, {%15, %16}, %17, {%18, %19};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]), "r"(sfa), "n"(ByteA), "n"(ThreadA), "r"(sfb), "n"(ByteB),
        "n"(ThreadB));
}

#endif  // __CUDACC__

}  // namespace mpfa::ptx
