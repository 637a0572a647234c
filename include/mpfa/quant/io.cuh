// SPDX-License-Identifier: Apache-2.0
// Global memory access of the quantise kernels: 16 channels per thread, vectors where alignment
// allows.
#pragma once

#include "mpfa/ptx/ldst.cuh"
#include "mpfa/quant/block.h"
#include "mpfa/quant/params.h"

namespace mpfa::quant {

// 16 values of 16 bits at p. Unaligned views (any token and head stride) go element by element.
template <bool kStream, bool kVector>
__device__ __forceinline__ void load_block(const uint8_t* p, uint32_t* w) {
  if (kVector) {
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

// Largest magnitude of 16 packed values: the bits of a magnitude order as integers.
template <class In>
__device__ __forceinline__ float amax_packed(const uint32_t* w) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) m = __vmaxu2(m, w[i] & 0x7fff7fffu);
  return In::value(static_cast<uint16_t>(max(m & 0xffffu, m >> 16)));
}

template <class In>
__device__ __forceinline__ float load_value(const uint8_t* p, uint32_t channel) {
  return In::value(__ldg(reinterpret_cast<const uint16_t*>(p) + channel));
}

__device__ __forceinline__ float4 load_mean4(const float* p) {
  return __ldg(reinterpret_cast<const float4*>(p));
}

// kBytes (8 or 16) from words, as one store or byte by byte.
template <int kBytes, bool kVector>
__device__ __forceinline__ void store_words(uint8_t* p, const uint32_t* w) {
  if (!kVector) {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) ptx::st_global_u8(p + i, w[i / 4] >> (8 * (i % 4)));
  } else if (kBytes == 16) {
    ptx::st_global_v4(p, w[0], w[1], w[2], w[3]);
  } else {
    ptx::st_global_v2(p, w[0], w[1]);
  }
}

template <int kBytes>
__device__ __forceinline__ void store_words(uint8_t* p, const uint32_t* w, bool vector) {
  vector ? store_words<kBytes, true>(p, w) : store_words<kBytes, false>(p, w);
}

__device__ __forceinline__ int64_t load_slot(const TokenMap& map, int token) {
  if (map.slots == nullptr) return token;
  return map.slots_are_64 ? __ldg(static_cast<const long long*>(map.slots) + token)
                          : __ldg(static_cast<const int32_t*>(map.slots) + token);
}

// Negative, or past the last page.
__device__ __forceinline__ bool is_skipped(const TokenMap& map, int64_t slot) {
  return static_cast<uint64_t>(slot) >= static_cast<uint64_t>(map.num_slots);
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

}  // namespace mpfa::quant
