// SPDX-License-Identifier: Apache-2.0
// Source of tiny_sm100.sass: the warp roles of an attention kernel with scores in Tensor Memory, as small
// as they get. Warp 0 is a softmax warp (32 keys a tile), warp 1 rescales outputs when asked to, warp 2
// issues the tensor instructions of two tiles a trip (head dimension 64).
//
//   nvcc -std=c++17 -O3 -cubin -gencode arch=compute_100a,code=sm_100a -I include tiny_sm100.cu
//   nvdisasm -hex tiny_sm100.cubin | (the text section)
#include "mpfa/ptx/elect.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/ptx/mbarrier.cuh"
#include "mpfa/ptx/smem.cuh"
#include "mpfa/ptx/tcgen05.cuh"

using namespace mpfa::ptx;

__global__ void __launch_bounds__(96) tiny_sm100(float* out, int trips, uint64_t a, uint64_t b,
                                                 uint32_t idesc, float scale) {
  extern __shared__ __align__(16) unsigned char smem[];
  const uint32_t bar = smem_address(smem);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp == 0) {
    float total = 0;
#pragma unroll 1
    for (int n = 0; n < trips; ++n) {
      uint32_t s[32], p[8];
      mbarrier_wait(bar, n & 1);
      tmem_fence_after_sync();
      tmem_ld_x32(s, 0);
      tmem_wait_ld();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] = ex2(__uint_as_float(s[4 * i + j]) * scale);
          total += x[j];
        }
        p[i] = cvt_e4m3x4(x[0], x[1], x[2], x[3]);
      }
      tmem_st_x8(32, p);
      tmem_wait_st();
      tmem_fence_before_sync();
      mbarrier_arrive(bar + 8);
    }
    out[threadIdx.x] = total;
  } else if (warp == 1) {
#pragma unroll 1
    for (int n = 0; n < trips; ++n) {
      mbarrier_wait(bar + 16, n & 1);
      if (__any_sync(0xffffffff, reinterpret_cast<volatile float*>(smem)[16 + threadIdx.x] < 1)) {
        uint32_t o[16];
        tmem_ld_x16(o, 64);
        tmem_wait_ld();
#pragma unroll
        for (int i = 0; i < 16; ++i) o[i] = __float_as_uint(__uint_as_float(o[i]) * scale);
        tmem_st_x16(64, o);
        tmem_wait_st();
      }
      mbarrier_arrive(bar + 24);
    }
  } else if (elect_one()) {
#pragma unroll 1
    for (int n = 0; n < trips; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        mbarrier_wait(bar + 32 + 8 * r, n & 1);
        tcgen05_cp_scale_atom(128, a);
        mma_f16_ss(256 * r, a, b, idesc, false);
        mma_nvfp4_ss(256 * r, a, b + 1, idesc, 128, 132, true);
        tcgen05_commit(bar);
        mma_f8f6f4_ts(64 + 256 * r, 32, b + 2, idesc, true);
        tcgen05_commit(bar + 16);
      }
    }
  }
}
