// SPDX-License-Identifier: Apache-2.0
// The qk4pv8 writer: centre K, take out outlier channels, NVFP4 K, e4m3 V, Delta_S, scatter into
// pages, and the quantised query in the same launch. docs/kernels/quant.md has the picture.
//
// Grid: heads in x, so that CTAs in flight read whole tokens; y takes p.passes * 128/(D/16) tokens.
// D/16 neighbouring lanes share a row of D channels. What does not depend on the token is done once
// for all passes.
#pragma once

#include "mpfa/ptx/address.cuh"
#include "mpfa/ptx/pdl.cuh"
#include "mpfa/quant/means.cuh"

namespace mpfa::quant {

// Tuning knobs; benchmarks/append.py --variants builds others. CTAs per SM that registers allow, 0
// for what each kernel was fastest with on an H200; rows of a thread at a time, with means.
#ifndef MPFA_QUANT_MIN_CTAS
#define MPFA_QUANT_MIN_CTAS 0
#endif
#ifndef MPFA_QUANT_TOKENS
#define MPFA_QUANT_TOKENS 1
#endif
#ifndef MPFA_QUANT_PASSES
#define MPFA_QUANT_PASSES 0
#endif
// CTAs of one pass below which a CTA takes no more than that: few tokens go to many SMs.
#ifndef MPFA_QUANT_FEW_CTAS
#define MPFA_QUANT_FEW_CTAS 4096
#endif

constexpr int min_ctas(bool mean, bool four_over_six) {
  return MPFA_QUANT_MIN_CTAS > 0 ? MPFA_QUANT_MIN_CTAS : !four_over_six ? 8 : mean ? 6 : 7;
}

__device__ __forceinline__ uint8_t* at_place(uint8_t* base, const Pages& t, uint32_t page,
                                             uint32_t offset) {
  return ptx::advance(ptx::advance(base, page, t.page), offset, t.row);
}

__device__ __forceinline__ const uint8_t* at_token(const uint8_t* base, const Tokens& t,
                                                   int token) {
  return ptx::advance(base, static_cast<uint32_t>(token), t.token);
}

// `index` of the lane, or -1 if a lower lane has the same one. Called by a whole warp; lanes from
// kCompSlots on hold -1.
__device__ __forceinline__ int first_of_equals(int index) {
  int found = index;
#pragma unroll 1
  for (int lane = 0; lane < kCompSlots; ++lane) {
    const int other = __shfl_sync(0xffffffffu, index, lane);
    if (other == index && lane < static_cast<int>(threadIdx.x)) found = -1;
  }
  return found;
}

// The outlier channels of a KV head as the lanes of a row need them, in shared memory.
template <int kBlocks>
struct Outliers {
  static constexpr int kPerLane = kCompSlots / kBlocks;  // slots block, block + kBlocks, ...

  uint4 keep_pairs[2][kBlocks];  // for packed 16-bit values: 0 for outliers, else all ones
  // Channel of the slot, and from bit 16 on its mean in row 0; kNoChannel: the slot holds 0.
  uint32_t where[kPerLane][kBlocks];
  static constexpr uint32_t kNoChannel = 0xffffffffu;

