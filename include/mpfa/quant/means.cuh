// SPDX-License-Identifier: Apache-2.0
// Centring of K and Q and the dot products with the means: Delta_S and the row term. A thread holds
// the same 16 channels of kTokensPerThread tokens, so that a mean is read once for all of them.
//
// Means row 0 is k_mean of the KV head; rows 1.. are q_mean of its G query heads, or of the one
// query head when the CTA works on Q.
#pragma once

#include "mpfa/quant/io.cuh"

namespace mpfa::quant {

// Tuning knobs; benchmarks/append.py --variants builds others.
#ifndef MPFA_QUANT_TOKENS
#define MPFA_QUANT_TOKENS 1
#endif
#ifndef MPFA_QUANT_MIN_CTAS
#define MPFA_QUANT_MIN_CTAS 4
#endif
constexpr int kTokensPerThread = MPFA_QUANT_TOKENS;
constexpr int kMinCtas = MPFA_QUANT_MIN_CTAS;
static_assert(kTokensPerThread == 1 || kTokensPerThread == 2, "centre_key picks one of two tokens");

// What a thread knows about one of its tokens.
struct Row {
  int token;
  bool live;     // writes its results
  bool padding;  // a skipped token's query: statistics row 0, NaN and infinity count as 0
  int stats;
  int64_t slot;
  const uint8_t* source;  // token and head resolved, channel 0
};

__device__ __forceinline__ const float* mean_of(const Means& m, int row, int head) {
  return m.data + (row < 0 ? 0 : row) * m.row + head * m.head;
}

// Means of the CTA's head in shared memory, for the common case that all its tokens use one row.
// invariant: chunk c (4 channels) of block b lies at float4 (row * 4 + c) * blocks + b, so that
// neighbouring lanes read neighbouring 16 bytes.
struct SharedMeans {
  const float4* base;
  int blocks;

  __device__ __forceinline__ SharedMeans(const float4* means, int block_shift, int block)
      : base(means + block), blocks(1 << block_shift) {}
  __device__ __forceinline__ void load4(int row, int chunk, float (*m)[4]) const {
    const float4 a = base[(row * 4 + chunk) * blocks];
    m[0][0] = a.x, m[0][1] = a.y, m[0][2] = a.z, m[0][3] = a.w;
#pragma unroll
    for (int t = 1; t < kTokensPerThread; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) m[t][j] = m[0][j];
    }
  }
};

// Every token's own rows, from global memory.
struct GlobalMeans {
  const float* k_mean[kTokensPerThread];
  const float* q_mean[kTokensPerThread];
  int64_t q_head;

  __device__ __forceinline__ GlobalMeans(const Qk4pv8Params& p, const Row* rows, int head,
                                         int kv_head, bool is_query, int block)
      : q_head(p.q_mean.head) {
    const int first = is_query ? head : head * p.group_size;
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
      k_mean[t] = mean_of(p.k_mean, rows[t].stats, kv_head) + block * kBlock;
      q_mean[t] = mean_of(p.q_mean, rows[t].stats, first) + block * kBlock;
    }
  }
  __device__ __forceinline__ void load4(int row, int chunk, float (*m)[4]) const {
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
      const float4 a =
          load_mean4((row == 0 ? k_mean[t] : q_mean[t] + (row - 1) * q_head) + 4 * chunk);
      m[t][0] = a.x, m[t][1] = a.y, m[t][2] = a.z, m[t][3] = a.w;
    }
  }
};

// Fills shared memory with the means if all live tokens of the CTA use the same row; else returns
// false. Called by the whole CTA, ends with a barrier.
__device__ __forceinline__ bool stage_means(const Qk4pv8Params& p, const Row* rows, int tile_token,
                                            int head, int kv_head, bool is_query, float4* means) {
  if (!p.means_in_shared) return false;
  int common = 0;
  if (p.per_request) {
    common = stats_row(p.map, tile_token);
    bool same = common >= 0;
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
      same = same && (!rows[t].live || rows[t].stats == common);
    }
    if (__syncthreads_and(same) == 0) return false;
  }
  const int blocks = 1 << p.block_shift;
  const int count = (1 + (is_query ? 1 : p.group_size)) * 4 * blocks;
  const int first = is_query ? head : head * p.group_size;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    // The copy follows memory order: float4 f of a row is chunk f % 4 of block f / 4.
    const int row = i >> (p.block_shift + 2);
    const int f = i & (4 * blocks - 1);
    const float* source =
        row == 0 ? mean_of(p.k_mean, common, kv_head) : mean_of(p.q_mean, common, first + row - 1);
    means[(row * 4 + (f & 3)) * blocks + (f >> 2)] = load_mean4(source + 4 * f);
  }
  __syncthreads();
  return true;
}

