// SPDX-License-Identifier: Apache-2.0
// The qk4pv8 writer: centre K, take out outlier channels, NVFP4 K, e4m3 V, Delta_S, scatter into
// pages, and the quantised query in the same launch. docs/kernels/quant.md has the picture.
//
// A CTA takes kTokensPerThread*256/(D/16) consecutive tokens of one head; D/16 neighbouring lanes
// share a row of D channels. The CTAs of all heads of the same tokens are neighbours in the grid:
// their input is one contiguous piece.
#pragma once

#include "mpfa/ptx/pdl.cuh"
#include "mpfa/quant/means.cuh"

namespace mpfa::quant {

struct Place {
  uint32_t page;
  uint32_t offset;
};

__device__ __forceinline__ Place place_of(const TokenMap& map, int64_t slot) {
  if (map.slots == nullptr) return {0, static_cast<uint32_t>(slot)};
  return {static_cast<uint32_t>(slot >> map.page_shift),
          static_cast<uint32_t>(slot) & ((1u << map.page_shift) - 1)};
}

// `base` is resolved for head and block.
__device__ __forceinline__ uint8_t* at_place(uint8_t* base, const Pages& t, Place at) {
  return base + static_cast<uint64_t>(at.page) * t.page + static_cast<uint64_t>(at.offset) * t.row;
}

__device__ __forceinline__ const uint8_t* at_token(const Tokens& t, int head, int token) {
  return t.data + head * t.head + static_cast<uint64_t>(static_cast<uint32_t>(token)) * t.token;
}

__device__ __forceinline__ uint8_t* scale_address(const Qk4pv8Params& p, Place at, int head,
                                                  int block) {
  uint8_t* base = p.k_scale.data + head * p.k_scale.head;
  if (!p.scale_atoms) return at_place(base + block, p.k_scale, at);
  return base + static_cast<uint64_t>(at.page) * p.k_scale.page +
         static_cast<uint64_t>(block >> 2) * p.k_scale.row + (at.offset & 31) * 16 +
         (at.offset >> 5) * 4 + (block & 3);
}

// bf16 of an outlier channel, centred as the FP4 operand is. Read again from L1 instead of picked
// from another lane's registers by a run-time index.
template <class In, bool kMean>
__device__ __forceinline__ uint16_t outlier(const Row& row, const float* mean, int channel) {
  float x = load_value<In>(row.source, channel);
  if (row.padding) x = finite_or_zero(x);
  if (kMean) x = add_rn(x, -__ldg(mean + channel));
  return static_cast<uint16_t>(bf16_bits(x));
}

__device__ __forceinline__ int channel_at(const Qk4pv8Params& p, int kv_head, int slot) {
  return __ldg(p.channel_index + kv_head * p.channel_stride + slot);
}

template <class In, bool kMean>
__device__ __forceinline__ void write_outliers(const Qk4pv8Params& p, const Row& row, Place at,
                                               int head, int block) {
  uint16_t* out = reinterpret_cast<uint16_t*>(
      at_place(p.outliers.data + head * p.outliers.head, p.outliers, at));
  const float* mean = kMean ? mean_of(p.k_mean, row.stats, head) : nullptr;
#pragma unroll 2
  for (int i = block; i < p.channels; i += 1 << p.block_shift) {
    out[i] = outlier<In, kMean>(row, mean, channel_at(p, head, i));
  }
}

// A row of a_comp: 1 in slot 0 when there is a mean, the outlier channels, zeros.
template <class In, bool kMean>
__device__ __forceinline__ void write_a_comp(const Qk4pv8Params& p, const Row& row, int64_t index,
                                             int q_head, int kv_head, int block) {
  const float* mean = kMean ? mean_of(p.q_mean, row.stats, q_head) : nullptr;
#pragma unroll 1
  for (int i = block; i < kCompSlots; i += 1 << p.block_shift) {
    const int slot = i - (kMean ? 1 : 0);
    uint16_t bits = 0;
    if (slot < 0) {
      bits = 0x3f80;
    } else if (slot < p.channels) {
      bits = outlier<In, kMean>(row, mean, channel_at(p, kv_head, slot));
    }
    p.a_comp[index * kCompSlots + i] = bits;
  }
}

// Bit i of mask[b]: channel 16*b + i is an outlier channel of this KV head. Ends with a barrier.
__device__ __forceinline__ void build_channel_masks(const Qk4pv8Params& p, int kv_head,
                                                    uint32_t* mask) {
  if (threadIdx.x < 16) mask[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < p.channels) {
    const int channel = channel_at(p, kv_head, threadIdx.x);
    if (static_cast<uint32_t>(channel) < 16u << p.block_shift) {
      atomicOr(mask + (channel >> 4), 1u << (channel & 15));
    }
  }
  __syncthreads();
}

template <class In>
__device__ __forceinline__ void write_v(const Qk4pv8Params& p, const uint32_t* packed, Place at,
                                        int head, int block) {
  float v[kBlock];
  uint32_t words[4];
  unpack_block<In>(packed, v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = e4m3_x4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  uint8_t* out = at_place(p.v_out.data + head * p.v_out.head + block * kBlock, p.v_out, at);
  store_words<16>(out, words, p.v_out.vector);
}

template <class In, bool kMean, bool kFourOverSix>
__global__ void __launch_bounds__(kThreads, kMinCtas)
    quant_qk4pv8(const __grid_constant__ Qk4pv8Params p) {
  __shared__ uint32_t channel_masks[16];
  extern __shared__ float4 shared_means[];
  const int block = threadIdx.x & ((1 << p.block_shift) - 1);
  const int rows_per_pass = kThreads >> p.block_shift;
  const uint32_t tile = blockIdx.x / static_cast<uint32_t>(p.head_blocks);
  const int head_block = blockIdx.x - tile * p.head_blocks;
  const int tile_token = tile * rows_per_pass * kTokensPerThread;
  const int first_token = tile_token + (threadIdx.x >> p.block_shift);
  const bool is_query = head_block >= p.kv_blocks;
  const int head = is_query ? head_block - p.kv_blocks : head_block;
  const int kv_head = is_query ? head / p.group_size : head;
  const Tokens& input = is_query ? p.q : p.k;

  ptx::grid_dependency_wait();
  Row rows[kTokensPerThread];
  uint32_t packed[kTokensPerThread][8] = {};
  uint32_t v_packed[kTokensPerThread][8] = {};
#pragma unroll
  for (int t = 0; t < kTokensPerThread; ++t) {
    Row& row = rows[t];
    row.token = first_token + t * rows_per_pass;
    row.live = row.token < p.map.num_tokens;
    row.padding = false;
    row.slot = 0;
    row.stats = 0;
    row.source = at_token(input, head, row.live ? row.token : 0);
    if (!row.live) continue;
    // The loads do not wait for the slot.
    load_block<false>(row.source + block * (2 * kBlock), input.vector, packed[t]);
    if (!is_query) {
      load_block<true>(at_token(p.v, head, row.token) + block * (2 * kBlock), p.v.vector,
                       v_packed[t]);
      row.slot = load_slot(p.map, row.token);
      row.live = row.slot >= 0 && row.slot < p.map.num_slots;
    } else if (p.map.slots != nullptr) {
      row.padding = load_slot(p.map, row.token) < 0;
    }
    if (kMean && p.per_request && !row.padding) {
      row.stats = stats_row(p.map, row.token);
      row.live = row.live && row.stats >= 0;
    }
  }
  ptx::grid_launch_dependents();

  uint32_t mask = 0;
  if (p.channels > 0) {
    build_channel_masks(p, kv_head, channel_masks);
    mask = channel_masks[block];
  }
  bool shared = false;
  if (kMean) {
    shared = stage_means(p, rows, tile_token, head, kv_head, is_query, shared_means);
  }

  if (!is_query) {
#pragma unroll
    for (int t = 0; t < kTokensPerThread; ++t) {
      if (rows[t].live) write_v<In>(p, v_packed[t], place_of(p.map, rows[t].slot), head, block);
    }
  }

  float x[kTokensPerThread][kBlock];
#pragma unroll
  for (int t = 0; t < kTokensPerThread; ++t) {
    unpack_block<In>(packed[t], x[t]);
    // why: the vote makes it a branch; as selects it would cost every thread three instructions a
    // value.
    if (__any_sync(0xffffffffu, rows[t].padding) && rows[t].padding) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) x[t][i] = finite_or_zero(x[t][i]);
    }
  }