  // Called by the first warp of the CTA. `keep`: null, or where the row of masks for mask() goes.
  __device__ __forceinline__ void set(const Qk4pv8Params& p, int kv_head, float4* keep) {
    const int lane = threadIdx.x;
    const int block = lane % kBlocks;
    int index = -1;
    if (lane < p.channels) index = __ldg(p.channel_index + kv_head * p.channel_stride + lane);
    // why: what is on the device was not checked. A slot whose channel does not exist, or is that
    // of an earlier slot, holds 0, in K and Q alike, so that no channel counts twice.
    if (static_cast<uint32_t>(index) >= static_cast<uint32_t>(kBlocks * kBlock)) index = -1;
    const uint32_t bit = index < 0 ? 0u : 1u << (index & 31);
    uint32_t mask = 0;  // bit i: channel i of the block is one
    int distinct = 0;
#pragma unroll
    for (int word = 0; word < kBlocks / 2; ++word) {
      const uint32_t all = __reduce_or_sync(0xffffffffu, index >> 5 == word ? bit : 0u);
      if (block >> 1 == word) mask = all >> (16 * (block & 1)) & 0xffffu;
      distinct += __popc(all);
    }
    if (distinct != __popc(__ballot_sync(0xffffffffu, index >= 0))) index = first_of_equals(index);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int found = __shfl_sync(0xffffffffu, index, block + j * kBlocks);
      where[j][block] =
          found < 0 ? kNoChannel
                    : static_cast<uint32_t>(found) | SharedMeans<kBlocks>::float_place(found) << 16;
    }
    const auto pair = [&](int i) {
      return (mask >> (2 * i) & 1u ? 0u : 0xffffu) | (mask >> (2 * i + 1) & 1u ? 0u : 0xffff0000u);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      keep_pairs[i][block] =
          make_uint4(pair(4 * i), pair(4 * i + 1), pair(4 * i + 2), pair(4 * i + 3));
    }
    if (keep == nullptr) return;
    const auto ones = [&](int i) { return from_bits(mask >> i & 1u ? 0u : 0xffffffffu); };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keep[SharedMeans<kBlocks>::place(0, i, block)] =
          make_float4(ones(4 * i), ones(4 * i + 1), ones(4 * i + 2), ones(4 * i + 3));
    }
  }
  __device__ __forceinline__ void drop(uint32_t* w, int block) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 m = keep_pairs[i][block];
      w[4 * i] &= m.x, w[4 * i + 1] &= m.y, w[4 * i + 2] &= m.z, w[4 * i + 3] &= m.w;
    }
  }
  __device__ __forceinline__ void drop(float* x, int block) const {
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = 0xffffffffu;
    drop(w, block);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t all = 0u - (w[i / 2] >> (16 * (i & 1)) & 1u);
      x[i] = from_bits(bits_of(x[i]) & all);
    }
  }
};

// bf16 of this lane's outlier channels of a row, centred as the FP4 operand is: store(j, bits). The
// values are in L1. `row` has head and token resolved.
template <class In, bool kMean, int kBlocks, class MeansOf, class Store>
__device__ __forceinline__ void write_outliers(const uint8_t* row,
                                               const Outliers<kBlocks>& outliers,
                                               const MeansOf& means, int mean_row, int block,
                                               int channels, bool padding, const Store& store) {
#pragma unroll
  for (int j = 0; j < Outliers<kBlocks>::kPerLane; ++j) {
    if (block + j * kBlocks >= channels) break;
    const uint32_t where = outliers.where[j][block];
    float x = 0.0f;
    if (where != Outliers<kBlocks>::kNoChannel) {
      x = load_value<In>(row, where & 0xffffu);
      if (padding) x = finite_or_zero(x);
      if (kMean) x = add_rn(x, -means.at(mean_row, where));
    }
    store(j, static_cast<uint16_t>(bf16_bits(x)));
  }
}

