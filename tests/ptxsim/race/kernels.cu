// SPDX-License-Identifier: Apache-2.0
// Small kernels for the race detector and the mutation test: correct as they stand. kernels.ptx is
// `nvcc -ptx -arch=compute_100a kernels.cu`, kept so that the tests need no nvcc.
#include "device.cuh"

constexpr int kTile = 64;  // floats

// Ring of 2 stages: warp 0 loads, warps 1 and 2 double the values into a staging tile, warp 1
// stores it with a bulk copy. y = 2 x over `tiles` tiles. 96 threads.
extern "C" __global__ void ring(const float* x, float* y, int tiles) {
  __shared__ alignas(128) float stage[2][kTile];
  __shared__ alignas(128) float out[kTile];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 64);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == 0) {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t) {
        mbarrier_wait(&empty[t % 2], (t / 2 + 1) & 1);
        mbarrier_expect(&full[t % 2], sizeof(stage[0]));
        bulk_load(stage[t % 2], x + t * kTile, sizeof(stage[0]), &full[t % 2]);
      }
    }
  } else {
    int i = threadIdx.x - 32;
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      mbarrier_wait(&full[t % 2], (t / 2) & 1);
      float v = stage[t % 2][i ^ 32];
      mbarrier_arrive(&empty[t % 2]);
      out[i ^ 32] = 2 * v;
      fence_proxy_async();
      named_barrier(1, 64);
      if (threadIdx.x == 32) {
        bulk_store(y + t * kTile, out, sizeof(out));
        commit_bulk();
        wait_bulk_read();
      }
      named_barrier(1, 64);
    }
  }
}

// Tree reduction in shared memory, then a sum over blocks: the last one to arrive adds the partial
// results. 128 threads; result = sum of x[0 .. 128 * blocks).
extern "C" __global__ void reduce(const int* x, int* partial, unsigned* count, int* result) {
  __shared__ int s[128];
  __shared__ bool last;
  s[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];
  __syncthreads();
#pragma unroll 1
  for (int n = 64; n > 0; n /= 2) {
    if (threadIdx.x < n) s[threadIdx.x] += s[threadIdx.x + n];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    last = atomicAdd(count, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 32) {
    int sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
    *result = sum;
  }
}

// Each CTA of a pair writes into the other's shared memory. 32 threads per CTA.
extern "C" __global__ void __cluster_dims__(2) exchange(const int* x, int* y) {
  __shared__ int s[32];
  uint32_t rank, remote;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(smem_address(&s[threadIdx.x])), "r"(rank ^ 1));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote),
               "r"(x[blockIdx.x * 32 + threadIdx.x])
               : "memory");
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
}

// cp.async with two groups in flight. 64 threads; y[t * 64 + i] = x[t * 64 + (i ^ 32)].
extern "C" __global__ void copies(const int4* x, int4* y, int tiles) {
  __shared__ int4 s[2][64];
  int i = threadIdx.x;
  auto load = [&](int t) {
    if (t < tiles) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(&s[t % 2][i])),
                   "l"(x + t * 64 + i)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0);
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    load(t + 1);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    y[t * 64 + i] = s[t % 2][i ^ 32];
    __syncthreads();
  }
}

// D = A B^T, 128 x 64 x 16 bf16, twice with accumulation over `steps` K steps: thread 0 loads and
// issues, all four warps read the accumulator. 128 threads, operands pre-arranged in the canonical
// no-swizzle layout (8 x 16-byte core matrices, LBO 128 bytes, SBO 256 bytes).
extern "C" __global__ void gemm(const uint4* a, const uint4* b, float* d, int steps, int rounds) {
  __shared__ alignas(128) uint4 sa[2][256], sb[2][128];
  __shared__ alignas(8) uint64_t full[2], empty[2], done, drained;
  __shared__ uint32_t tmem_slot;
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;" ::"r"(
                     smem_address(&tmem_slot))
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
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  uint32_t tmem = tmem_slot;
  auto descriptor = [](const void* p) {
    return static_cast<uint64_t>(smem_address(p) >> 4) | 8ull << 16 | 16ull << 32 | 1ull << 46;
  };
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    if (threadIdx.x == 64) {
#pragma unroll 1
      for (int k = 0; k < steps; ++k) {
        int t = r * steps + k, s = t % 2;
        mbarrier_wait(&empty[s], (t / 2 + 1) & 1);
        mbarrier_expect(&full[s], sizeof(sa[0]) + sizeof(sb[0]));
        bulk_load(sa[s], a + k * 256, sizeof(sa[0]), &full[s]);
        bulk_load(sb[s], b + k * 128, sizeof(sb[0]), &full[s]);
      }
    }
    if (threadIdx.x == 0) {
      mbarrier_wait(&drained, (r + 1) & 1);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll 1
      for (int k = 0; k < steps; ++k) {
        int t = r * steps + k, s = t % 2;
        mbarrier_wait(&full[s], (t / 2) & 1);
        // f32 accumulator, bf16 operands, N = 64, M = 128.
        uint32_t idesc = 1u << 4 | 1u << 7 | 1u << 10 | (64u >> 3) << 17 | (128u >> 4) << 24;
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
            "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(tmem),
            "l"(descriptor(sa[s])), "l"(descriptor(sb[s])), "r"(idesc), "r"(k)
            : "memory");
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                smem_address(&empty[s]))
            : "memory");
      }
      asm volatile(
          "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
              smem_address(&done))
          : "memory");
    }
    __syncwarp();
    mbarrier_wait(&done, r & 1);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#pragma unroll 1
    for (int c = 0; c < 64; c += 8) {
      float v[8];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]),
                     "=f"(v[6]), "=f"(v[7])
                   : "r"(tmem + (warp * 32u << 16) + c)
                   : "memory");
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      for (int j = 0; j < 8; ++j) d[threadIdx.x * 64 + c + j] = v[j];
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    mbarrier_arrive(&drained);
  }
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (warp == 0) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" ::"r"(tmem) : "memory");
  }
}
