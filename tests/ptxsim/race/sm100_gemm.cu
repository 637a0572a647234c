// SPDX-License-Identifier: Apache-2.0
// A tcgen05 block-scaled GEMM for the race detector, the mutation test and the negative controls:
// correct as it stands. sm100_gemm.ptx is `nvcc -ptx -arch=compute_100a sm100_gemm.cu`.
//
// D = (A * SFA) (B * SFB) with A [M, K] (K-major, 128-byte swizzle) and B [K, N] (MN-major, 64-byte
// swizzle) in e4m3, one ue8m0 scale per 32 elements of K. Thread 64 loads through a ring of 2
// stages, thread 0 copies scales to Tensor Memory and issues the products, all four warps read the
// accumulator. The CTA walks over the tiles of 128 x 64 outputs. 128 threads.
#include "device.cuh"

constexpr int kM = 128, kN = 64, kK = 128;  // tile
constexpr int kAtom = 512;                  // bytes: scales of 128 rows x 4 blocks
constexpr uint32_t kColumnSfa = 64, kColumnSfb = 68, kColumns = 128;

struct Stage {
  alignas(1024) uint8_t a[kM * kK];
  alignas(1024) uint8_t b[kK * kN];
  // Byte of row r, block k: (r % 32) * 16 + (r / 32) * 4 + k.
  alignas(128) uint8_t sfa[kAtom], sfb[kAtom];
};
constexpr uint32_t kStageBytes = kM * kK + kK * kN + 2 * kAtom;

struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

// Swizzle code of the descriptor: 0 none, 2 128 bytes, 4 64 bytes.
DEVICE uint64_t descriptor(const void* p, uint32_t group_bytes, uint64_t swizzle) {
  return static_cast<uint64_t>(smem_address(p) >> 4) |
         static_cast<uint64_t>(group_bytes >> 4) << 32 | 1ull << 46 | swizzle << 61;
}

DEVICE void before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEVICE void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
DEVICE void commit(uint64_t* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   smem_address(bar))
               : "memory");
}
DEVICE void copy_scales(uint32_t column, const void* p) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(column),
               "l"(descriptor(p, 128, 0))
               : "memory");
}
DEVICE void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t idesc, uint32_t sfa, uint32_t sfb,
                bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%0], %1, %2, %3, [%4], "
      "[%5], p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(idesc), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// sfa, sfb: [k tiles][row or column tiles] atoms. d is [rows, columns].
extern "C" __global__ void sm100_gemm(const __grid_constant__ TensorMap map_a,
                                      const __grid_constant__ TensorMap map_b, const uint8_t* sfa,
                                      const uint8_t* sfb, float* d, int rows, int columns,
                                      int k_tiles) {
  __shared__ Stage stage[2];
  __shared__ alignas(8) uint64_t full[2], empty[2], done, drained;
  __shared__ uint32_t tmem_slot;
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     smem_address(&tmem_slot)),
                 "n"(kColumns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  }
  if (threadIdx.x == 32) {
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 1);
    }
    mbarrier_init(&done, 1);
    mbarrier_init(&drained, 128);
    fence_mbarrier_init();
  }
  before_sync();
  __syncthreads();
  after_sync();
  uint32_t tmem = tmem_slot;
  int row_tiles = (rows + kM - 1) / kM, column_tiles = (columns + kN - 1) / kN;
  int tile = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < row_tiles * column_tiles; t += gridDim.x, ++tile) {
    int row = t / column_tiles, column = t % column_tiles;
    if (threadIdx.x == 64) {
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        int n = tile * k_tiles + k;
        Stage& s = stage[n % 2];
        uint64_t* bar = &full[n % 2];
        mbarrier_wait(&empty[n % 2], (n / 2 + 1) & 1);
        mbarrier_expect(bar, kStageBytes);
        tensor_load(s.a, &map_a, k * kK, row * kM, bar);
        tensor_load(s.b, &map_b, column * kN, k * kK, bar);
        bulk_load(s.sfa, sfa + (k * row_tiles + row) * kAtom, kAtom, bar);
        bulk_load(s.sfb, sfb + (k * column_tiles + column) * kAtom, kAtom, bar);
      }
    }
    if (threadIdx.x == 0) {
      mbarrier_wait(&drained, (tile + 1) & 1);
      after_sync();
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        int n = tile * k_tiles + k;
        const Stage& s = stage[n % 2];
        mbarrier_wait(&full[n % 2], (n / 2) & 1);
        copy_scales(tmem + kColumnSfa, s.sfa);
        copy_scales(tmem + kColumnSfb, s.sfb);
#pragma unroll 1
        for (uint32_t j = 0; j < 4; ++j) {
          // e4m3 operands, B MN-major, N = 64, ue8m0 scales, M = 128; j selects the scales' byte.
          uint32_t idesc =
              j << 4 | 1u << 16 | (kN >> 3) << 17 | 1u << 23 | (kM >> 7) << 27 | j << 29;
          mma(tmem, descriptor(s.a + 32 * j, 1024, 2), descriptor(s.b + 32 * kN * j, 512, 4), idesc,
              tmem + kColumnSfa, tmem + kColumnSfb, k + j > 0);
        }
        commit(&empty[n % 2]);
      }
      commit(&done);
    }
    __syncwarp();
    mbarrier_wait(&done, tile & 1);
    after_sync();
    int r = row * kM + threadIdx.x;
#pragma unroll 1
    for (int c = 0; c < kN; c += 8) {
      float v[8];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]),
                     "=f"(v[6]), "=f"(v[7])
                   : "r"(tmem + (warp * 32u << 16) + c)
                   : "memory");
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (int j = 0; j < 8; ++j) {
        int n = column * kN + c + j;
        if (r < rows && n < columns) d[r * columns + n] = v[j];
      }
    }
    before_sync();
    mbarrier_arrive(&drained);
  }
  __syncthreads();
  after_sync();
  if (warp == 0) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "n"(kColumns)
                 : "memory");
  }
}