template <class In, bool kVector>
__device__ __forceinline__ void write_v(const uint32_t* packed, uint8_t* out) {
  float v[kBlock];
  uint32_t words[4];
  unpack_block<In>(packed, v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = e4m3_x4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  store_words<16, kVector>(out, words);
}

// Where the lanes of a row read and write, head and block resolved, in shared memory: the same for
// every token, and in registers it would crowd out the row. In pairs, so that neighbouring lanes
// read neighbouring 16 bytes.
template <int kBlocks>
struct Places {
  ulonglong2 pairs[4][kBlocks];

  __device__ __forceinline__ void set(const Qk4pv8Params& p, uint32_t head, uint32_t block) {
    const uint8_t* k = ptx::advance(p.k.data, head, p.k.head);
    const uint8_t* v = ptx::advance(p.v.data, head, p.v.head) + block * (2 * kBlock);
    pairs[0][block] = pair(k, v);
    const uint8_t* scale = head_of(p.k_scale, head);
    scale = p.scale_atoms ? ptx::advance(scale, block >> 2, p.k_scale.row) + (block & 3)
                          : scale + block;
    pairs[1][block] = pair(head_of(p.k_out, head) + block * (kBlock / 2), scale);
    pairs[2][block] = pair(head_of(p.v_out, head) + block * kBlock, head_of(p.delta, head));
    pairs[3][block] = pair(head_of(p.outliers, head) + 2 * block, nullptr);
  }
  __device__ __forceinline__ const uint8_t* k(int b) const { return pointer(pairs[0][b].x); }
  __device__ __forceinline__ const uint8_t* v(int b) const { return pointer(pairs[0][b].y); }
  __device__ __forceinline__ uint8_t* codes(int b) const { return pointer(pairs[1][b].x); }
  __device__ __forceinline__ uint8_t* scale(int b) const { return pointer(pairs[1][b].y); }
  __device__ __forceinline__ uint8_t* v_out(int b) const { return pointer(pairs[2][b].x); }
  __device__ __forceinline__ uint8_t* delta(int b) const { return pointer(pairs[2][b].y); }
  __device__ __forceinline__ uint8_t* outliers(int b) const { return pointer(pairs[3][b].x); }

  static __device__ __forceinline__ const uint8_t* head_of(const Pages& t, uint32_t head) {
    return ptx::advance(t.data, head, t.head);
  }
  static __device__ __forceinline__ ulonglong2 pair(const uint8_t* a, const uint8_t* b) {
    return make_ulonglong2(reinterpret_cast<uint64_t>(a), reinterpret_cast<uint64_t>(b));
  }
  static __device__ __forceinline__ uint8_t* pointer(uint64_t x) {
    return reinterpret_cast<uint8_t*>(x);
  }
};

template <int kBlocks>
struct Tables {
  Places<kBlocks> places;
  Outliers<kBlocks> outliers;
};

// K and V of one KV head. kShared: all tokens of the CTA use statistics row `common`. A thread
// takes kTokens rows at a time, so that a mean is read from shared memory once for all of them.
template <class In, int kDim, bool kMean, bool kChannels, bool kFourOverSix, bool kVector,
          bool kShared, int kTokens>
__device__ __forceinline__ void write_keys(const Qk4pv8Params& p, int head, int common,
                                           Tables<kDim / kBlock>& tables, float4* staged) {
  constexpr int kBlocks = kDim / kBlock;
  constexpr int kRows = kRowThreads / kBlocks;
  const Places<kBlocks>& places = tables.places;
  const int block = threadIdx.x % kBlocks;
  const int begin = blockIdx.y * (p.passes * kRows);
  const int end = min(begin + p.passes * kRows, p.map.num_tokens);
  if (threadIdx.x < kBlocks) tables.places.set(p, head, block);
  __syncthreads();

  int token = begin + threadIdx.x / kBlocks;
#pragma unroll 1
  for (int base = begin; base < end; base += kTokens * kRows, token += kTokens * kRows) {
    uint32_t k[kTokens][8], v[kTokens][8];
    int64_t slot[kTokens];
    int stats[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int mine = token + t * kRows;
      slot[t] = -1;
      stats[t] = 0;
      if (mine >= end) continue;
      load_block<false, kVector>(at_token(places.k(block), p.k, mine) + block * (2 * kBlock), k[t]);
      load_block<true, kVector>(at_token(places.v(block), p.v, mine), v[t]);
      slot[t] = load_slot(p.map, mine);
      if (kMean && p.per_request) stats[t] = stats_row(p.map, mine);
    }
    if ((kMean || kChannels) && base == begin) {  // while the first rows are on their way
      if (kChannels && threadIdx.x < 32) {
        tables.outliers.set(p, head,
                            kMean && kShared ? staged + (1 + p.group_size) * 4 * kBlocks : nullptr);
      }
      if (kMean && kShared) {
        stage_means<kBlocks>(p, common, head, head * p.group_size, p.group_size, staged);
      }
      __syncthreads();
    }
    bool live[kTokens];
    uint32_t page[kTokens], offset[kTokens];
    float x[kTokens][kBlock];
    float amax[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      live[t] = !is_skipped(p.map, slot[t]) && stats[t] >= 0;
      page[t] = static_cast<uint32_t>(slot[t] >> p.map.page_shift);
      offset[t] = static_cast<uint32_t>(slot[t]) & ((1u << p.map.page_shift) - 1);
      if (live[t]) {
        write_v<In, kVector>(v[t], at_place(places.v_out(block), p.v_out, page[t], offset[t]));
      }
    }
    const auto centre = [&](const auto& means) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (kChannels && p.channels > 0 && live[t]) {
          uint8_t* out = at_place(places.outliers(block), p.outliers, page[t], offset[t]);
          write_outliers<In, kMean>(
              at_token(places.k(block), p.k, token + t * kRows), tables.outliers, means, 0, block,
              p.channels, false,
              [&](int j, uint16_t bits) { ptx::st_global_u16(out + j * (2 * kBlocks), bits); });
        }
        if (!kMean) {
          if (kChannels) tables.outliers.drop(k[t], block);
          amax[t] = amax_packed<In>(k[t]);
        }
        unpack_block<In>(k[t], x[t]);
      }
      if (!kMean) return;
      subtract<kTokens>(x, means, 0);
      const int t = lane_token<kTokens>(block);
      const bool second = kTokens == 2 && t == 1;
      delta_scores<kTokens, kBlocks>(
          x, means, p.group_size, block,
          at_place(places.delta(block), p.delta, second ? page[kTokens - 1] : page[0],
                   second ? offset[kTokens - 1] : offset[0]),
          p.delta_group, second ? live[kTokens - 1] : live[0]);
      if (kChannels && kShared) mask<kTokens>(x, means, 1 + p.group_size);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (kChannels && !kShared) tables.outliers.drop(x[i], block);
        amax[i] = amax16(x[i]);
      }
    };
    if (!kMean || kShared) {
      centre(SharedMeans<kBlocks>{staged, block});
    } else {
      centre(GlobalMeans{mean_of(p.k_mean, stats[0], head),
                         mean_of(p.q_mean, stats[0], head * p.group_size), p.q_mean.head, block});
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (!live[t]) continue;
      const Nvfp4Block q = quantize_nvfp4<kFourOverSix>(x[t], amax[t]);
      store_words<8, kVector>(at_place(places.codes(block), p.k_out, page[t], offset[t]), q.codes);
      uint8_t* out = ptx::advance(places.scale(block), page[t], p.k_scale.page);
      out = p.scale_atoms ? out + ((offset[t] & 31) * 16 + (offset[t] >> 5) * 4)
                          : ptx::advance(out, offset[t], p.k_scale.row);
      ptx::st_global_u8(out, q.scale);
    }
  }
}

