// SPDX-License-Identifier: Apache-2.0
// Source of tiny_sm120.sass: the shape of an attention main loop, as small as it gets. One trip waits on
// a barrier, reads operands from shared memory, does 4 + 4 block-scaled MMAs (Q K^T of 16 x 32 keys and
// P V, head dimension 32), takes 16 exponentials and, rarely, rescales.
//
//   nvcc -std=c++17 -O3 -cubin -gencode arch=compute_120a,code=sm_120a -I include tiny_sm120.cu
//   nvdisasm -hex tiny_sm120.cubin | (the text section)
#include "mpfa/ptx/math.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/mma_peak.cuh"
#include "mpfa/ptx/smem.cuh"

__global__ void __launch_bounds__(128) tiny_sm120(float* out, int trips, float limit) {
  extern __shared__ __align__(16) unsigned char smem[];
  const uint32_t bar = mpfa::ptx::smem_address(smem);
  const uint4* operands = reinterpret_cast<const uint4*>(smem + 16);
  const uint4 q = operands[threadIdx.x];
  float o[4][4] = {};
  float peak = 0;
#pragma unroll 1
  for (int n = 0; n < trips; ++n) {
    mpfa::ptx::mbarrier_wait(bar, n & 1);
    float s[4][4] = {};
    uint32_t p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 k = operands[256 + 32 * j + threadIdx.x % 32];
      mpfa::ptx::mma_mxf8(s[j], q, make_uint2(k.x, k.y), k.z);
    }
    if (__any_sync(0xffffffff, s[0][0] > limit)) {
      peak = s[0][0];
#pragma unroll
      for (int j = 0; j < 16; ++j) o[j / 4][j % 4] *= 0.5f;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = mpfa::ptx::ex2(s[j][i] - peak);
      p[j] = __float_as_uint(s[j][0] + s[j][1] + s[j][2] + s[j][3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = operands[512 + 32 * j + threadIdx.x % 32];
      mpfa::ptx::mma_mxf8(o[j], make_uint4(p[0], p[1], p[2], p[3]), make_uint2(v.x, v.y), v.z);
    }
    mpfa::ptx::mbarrier_arrive(bar);
  }
  for (int j = 0; j < 16; ++j) out[threadIdx.x * 16 + j] = o[j / 4][j % 4];
}
