// SPDX-License-Identifier: Apache-2.0
// The query of a pass as fragments of the score MMA, with a power-of-two factor per column.
#pragma once

#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/f16x2.cuh"
#include "mpfa/ptx/prefetch.cuh"
#include "mpfa/sm90/decode/item.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

// Eight e2m1 codes, channels 0..7 from bit 0, times a pair of equal fp16 scales: {0, 2}, {4, 6},
// {1, 3}, {5, 7} as fp16 of the value / 64, exactly. Sign, exponent and mantissa of a code become
// those of an e4m3 byte; its exponent bias is 7 where e2m1 has 1. The products have 6 significant
// bits and are multiples of 2^-16 up to 42.
__device__ __forceinline__ void expand_codes(uint32_t codes, uint32_t scale, uint32_t (&x)[4]) {
  constexpr uint32_t kSign = 0x80808080u, kMagnitude = 0x1c1c1c1cu;
  const uint32_t even = (codes << 2 & kMagnitude) | (codes << 4 & kSign);
  const uint32_t odd = (codes >> 2 & kMagnitude) | (codes & kSign);
  x[0] = ptx::mul_f16x2(ptx::cvt_f16x2_e4m3x2(even), scale);
  x[1] = ptx::mul_f16x2(ptx::cvt_f16x2_e4m3x2<true>(even), scale);
  x[2] = ptx::mul_f16x2(ptx::cvt_f16x2_e4m3x2(odd), scale);
  x[3] = ptx::mul_f16x2(ptx::cvt_f16x2_e4m3x2<true>(odd), scale);
}

// The e4m3 scales of a lane's blocks of a row, each as a pair of equal fp16.
template <int Blocks>
__device__ __forceinline__ void expand_scales(uint32_t bytes, uint32_t (&pair)[Blocks]) {
  const uint32_t x = ptx::cvt_f16x2_e4m3x2(bytes);
  pair[0] = __byte_perm(x, x, 0x1010);
  if constexpr (Blocks == 2) pair[1] = __byte_perm(x, x, 0x3232);
}

__device__ __forceinline__ float bf16_to_float(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// A row of the query.
struct QueryRow {
  int64_t token;
  int32_t head;
  int32_t request;
};

__device__ __forceinline__ float query_value(QueryType type, uint32_t bits) {
  return type == QueryType::kBf16 ? bf16_to_float(bits)
                                  : ptx::cvt_f32_f16(static_cast<uint16_t>(bits));
}

// N neighbouring values from channel `first`, before centring. Of codes the value is e2m1 times
// e4m3.
template <int N>
__device__ __forceinline__ void load_values(const Params& p, const QueryRow& r, int32_t first,
                                            float (&x)[N]) {
  const uint8_t* row = p.a.q.row(r.token, r.head);
  if (p.query_type == QueryType::kQuantized) {
    const uint32_t code = __ldg(p.a.q_scale.row(r.token, r.head) + first / 16);
    const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(ptx::cvt_f16x2_e4m3x2(code)));
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t codes = __ldg(row + (first + i) / 2);
      // {0, 2}, ... of four bytes; only the first byte is there.
      uint32_t pairs[4];
      expand_codes(codes, 0x3c003c00u, pairs);
      x[i] = scale * ptx::cvt_f32_f16(static_cast<uint16_t>(pairs[0])) * (1 << kKeyShift);
      x[i + 1] = scale * ptx::cvt_f32_f16(static_cast<uint16_t>(pairs[2])) * (1 << kKeyShift);
    }
    return;
  }
  const uint16_t* values = reinterpret_cast<const uint16_t*>(row) + first;
  uint16_t bits[N];
  if (p.query_vectors != 0) {
    static_assert(N == 2 || N == 4, "one load");
    if constexpr (N == 4) {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(values));
      bits[0] = w.x, bits[1] = w.x >> 16, bits[2] = w.y, bits[3] = w.y >> 16;
    } else {
      const uint32_t w = __ldg(reinterpret_cast<const uint32_t*>(values));
      bits[0] = w, bits[1] = w >> 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = __ldg(values + i);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = query_value(p.query_type, bits[i]);
}

template <int N>
__device__ __forceinline__ void load_mean(const float* from, float (&x)[N]) {
  if constexpr (N == 4) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(from));
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    const float2 v = __ldg(reinterpret_cast<const float2*>(from));
    x[0] = v.x, x[1] = v.y;
  }
}

template <class Op>
__device__ __forceinline__ float reduce_warp(float x, Op&& op) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x = op(x, __shfl_xor_sync(kFullWarp, x, bit));
  return x;
}

// Slot `slot` of the row's channels as bf16, times `scale`, a power of two.
__device__ __forceinline__ uint16_t query_channel(const Params& p, const QueryRow& r,
                                                  int32_t kv_head, int32_t slot, float scale) {
  float value;
  if (p.query_type == QueryType::kQuantized) {
    // Slot 0 of a_comp is the one-hot factor of Delta where there is one.
    const uint16_t* slots = reinterpret_cast<const uint16_t*>(p.a.a_comp.row(r.token, r.head));
    value = bf16_to_float(__ldg(slots + slot + (p.delta_heads > 0 ? 1 : 0)));
  } else {
    const int32_t channel = __ldg(p.channel_index + kv_head * p.a.channels + slot);
    const uint8_t* row = p.a.q.row(r.token, r.head);
    value = query_value(p.query_type, __ldg(reinterpret_cast<const uint16_t*>(row) + channel));
    if (p.q_mean != nullptr) {
      value -= __ldg(p.q_mean + r.request * p.q_mean_request + r.head * p.q_mean_head + channel);
    }
    value = bf16_to_float(ptx::cvt_rn_bf16(value));
  }
  return ptx::cvt_rn_bf16(value * scale);
}