// Q of one query head, with a_comp and the row term.
template <class In, int kDim, bool kMean, bool kChannels, bool kFourOverSix, bool kVector>
__device__ __forceinline__ void write_queries(const Qk4pv8Params& p, int head,
                                              Tables<kDim / kBlock>& tables, float4* staged) {
  constexpr int kBlocks = kDim / kBlock;
  constexpr int kRows = kRowThreads / kBlocks;
  const int block = threadIdx.x % kBlocks;
  const int kv_head = head / p.group_size;
  const int begin = blockIdx.y * (p.passes * kRows);
  const int end = min(begin + p.passes * kRows, p.map.num_tokens);
  const uint8_t* q_head = ptx::advance(p.q.data, head, p.q.head);
  const int64_t q_heads = static_cast<int64_t>(p.num_kv_heads) * p.group_size;
  const int common = kMean ? common_row(p, begin, end) : -1;
  if (kChannels && threadIdx.x < 32) tables.outliers.set(p, kv_head, nullptr);
  if (kMean && common >= 0) stage_means<kBlocks>(p, common, kv_head, head, 1, staged);
  if (kMean || kChannels) __syncthreads();

#pragma unroll 1
  for (int base = begin; base < end; base += kRows) {
    const int token = base + threadIdx.x / kBlocks;
    const uint8_t* source = at_token(q_head, p.q, token);
    const bool live = token < end;
    // A skipped token, or one whose statistics row does not exist: statistics row 0, NaN and
    // infinity count as 0.
    bool padding = false;
    int stats = 0;
    uint32_t packed[8] = {};
    if (live) {
      load_block<false, kVector>(source + block * (2 * kBlock), packed);
      padding = p.map.slots != nullptr && is_skipped(p.map, load_slot(p.map, token));
      if (kMean && p.per_request && !padding) {
        const int row = stats_row(p.map, token);
        padding = row < 0;
        stats = padding ? 0 : row;
      }
    }
    float x[kBlock];
    unpack_block<In>(packed, x);
    // why: the vote makes it a branch; as selects it would cost every thread three instructions a
    // value.
    if (__any_sync(0xffffffffu, padding) && padding) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) x[i] = finite_or_zero(x[i]);
    }
    const int64_t index = token * q_heads + head;
    const auto centre = [&](const auto& means) {
      if (kMean) {
        const DotHeads<1, 1, kBlocks> dot(&x, means, 0, block);
        if (live && block == 0) p.row_term[index] = dot.sums[0];
        subtract<1>(&x, means, 1);
      }
      if (p.a_comp == nullptr || !live) return;
      // 1 in slot 0 when there is a mean, the outlier channels, zeros.
      uint16_t* out = p.a_comp + index * kCompSlots;
      if (kMean && block == 0) out[0] = 0x3f80;
      out += kMean ? 1 : 0;
      for (int i = block; i < kCompSlots - (kMean ? 1 : 0); i += kBlocks) {
        if (i >= p.channels) out[i] = 0;
      }
      if (!kChannels) return;
      write_outliers<In, kMean>(source, tables.outliers, means, 1, block, p.channels, padding,
                                [&](int j, uint16_t bits) { out[block + j * kBlocks] = bits; });
    };
    // A padding token's row 0 is not the shared one in general.
    if (!kMean || (common >= 0 && !(p.per_request && __any_sync(0xffffffffu, padding)))) {
      centre(SharedMeans<kBlocks>{staged, block});
    } else {
      centre(GlobalMeans{mean_of(p.k_mean, stats, kv_head), mean_of(p.q_mean, stats, head),
                         p.q_mean.head, block});
    }
    if (!live) continue;
    if (kChannels) tables.outliers.drop(x, block);
    const Nvfp4Block q = quantize_nvfp4<kFourOverSix>(x, amax16(x));
    const int64_t at = index * kBlocks + block;
    store_words<8, true>(p.q_out + at * (kBlock / 2), q.codes);
    p.q_scale[at] = static_cast<uint8_t>(q.scale);
  }
}

