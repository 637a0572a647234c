// SPDX-License-Identifier: Apache-2.0
// Online softmax of one warp's 16 rows, with P quantised to e4m3 and one power of two per row and
// KV block, carried by SFA. docs/numerics.md, "mxfp8"; mpfa/reference/replay.py computes the same.
//
// Lane 4g + t holds rows g (index 0) and g + 8 (index 1) of an accumulator.
#pragma once

#include "mpfa/core/mask.cuh"
#include "mpfa/core/soft_cap.cuh"
#include "mpfa/ptx/cvt.cuh"
#include "mpfa/ptx/math.cuh"
#include "mpfa/sm120/config.h"

namespace mpfa::sm120 {

#if defined(__CUDACC__)

// Keys of the two rows of a lane, as [begin, begin + count).
struct RowKeys {
  int32_t begin[2];
  uint32_t count[2];
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// First of the two neighbouring keys, inside the block of 8, that column 2t of n-tile j holds. why:
// odd tiles swap their halves, so that P needs no exchange between lanes (docs/kernels/sm120.md).
__device__ __forceinline__ int32_t key_of_column(int t, int j) {
  return 8 * j + ((2 * t) ^ (4 * (j & 1)));
}

template <class C>
__device__ __forceinline__ void mask_scores(float (&s)[C::kScoreTiles][4], const RowKeys& keys,
                                            int32_t first_key, int t) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // why unsigned: one comparison checks both ends.
    const uint32_t even = first_key + key_of_column(t, 0) - keys.begin[row];
    const uint32_t odd = first_key + key_of_column(t, 1) - keys.begin[row];
#pragma unroll
    for (int j = 0; j < C::kScoreTiles; ++j) {
      const uint32_t at = (j & 1) ? odd + 8 * (j - 1) : even + 8 * j;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (at + e >= keys.count[row]) s[j][2 * row + e] = -INFINITY;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void cap_scores(float (&s)[C::kScoreTiles][4], float cap, float ratio) {
#pragma unroll
  for (int j = 0; j < C::kScoreTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[j][i] = soft_cap(s[j][i], cap, ratio);
    }
  }
}

struct RowState {
  float reference[2];  // R = lambda * largest score so far; very low before the first key
  float sum[2];        // this lane's part of l, in units of 2^R

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      reference[row] = -1e38f;
      sum[row] = 0.0f;
    }
  }
};

// What a block's softmax leaves for the PV product.
struct BlockScale {
  uint32_t sfa;    // this lane's SFA byte: 2^(e - 8) of row g (even t) or g + 8 (odd t)
  float alpha[2];  // factor on what O holds already: below 1 where the block raises R
};

// One block: S becomes P' = 2^(lambda S - R - e + 8), e <= 0 the block's own exponent. why R is the
// exact maximum and not a power of two near it: the largest key is then coded without error, which
// halves P's error where few keys dominate (docs/kernels/sm120.md). No branches: the caller runs
// this between the MMAs of the next block.
template <class C>
__device__ __forceinline__ BlockScale softmax_block(float (&s)[C::kScoreTiles][4], RowState& state,
                                                    float lambda, int t) {
  BlockScale scale;
  uint32_t byte[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float m = fmaxf(s[0][2 * row], s[0][2 * row + 1]);
#pragma unroll
    for (int j = 1; j < C::kScoreTiles; ++j) {
      m = fmaxf(m, fmaxf(s[j][2 * row], s[j][2 * row + 1]));
    }
    const float top = quad_max(m) * lambda;
    const float reference = fmaxf(state.reference[row], top);
    scale.alpha[row] = ptx::ex2(state.reference[row] - reference);
    state.reference[row] = reference;
    // Nearest integer through the fp32 adder: the sum's low mantissa bits are e. The lower bound
    // makes SFA 2^-127 (and serves a block without a visible key, top = -inf).
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
    constexpr int kMinExponent = kPExponent - 127;
    float e = 0.0f;
    byte[row] = 127 - kPExponent;
    if constexpr (!kFixedScale) {
      const float shifted = fmaxf(top - reference, static_cast<float>(kMinExponent)) + kMagic;
      e = shifted - kMagic;
      byte[row] += __float_as_uint(shifted) - __float_as_uint(kMagic);
    }
    const float bias = static_cast<float>(kPExponent) - (reference + e);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < C::kScoreTiles; ++j) {
#pragma unroll
      for (int i = 2 * row; i < 2 * row + 2; ++i) {
        s[j][i] = ptx::ex2(fmaf(s[j][i], lambda, bias));
        sum += s[j][i];
      }
    }
    // 2^(e - 8), from the same byte as SFA.
    const float weight = __uint_as_float(byte[row] << 23);
    state.sum[row] = fmaf(sum, weight, state.sum[row] * scale.alpha[row]);
  }
  scale.sfa = (t & 1) ? byte[1] : byte[0];
  return scale;
}

template <class C>
__device__ __forceinline__ void rescale_output(float (&o)[C::kOutTiles][4],
                                               const float (&alpha)[2]) {
  if (!__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
  for (int j = 0; j < C::kOutTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[j][i] *= alpha[i / 2];
  }
}

// P' of 32 keys as the A operand of an MMA: no lane needs another lane's values, because K's rows
// were read in the order that makes S columns and P slots the same registers.
template <class C>
__device__ __forceinline__ void pack_p(uint32_t (&a)[C::kTokenBlocks][4],
                                       const float (&s)[C::kScoreTiles][4]) {
#pragma unroll
  for (int block = 0; block < C::kTokenBlocks; ++block) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int j = 4 * block + (r & 2), i = 2 * (r & 1);
      a[block][r] = ptx::cvt_e4m3x4(s[j][i], s[j][i + 1], s[j + 1][i], s[j + 1][i + 1]);
    }
  }
}

#endif  // __CUDACC__

}  // namespace mpfa::sm120