  if (kMean) {
    const auto centre = [&](const auto& means) {
      if (is_query) {
        centre_query(p, means, x, rows, head, block);
      } else {
        uint8_t* delta = p.delta.data + head * p.delta.head;
        centre_key(p, means, x, rows, block, [&](int t, int g, uint16_t bits) {
          uint8_t* out =
              at_place(delta, p.delta,
                       place_of(p.map, t == 0 ? rows[0].slot : rows[kTokensPerThread - 1].slot));
          *reinterpret_cast<uint16_t*>(out + g * p.delta_group) = bits;
        });
      }
    };
    if (shared) {
      centre(SharedMeans(shared_means, p.block_shift, block));
    } else {
      centre(GlobalMeans(p, rows, head, kv_head, is_query, block));
    }
  }

#pragma unroll
  for (int t = 0; t < kTokensPerThread; ++t) {
    const Row& row = rows[t];
    if (!row.live) continue;
    if (mask != 0) drop_channels(x[t], mask);
    const Nvfp4Block q = quantize_nvfp4<kFourOverSix>(x[t]);
    if (is_query) {
      const int64_t index = static_cast<int64_t>(row.token) * p.num_kv_heads * p.group_size + head;
      const int64_t at = (index << p.block_shift) + block;
      store_words<8>(p.q_out + at * (kBlock / 2), q.codes, true);
      p.q_scale[at] = static_cast<uint8_t>(q.scale);
      if (p.a_comp != nullptr) write_a_comp<In, kMean>(p, row, index, head, kv_head, block);
    } else {
      const Place at = place_of(p.map, row.slot);
      uint8_t* base = p.k_out.data + head * p.k_out.head + block * (kBlock / 2);
      store_words<8>(at_place(base, p.k_out, at), q.codes, p.k_out.vector);
      *scale_address(p, at, head, block) = static_cast<uint8_t>(q.scale);
      if (p.channels > 0) write_outliers<In, kMean>(p, row, at, head, block);
    }
  }
}

// CTAs of the launch; 0 when there is nothing to do.
inline int64_t qk4pv8_grid(const Qk4pv8Params& p) {
  const int64_t tokens_per_cta = (kThreads >> p.block_shift) * kTokensPerThread;
  return (p.map.num_tokens + tokens_per_cta - 1) / tokens_per_cta * p.head_blocks;
}

}  // namespace mpfa::quant
