// SPDX-License-Identifier: Apache-2.0
// Means of the heads, and dot products of a row with them: Delta_S and the row term. D/16
// neighbouring lanes share a row, 16 channels each.
//
// Means row 0 is k_mean of the KV head; rows 1.. are q_mean of its G query heads, or of the one
// query head when the CTA works on Q.
#pragma once

#include "mpfa/ptx/address.cuh"
#include "mpfa/quant/io.cuh"

namespace mpfa::quant {

__device__ __forceinline__ const float* mean_of(const Means& m, int row, int head) {
  return m.data + (row < 0 ? 0 : row) * m.row + head * m.head;
}

// Means of the CTA's head in shared memory, for the common case that all its tokens use one row.
// invariant: chunk c (4 channels) of block b lies at float4 (row * 4 + c) * kBlocks + b, so that
// neighbouring lanes read neighbouring 16 bytes.
template <int kBlocks>
struct SharedMeans {
  const float4* means;
  int block;

  static __device__ __forceinline__ int place(int row, int chunk, int block) {
    return (row * 4 + chunk) * kBlocks + block;
  }
  __device__ __forceinline__ float4 load4(int row, int chunk) const {
    return means[place(row, chunk, block)];
  }
  static __device__ __forceinline__ uint32_t float_place(uint32_t channel) {
    return place(0, channel >> 2 & 3, channel >> 4) * 4 + (channel & 3);
  }
  // Of a channel of row `row`; `where` holds the channel and, from bit 16 on, its float_place.
  __device__ __forceinline__ float at(int row, uint32_t where) const {
    return reinterpret_cast<const float*>(means + place(row, 0, 0))[where >> 16];
  }
};

// A token's own rows, from global memory.
struct GlobalMeans {
  const float* k_mean;
  const float* q_mean;
  int64_t q_head;
  int block;

  __device__ __forceinline__ const float* row_of(int row) const {
    return row == 0 ? k_mean : q_mean + (row - 1) * q_head;
  }
  __device__ __forceinline__ float4 load4(int row, int chunk) const {
    return load_mean4(row_of(row) + block * kBlock + 4 * chunk);
  }
  __device__ __forceinline__ float at(int row, uint32_t where) const {
    return __ldg(row_of(row) + (where & 0xffffu));
  }
};

// The statistics row of all tokens [begin, end) that have one, or -1 if they differ or the launch
// has no shared memory for means. Called by the whole CTA.
__device__ __forceinline__ int common_row(const Qk4pv8Params& p, int begin, int end) {
  if (!p.means_in_shared) return -1;
  if (!p.per_request) return 0;
  const int common = stats_row(p.map, begin);
  bool same = common >= 0;
  for (int token = begin + threadIdx.x; token < end; token += kRowThreads) {
    const int row = stats_row(p.map, token);
    same = same && (row < 0 || row == common);
  }
  return __syncthreads_and(same) != 0 ? common : -1;
}

// Copies the means of statistics row `common` to shared memory. Called by the whole CTA; a barrier
// must follow.
template <int kBlocks>
__device__ __forceinline__ void stage_means(const Qk4pv8Params& p, int common, int kv_head,
                                            int first_q_head, int q_heads, float4* means) {
#pragma unroll 1
  for (int i = threadIdx.x; i < (1 + q_heads) * 4 * kBlocks; i += kRowThreads) {
    // The copy follows memory order: float4 f of a row is chunk f % 4 of block f / 4.
    const int row = i / (4 * kBlocks);
    const int f = i % (4 * kBlocks);
    const float* source = row == 0 ? mean_of(p.k_mean, common, kv_head)
                                   : mean_of(p.q_mean, common, first_q_head + row - 1);
    means[SharedMeans<kBlocks>::place(row, f & 3, f >> 2)] = load_mean4(source + 4 * f);
  }
}

// x & row for every token: the bits of the channels to keep are ones in `row`. Dropped channels
// become +0; a product with 1 and 0 would not do, as it loses the sign of either zero.
template <int kTokens, class MeansOf>
__device__ __forceinline__ void mask(float (*x)[kBlock], const MeansOf& means, int row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 m = means.load4(row, i);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float* y = x[t] + 4 * i;
      y[0] = and_bits(y[0], m.x), y[1] = and_bits(y[1], m.y);
      y[2] = and_bits(y[2], m.z), y[3] = and_bits(y[3], m.w);
    }
  }
}