// Block partial of dot(x, mean row) of every token.
template <class MeansOf>
__device__ __forceinline__ void dot_blocks(const float (*x)[kBlock], const MeansOf& means, int row,
                                           float* acc) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float m[kTokensPerThread][4];
    means.load4(row, i, m);
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
      acc[t] = dot4(acc[t], x[t] + 4 * i, m[t], i == 0);
    }
  }
}

template <class MeansOf>
__device__ __forceinline__ void subtract(float (*x)[kBlock], const MeansOf& means, int row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float m[kTokensPerThread][4];
    means.load4(row, i, m);
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[t][4 * i + j] = add_rn(x[t][4 * i + j], -m[t][j]);
    }
  }
}

// Heads whose dot products are summed over lanes together.
constexpr int kHeadChunk = 4;
constexpr int kSums = kHeadChunk * kTokensPerThread;

// Sums kSums values over the 2^shift lanes of a row, neighbours first. While more than one is left,
// a lane and its partner keep half of them each: 7 shuffles for 8 values on 8 lanes instead of 24.
// Returns the index of the first sum that this lane holds; `count` of them lie at sums[0..count).
__device__ __forceinline__ int sum_and_share(float* sums, int lane, int shift, int* count) {
  int first = 0;
  int left = kSums;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if (step >= shift) break;
    const int half = kSums >> (step + 1);
    if (half > 0) {
      const bool upper = lane >> step & 1;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float kept = upper ? sums[half + i] : sums[i];
        const float sent = upper ? sums[i] : sums[half + i];
        sums[i] = add_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1 << step));
      }
      first += upper ? half : 0;
      left = half;
    } else {
      sums[0] = add_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 1 << step));
    }
  }
  *count = left;
  return first;
}

// Centres K, and computes Delta_S of the G query heads of the KV head: store(token, head, bf16
// bits).
template <class MeansOf, class Store>
__device__ __forceinline__ void centre_key(const Qk4pv8Params& p, const MeansOf& means,
                                           float (*x)[kBlock], const Row* rows, int block,
                                           const Store& store) {
  subtract(x, means, 0);
#pragma unroll 1
  for (int g = 0; g < p.group_size; g += kHeadChunk) {
    float sums[kSums] = {};
#pragma unroll
    for (int i = 0; i < kHeadChunk; ++i) {
      if (g + i < p.group_size) dot_blocks(x, means, 1 + g + i, sums + i * kTokensPerThread);
    }
    int count;
    const int first = sum_and_share(sums, block, p.block_shift, &count);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i >= count) break;
      const int t = (first + i) % kTokensPerThread;
      const int head = g + (first + i) / kTokensPerThread;
      const bool live =
          kTokensPerThread > 1 && t == 1 ? rows[kTokensPerThread - 1].live : rows[0].live;
      if (head < p.group_size && live) store(t, head, static_cast<uint16_t>(bf16_bits(sums[i])));
    }
  }
}

// The row term of Q, from unrounded q, then centring.
template <class MeansOf>
__device__ __forceinline__ void centre_query(const Qk4pv8Params& p, const MeansOf& means,
                                             float (*x)[kBlock], const Row* rows, int head,
                                             int block) {
  float acc[kTokensPerThread];
  dot_blocks(x, means, 0, acc);
  const int64_t num_q_heads = static_cast<int64_t>(p.num_kv_heads) * p.group_size;
#pragma unroll
  for (int t = 0; t < kTokensPerThread; ++t) {
    const float sum = sum_over_row(acc[t], p.block_shift);
    if (rows[t].live && block == 0) p.row_term[rows[t].token * num_q_heads + head] = sum;
  }
  subtract(x, means, 1);
}

// Decides means_in_shared; returns the dynamic shared memory of the launch.
inline size_t plan_shared_means(Qk4pv8Params& p) {
  const int rows = 1 + (p.kv_blocks > 0 ? p.group_size : 1);
  const size_t bytes = static_cast<size_t>(rows) * (kBlock << p.block_shift) * sizeof(float);
  p.means_in_shared = p.has_mean && bytes <= 40 * 1024;
  return p.means_in_shared ? bytes : 0;
}

}  // namespace mpfa::quant
