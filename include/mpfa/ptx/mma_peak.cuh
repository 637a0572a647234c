// SPDX-License-Identifier: Apache-2.0
// Warp MMA forms of the tensor-rate microbenchmark, accumulating in place. PTX ISA, "mma".
// They are volatile: the benchmark needs each one issued, in this order.
#pragma once

#include <cstdint>

namespace mpfa::ptx {

#if defined(__CUDACC__)

// The block-scaled kinds exist on the sm_120 family only, and only in its a and f targets.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200 && \
    __CUDA_ARCH_FAMILY_SPECIFIC__ < 1300
#define MPFA_PEAK_BLOCK_SCALED 1
#endif

#define MPFA_PEAK_F32_OPERANDS "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}"
#define MPFA_PEAK_F16_OPERANDS "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1}"
#define MPFA_PEAK_IN(a, b) "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y)
#define MPFA_PEAK_F32_OUT(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])

__device__ __forceinline__ void mma_f16_f32(float (&c)[4], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 " MPFA_PEAK_F32_OPERANDS ";"
               : MPFA_PEAK_F32_OUT(c)
               : MPFA_PEAK_IN(a, b));
}

__device__ __forceinline__ void mma_bf16_f32(float (&c)[4], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " MPFA_PEAK_F32_OPERANDS ";"
               : MPFA_PEAK_F32_OUT(c)
               : MPFA_PEAK_IN(a, b));
}

__device__ __forceinline__ void mma_e4m3_f32(float (&c)[4], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 " MPFA_PEAK_F32_OPERANDS ";"
               : MPFA_PEAK_F32_OUT(c)
               : MPFA_PEAK_IN(a, b));
}

__device__ __forceinline__ void mma_f16_f16(uint32_t (&c)[2], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 " MPFA_PEAK_F16_OPERANDS ";"
               : "+r"(c[0]), "+r"(c[1])
               : MPFA_PEAK_IN(a, b));
}

__device__ __forceinline__ void mma_e4m3_f16(uint32_t (&c)[2], uint4 a, uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 " MPFA_PEAK_F16_OPERANDS ";"
               : "+r"(c[0]), "+r"(c[1])
               : MPFA_PEAK_IN(a, b));
}

#if defined(MPFA_PEAK_BLOCK_SCALED)
// `scale` serves A and B: byte 0, thread 0 of each selector; one ue8m0 byte per 32 values of k.
__device__ __forceinline__ void mma_mxf8(float (&c)[4], uint4 a, uint2 b, uint32_t scale) {
  asm volatile(
      "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col"
      ".f32.e4m3.e4m3.f32.ue8m0 " MPFA_PEAK_F32_OPERANDS ", {%10}, {0, 0}, {%10}, {0, 0};"
      : MPFA_PEAK_F32_OUT(c)
      : MPFA_PEAK_IN(a, b), "r"(scale));
}

// Four ue4m3 bytes of `scale`, one per 16 values of k.
__device__ __forceinline__ void mma_nvf4(float (&c)[4], uint4 a, uint2 b, uint32_t scale) {
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
      ".f32.e2m1.e2m1.f32.ue4m3 " MPFA_PEAK_F32_OPERANDS ", {%10}, {0, 0}, {%10}, {0, 0};"
      : MPFA_PEAK_F32_OUT(c)
      : MPFA_PEAK_IN(a, b), "r"(scale));
}
#endif  // MPFA_PEAK_BLOCK_SCALED

#undef MPFA_PEAK_F32_OPERANDS
#undef MPFA_PEAK_F16_OPERANDS
#undef MPFA_PEAK_IN
#undef MPFA_PEAK_F32_OUT

#endif  // __CUDACC__

}  // namespace mpfa::ptx