// The lines that load_column will read, by one warp that is ahead of the consumers.
template <class C>
__device__ __forceinline__ void prefetch_query(const Params& p, const Tile& tile, int32_t kv_head) {
  if (p.query_type == QueryType::kQuantized) return;
  constexpr int32_t kLines = C::kHeadDim / 64;  // of a row of q; a mean has twice as many
  const int32_t first = tile.pass * C::kColumns;
  const int32_t rows = min(tile.packing.rows - first, C::kColumns);
  for (int32_t i = threadIdx.x % 32; i < rows * 3 * kLines; i += 32) {
    const int32_t row = first + i / (3 * kLines), line = i % (3 * kLines);
    const int32_t head = kv_head * p.a.group_size + tile.packing.head(row);
    if (line < kLines) {
      ptx::prefetch_l1(p.a.q.row(tile.first_token + tile.packing.token(row), head) + line * 128);
    } else if (p.q_mean != nullptr) {
      ptx::prefetch_l1(p.q_mean + tile.item.request * p.q_mean_request + head * p.q_mean_head +
                       (line - kLines) * 32);
    }
  }
}

// One column by one warp: fp16 of (q - q_mean) 2^-exponent, the row's largest value in
// [2^10, 2^11), as parts of the B fragments of the score MMA. The order of channels is that of
// expand_codes for K: lane 4g + t of the MMA takes channels [t D/4, (t+1) D/4) of column g, eight
// to a word of codes; even ones go to k step 2j of word j, odd ones to 2j + 1.
template <class C>
__device__ __forceinline__ void load_column(const Params& p, const Tile& tile, int32_t kv_head,
                                            int32_t column, Tables<C>& tables, uint8_t* fragments) {
  constexpr int kCount = C::kHeadDim / 32;
  const int32_t lane = threadIdx.x % 32, first = lane * kCount, n = column / 8, g = column % 8;
  const int32_t row = tile.pass * C::kColumns + column;
  const bool used = row < tile.packing.rows;
  const int32_t known = used ? row : 0;
  const QueryRow r = {tile.first_token + tile.packing.token(known),
                      kv_head * p.a.group_size + tile.packing.head(known), tile.item.request};
  float x[kCount] = {};
  float row_term = 0.0f;
  if (used) {
    load_values(p, r, first, x);
    if (p.q_mean != nullptr) {
      float q[kCount], k[kCount];
      load_mean(p.q_mean + r.request * p.q_mean_request + r.head * p.q_mean_head + first, q);
      load_mean(p.k_mean + r.request * p.k_mean_request + kv_head * p.k_mean_head + first, k);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        row_term = fmaf(x[i], k[i], row_term);
        x[i] -= q[i];
      }
    } else if (p.a.row_term.data != nullptr && lane == 0) {
      row_term = __ldg(reinterpret_cast<const float*>(p.a.row_term.row(r.token, r.head)));
    }
  }
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) peak = fmaxf(peak, fabsf(x[i]));
  peak = reduce_warp(peak, [](float a, float b) { return fmaxf(a, b); });
  row_term = reduce_warp(row_term, [](float a, float b) { return a + b; });
  const int32_t top = static_cast<int32_t>(__float_as_uint(peak) >> 23) - 127;
  const int32_t exponent = peak == 0.0f ? 0 : max(top - 10, -100);
  const float scale = power_of_two(-exponent);
  uint16_t* halves = reinterpret_cast<uint16_t*>(fragments);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t channel = first + i, t = channel / (C::kHeadDim / 4);
    const int32_t j = channel % (C::kHeadDim / 4) / 8, inside = channel % 8;
    const int32_t step = 2 * j + inside % 2, half = inside / 2;
    halves[((step * C::kTiles + n) * 32 + 4 * g + t) * 4 + half] = ptx::cvt_rn_f16(x[i] * scale);
  }
  if (p.a.channels > 0 && lane < kMaxChannels) {
    const uint16_t value =
        used && lane < p.a.channels
            ? query_channel(p, r, kv_head, lane, power_of_two(-kKeyShift - exponent))
            : 0;
    // Lane 4g + t of the MMA takes slots 2t, 2t+1 and 2t+8, 2t+9.
    uint16_t* slots = reinterpret_cast<uint16_t*>(&tables.channels[n][4 * g + lane % 8 / 2]);
    slots[lane / 8 * 2 + lane % 2] = value;
  }
  if (lane == 0) {
    tables.factor[column] = power_of_two(kKeyShift + exponent);
    tables.row_term[column] = row_term;
    tables.token[column] = tile.packing.token(known);
    tables.head[column] = r.head;
  }
}

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