template <class In, int kDim, bool kMean, bool kChannels, bool kFourOverSix, bool kVector>
__global__ void __launch_bounds__(kRowThreads, min_ctas(kMean, kFourOverSix))
    quant_qk4pv8(const __grid_constant__ Qk4pv8Params p) {
  extern __shared__ float4 staged_means[];
  __shared__ Tables<kDim / kBlock> tables;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int head = blockIdx.x;
  if (head >= p.kv_blocks) {
    write_queries<In, kDim, kMean, kChannels, kFourOverSix, kVector>(p, head - p.kv_blocks, tables,
                                                                     staged_means);
    return;
  }
  int common = 0;
  if (kMean) {
    const int tokens = p.passes * (kRowThreads / (kDim / kBlock));
    const int begin = blockIdx.y * tokens;
    common = common_row(p, begin, min(begin + tokens, p.map.num_tokens));
  }
  if (!kMean || common >= 0) {
    write_keys<In, kDim, kMean, kChannels, kFourOverSix, kVector, true,
               kMean ? MPFA_QUANT_TOKENS : 1>(p, head, common, tables, staged_means);
  } else {
    write_keys<In, kDim, kMean, kChannels, kFourOverSix, kVector, false, 1>(p, head, common, tables,
                                                                            staged_means);
  }
}

// Decides passes and means_in_shared.
struct Qk4pv8Launch {
  unsigned heads = 0;
  unsigned tiles = 0;  // 0: nothing to do
  size_t shared_bytes = 0;
};

inline Qk4pv8Launch plan_qk4pv8(Qk4pv8Params& p, int dim, bool four_over_six) {
  constexpr int64_t kMaxTiles = 65535;  // of gridDim.y
  const int64_t rows = kRowThreads / (dim / kBlock);
  const int64_t row_groups = (p.map.num_tokens + rows - 1) / rows;
  const int many = MPFA_QUANT_PASSES > 0 ? MPFA_QUANT_PASSES : p.has_mean || four_over_six ? 8 : 4;
  int64_t passes = row_groups * p.head_blocks < MPFA_QUANT_FEW_CTAS ? 1 : many;
  const int64_t fewest = (row_groups + kMaxTiles - 1) / kMaxTiles;
  if (passes < fewest) passes = fewest;
  p.passes = static_cast<int32_t>(passes);
  Qk4pv8Launch launch;
  launch.heads = static_cast<unsigned>(p.head_blocks);
  launch.tiles = static_cast<unsigned>((row_groups + passes - 1) / passes);
  // k_mean, q_mean of the heads, and which channels stay.
  const int mean_rows = 2 + (p.kv_blocks > 0 ? p.group_size : 1);
  const size_t bytes = static_cast<size_t>(mean_rows) * dim * sizeof(float);
  p.means_in_shared = p.has_mean && bytes <= 40 * 1024;
  launch.shared_bytes = p.means_in_shared ? bytes : 0;
  return launch;
}

}  // namespace mpfa::quant
