// SPDX-License-Identifier: Apache-2.0
// Global memory access of the quantise kernels: 16 channels per thread, vectors where alignment
// allows.
#pragma once

#include "mpfa/ptx/ldst.cuh"
#include "mpfa/quant/block.h"
#include "mpfa/quant/params.h"

namespace mpfa::quant {

// 16 values of 16 bits at p. Unaligned views (any token and head stride) go element by element.
template <bool kStream>
__device__ __forceinline__ void load_block(const uint8_t* p, bool vector, uint32_t* w) {
  if (vector) {
    const uint4 a = kStream ? ptx::ld_nc_stream_v4(p) : ptx::ld_nc_v4(p);
    const uint4 b = kStream ? ptx::ld_nc_stream_v4(p + 16) : ptx::ld_nc_v4(p + 16);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  } else {
    const uint16_t* e = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = __ldg(e + 2 * i) | __ldg(e + 2 * i + 1) << 16;
  }
}

template <class In>
__device__ __forceinline__ void unpack_block(const uint32_t* w, float* x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) In::unpack(w[i], x[2 * i], x[2 * i + 1]);
}

template <class In>
__device__ __forceinline__ float load_value(const uint8_t* p, int channel) {
  return In::value(__ldg(reinterpret_cast<const uint16_t*>(p) + channel));
}

__device__ __forceinline__ float4 load_mean4(const float* p) {
  return __ldg(reinterpret_cast<const float4*>(p));
}

// kBytes (8 or 16) from words, as one store or byte by byte.
template <int kBytes>
__device__ __forceinline__ void store_words(uint8_t* p, const uint32_t* w, bool vector) {
  if (!vector) {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) p[i] = static_cast<uint8_t>(w[i / 4] >> (8 * (i % 4)));
  } else if (kBytes == 16) {
    *reinterpret_cast<uint4*>(p) = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(w[0], w[1]);
  }
}

__device__ __forceinline__ int64_t load_slot(const TokenMap& map, int token) {
  if (map.slots == nullptr) return token;
  return map.slots_are_64 ? __ldg(static_cast<const long long*>(map.slots) + token)
                          : __ldg(static_cast<const int32_t*>(map.slots) + token);
}

// Request that holds `token`: the last b with indptr[b] <= token.
__device__ __forceinline__ int find_request(const int32_t* indptr, int count, int token) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    (__ldg(indptr + mid) <= token ? low : high) = mid;
  }
  return low;
}

// Row of the statistics for `token`, or -1 if batch_indices holds one that does not exist.
__device__ __forceinline__ int stats_row(const TokenMap& map, int token) {
  if (map.rows != nullptr) {
    const int row = __ldg(map.rows + token);
    return static_cast<uint32_t>(row) < static_cast<uint32_t>(map.num_rows) ? row : -1;
  }
  return map.indptr == nullptr ? 0 : find_request(map.indptr, map.num_rows, token);
}

// Pairwise sum over the 2^shift neighbouring lanes that share a row, neighbours first; every lane
// of the warp takes part and every lane of the row gets the sum.
__device__ __forceinline__ float sum_over_row(float x, int shift) {
#pragma unroll 1
  for (int i = 0; i < shift; ++i) x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, 1 << i));
  return x;
}

}  // namespace mpfa::quant
