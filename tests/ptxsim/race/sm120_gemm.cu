// SPDX-License-Identifier: Apache-2.0
// An SM120 block-scaled GEMM for the race detector, the mutation test and the negative controls:
// correct as it stands. sm120_gemm.ptx is `nvcc -ptx -arch=compute_120a sm120_gemm.cu`.
//
// D = (A * SFA) (B * SFB) with A [M, K] and B [K, N] in e4m3, one ue8m0 scale per 32 elements of K.
// One warp loads through a ring of 2 stages (two tensor copies, two bulk copies of scales), two
// warps of 32 x 32 outputs compute, results leave through shared memory and a tensor store. The CTA
// walks over the tiles of 64 x 32 outputs. 96 threads.
//
// The scales of a lane are one register for A and one for B; every mma.sync selects its own with
// byte-id (block of K) and thread-id (row tile of A, column tile of B).
#include "device.cuh"

constexpr int kM = 64, kN = 32, kK = 128;  // tile
constexpr int kStages = 2;
constexpr int kConsumers = 64;  // threads

struct Stage {
  alignas(1024) uint8_t a[kM * kK];  // 128-byte rows, 128-byte swizzle
  alignas(1024) uint8_t b[kK * kN];  // 32-byte rows, 32-byte swizzle
  uint32_t sfa[kM];                  // 4 scales of a row, one per 32 of K
  uint32_t sfb[kN];
};
constexpr uint32_t kStageBytes = kM * kK + kK * kN + 4 * (kM + kN);

struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

DEVICE void load_a(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// 32 rows of K, 16 columns: registers 0 and 2 are the fragment of columns 0..7, 1 and 3 of 8..15.
DEVICE void load_b(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

template <int kByte, int kThreadA, int kThreadB>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t sfa,
                uint32_t sfb) {
  asm volatile(
      "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3."
      "f32.ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, "
      "{%12, %13}, {%11}, {%12, %14};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(sfa), "r"(sfb),
        "n"(kByte), "n"(kThreadA), "n"(kThreadB));
}

// 16 rows x 32 columns x block kBlock of K.
template <int kBlock, int kTile>
DEVICE void multiply_rows(float (&d)[4][4], const Stage& s, int row0, const uint32_t (&b)[2][4],
                          uint32_t sfa, uint32_t sfb) {
  int lane = threadIdx.x % 32, row = row0 + 16 * kTile + lane % 16;
  int chunk = (2 * kBlock + lane / 16) ^ (row % 8);
  uint32_t a[4];
  load_a(a, smem_address(s.a) + row * kK + 16 * chunk);
  mma<kBlock, kTile, 0>(d[0], a, b[0][0], b[0][2], sfa, sfb);
  mma<kBlock, kTile, 1>(d[1], a, b[0][1], b[0][3], sfa, sfb);
  mma<kBlock, kTile, 2>(d[2], a, b[1][0], b[1][2], sfa, sfb);
  mma<kBlock, kTile, 3>(d[3], a, b[1][1], b[1][3], sfa, sfb);
}

template <int kBlock>
DEVICE void multiply(float (&d)[2][4][4], const Stage& s, int row0, uint32_t sfa, uint32_t sfb) {
  // Lanes 0..15 address the rows of the first 16x16 matrix, 16..31 those of the second.
  int k = 32 * kBlock + threadIdx.x % 32;
  uint32_t b[2][4];
  for (int c = 0; c < 2; ++c) {
    load_b(b[c], smem_address(s.b) + k * kN + 16 * (c ^ (k / 4 % 2)));
  }
  multiply_rows<kBlock, 0>(d[0], s, row0, b, sfa, sfb);
  multiply_rows<kBlock, 1>(d[1], s, row0, b, sfa, sfb);
}

// sfa: [k tiles][64 * row tiles] words, sfb: [k tiles][32 * column tiles] words.
extern "C" __global__ void sm120_gemm(const __grid_constant__ TensorMap map_a,
                                      const __grid_constant__ TensorMap map_b,
                                      const __grid_constant__ TensorMap map_d, const uint32_t* sfa,
                                      const uint32_t* sfb, int row_tiles, int column_tiles,
                                      int k_tiles) {
  __shared__ Stage stage[kStages];
  __shared__ alignas(128) float out[kM][kN];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  int tiles = row_tiles * column_tiles;
  if (warp == 0) {
    if (lane == 0) {
      int n = 0;
#pragma unroll 1
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row = t / column_tiles, column = t % column_tiles;
#pragma unroll 1
        for (int k = 0; k < k_tiles; ++k, ++n) {
          Stage& s = stage[n % kStages];
          uint64_t* bar = &full[n % kStages];
          mbarrier_wait(&empty[n % kStages], (n / kStages + 1) & 1);
          mbarrier_expect(bar, kStageBytes);
          tensor_load(s.a, &map_a, k * kK, row * kM, bar);
          tensor_load(s.b, &map_b, column * kN, k * kK, bar);
          bulk_load(s.sfa, sfa + (k * row_tiles + row) * kM, 4 * kM, bar);
          bulk_load(s.sfb, sfb + (k * column_tiles + column) * kN, 4 * kN, bar);
        }
      }
    }
    return;
  }
  int g = lane / 4, t4 = lane % 4, row0 = 32 * (warp - 1);
  int n = 0;
#pragma unroll 1
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    float d[2][4][4] = {};
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k, ++n) {
      const Stage& s = stage[n % kStages];
      mbarrier_wait(&full[n % kStages], (n / kStages) & 1);
      // Thread-id 0 of A: lanes 0 and 1 of a quad, row tile 0; thread-id 1: lanes 2 and 3, tile 1.
      uint32_t scale_a = s.sfa[row0 + 16 * (t4 / 2) + 8 * (t4 % 2) + g];
      uint32_t scale_b = s.sfb[8 * t4 + g];
      multiply<0>(d, s, row0, scale_a, scale_b);
      multiply<1>(d, s, row0, scale_a, scale_b);
      multiply<2>(d, s, row0, scale_a, scale_b);
      multiply<3>(d, s, row0, scale_a, scale_b);
      mbarrier_arrive(&empty[n % kStages]);
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 4; ++j) {
        float* p = &out[row0 + 16 * i + g][8 * j + 2 * t4];
        p[0] = d[i][j][0];
        p[1] = d[i][j][1];
        p[8 * kN] = d[i][j][2];
        p[8 * kN + 1] = d[i][j][3];
      }
    }
    fence_proxy_async();
    named_barrier(1, kConsumers);
    if (threadIdx.x == 32) {
      tensor_store(&map_d, t % column_tiles * kN, t / column_tiles * kM, out);
      commit_bulk();
      wait_bulk_read();
    }
    named_barrier(1, kConsumers);
  }
}