template <int kTokens, class MeansOf>
__device__ __forceinline__ void subtract(float (*x)[kBlock], const MeansOf& means, int row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 m = means.load4(row, i);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float* y = x[t] + 4 * i;
      y[0] = add_rn(y[0], -m.x), y[1] = add_rn(y[1], -m.y);
      y[2] = add_rn(y[2], -m.z), y[3] = add_rn(y[3], -m.w);
    }
  }
}

// Dot products of kTokens rows with kHeads means, summed over the lanes that share the rows,
// neighbours first. Sum t * kHeads + h is token t with head h. While more than one is left, a lane
// and its partner keep half of them each: 7 shuffles for 8 sums on 8 lanes instead of 24.
template <int kTokens, int kHeads, int kBlocks>
struct DotHeads {
  static constexpr int kSums = kTokens * kHeads;
  static constexpr int kLeft = kSums > kBlocks ? kSums / kBlocks : 1;  // sums of a lane at the end
  static constexpr int kLanes = kSums / kLeft;  // lanes below this one hold different ones

  float sums[kSums];

  // First of the kLeft sums that lane `block` ends up with; they differ in the head only.
  static __device__ __forceinline__ int first(int block) {
    int index = 0;
#pragma unroll
    for (int step = 0; 1 << step < kBlocks; ++step) {
      index += (block >> step & 1) * (kSums >> (step + 1));
    }
    return index;
  }

  template <class MeansOf>
  __device__ __forceinline__ DotHeads(const float (*x)[kBlock], const MeansOf& means, int row,
                                      int block) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 m = means.load4(row + h, i);
        const float m4[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          float& sum = sums[t * kHeads + h];
          sum = dot4(i == 0 ? 0.0f : sum, x[t] + 4 * i, m4, i == 0);
        }
      }
    }
#pragma unroll
    for (int step = 0; 1 << step < kBlocks; ++step) {
      const int half = kSums >> (step + 1);
      if (half == 0) {
        sums[0] = add_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 1 << step));
      }
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const bool upper = block >> step & 1;
        const float kept = upper ? sums[half + i] : sums[i];
        const float sent = upper ? sums[i] : sums[half + i];
        sums[i] = add_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1 << step));
      }
    }
  }
};

// Of the tokens of a thread, the one whose sums DotHeads leaves with lane `block`.
template <int kTokens>
__device__ __forceinline__ int lane_token(int block) {
  return kTokens == 2 ? block & 1 : 0;
}

template <int kTokens, int kHeads, int kBlocks, class MeansOf>
__device__ __forceinline__ void delta_of_heads(const float (*x)[kBlock], const MeansOf& means,
                                               int g, int block, uint8_t* out, uint32_t stride,
                                               bool live) {
  using Dots = DotHeads<kTokens, kHeads, kBlocks>;
  const Dots dots(x, means, 1 + g, block);
  if (!live || block >= Dots::kLanes) return;
  const int head = g + Dots::first(block) % kHeads;
#pragma unroll
  for (int i = 0; i < Dots::kLeft; ++i) {
    ptx::st_global_u16(ptx::advance(out, static_cast<uint32_t>(head + i), stride),
                       static_cast<uint16_t>(bf16_bits(dots.sums[i])));
  }
}

// Delta_S of the G query heads of a KV head from centred rows. A lane stores for its lane_token;
// `out` is that token's place of head 0, the next head's is `stride` bytes on, and `live` says
// whether it is written.
template <int kTokens, int kBlocks, class MeansOf>
__device__ __forceinline__ void delta_scores(const float (*x)[kBlock], const MeansOf& means,
                                             int group_size, int block, uint8_t* out,
                                             uint32_t stride, bool live) {
  int g = 0;
#pragma unroll 1
  for (; g + 4 <= group_size; g += 4) {
    delta_of_heads<kTokens, 4, kBlocks>(x, means, g, block, out, stride, live);
  }
  if (group_size & 2) {
    delta_of_heads<kTokens, 2, kBlocks>(x, means, g, block, out, stride, live);
    g += 2;
  }
  if (group_size & 1) delta_of_heads<kTokens, 1, kBlocks>(x, means, g, block, out, stride, live);
}

}  // namespace mpfa::quant
