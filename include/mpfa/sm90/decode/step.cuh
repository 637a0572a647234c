// SPDX-License-Identifier: Apache-2.0
// One step of a warp: S^T = K Q^T, softmax, O^T += V^T P^T for 16 keys of its stream.
// Lane 4g + t holds keys g and g + 8 of columns 2t and 2t + 1 of each column tile.
#pragma once

#include "mpfa/core/soft_cap.cuh"
#include "mpfa/ptx/mma_sm80.cuh"
#include "mpfa/sm90/decode/query.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

// lambda: P = 2^(lambda (S - m)).
__device__ __forceinline__ float exponent_factor(const AttentionParams& a) {
  return a.logits_soft_cap > 0.0f ? kLog2e : a.sm_scale_log2;
}

constexpr float kLowest = -3.402823466e38f;

// Running state of a pass; columns 2t and 2t + 1 of each tile.
template <class C>
struct State {
  float out[C::kSteps][C::kTiles][4];  // [i]: channel pair i & 2, column i & 1
  float peak[C::kTiles][2];            // m
  float total[C::kTiles][2];           // l of this lane's keys

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[s][n][i] = 0.0f;
      }
      // why finite: -inf - -inf would be NaN while all keys of a column are masked.
      peak[n][0] = peak[n][1] = kLowest;
      total[n][0] = total[n][1] = 0.0f;
    }
  }
};

// Aligned vectors of 32-bit words in shared memory.
template <int N>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t (&w)[N]) {
  static_assert(N == 2 || N == 4, "one load");
  if constexpr (N == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    w[0] = x.x, w[1] = x.y;
  }
}

// Where a lane finds its parts of a slice, in bytes: of slice `warp` of a block, from the start of
// the block's K, V, scales or Delta. The same for every block.
template <class C>
struct LaneOffsets {
  uint32_t k, scale, v;
  uint32_t delta[C::kTiles][2];  // keys g of the heads of columns 2t and 2t + 1
};

// A slice: offsets in dynamic shared memory that its warp adds LaneOffsets to.
struct Slice {
  uint32_t k, v, scale, delta;
  uint32_t channels;  // of the slice's first key
};

// What a lane holds of the query of a pass.
template <class C>
struct Query {
  uint2 fragment[C::kQueryInRegisters ? C::kSteps : 1][C::kQueryInRegisters ? C::kTiles : 1];
  float factor[C::kTiles][2];  // of columns 2t and 2t + 1

  __device__ void load(const uint2* fragments, const Tables<C>& tables, int32_t lane) {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
      if constexpr (C::kQueryInRegisters) {
#pragma unroll
        for (int s = 0; s < C::kSteps; ++s) {
          fragment[s][n] = fragments[(s * C::kTiles + n) * 32 + lane];
        }
      }
      factor[n][0] = tables.factor[8 * n + lane % 4 * 2];
      factor[n][1] = tables.factor[8 * n + lane % 4 * 2 + 1];
    }
  }
};

// kPlain...: no soft cap and no mask; with or without Delta and channels. why versions of their
// own: their code has no branches that the scheduler may not cross, but for the rare one that moves
// a maximum.
enum class Path { kPlain, kPlainDelta, kPlainChannels, kAny };

template <class C, Path kPath>
struct Step {
  const Params& p;
  const uint8_t* base;  // dynamic shared memory
  const Query<C>& q;
  const LaneOffsets<C>& at;
  const uint2* fragments;  // of Q in shared memory
  const Tables<C>& tables;
  int32_t g, t;  // lane = 4g + t

  // lambda
  __device__ float exponent_scale() const {
    return kPath == Path::kAny ? exponent_factor(p.a) : p.a.sm_scale_log2;
  }

  // Raw scores of 16 keys, divided by the columns' factors.
  __device__ void scores(const Slice& slice, float (&s)[C::kTiles][4]) const {
    const uint8_t* rows = base + slice.k + at.k;
    const uint8_t* scales = base + slice.scale + at.scale;
    const uint32_t scale_step = p.scale_layout == ScaleLayout::kAtoms ? 8 * 16 : 8 * C::kRowScale;
    uint32_t codes[2][C::kWords], scale[2][C::kLaneBlocks];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_words(rows + r * 8 * C::kRowK, codes[r]);
      const uint8_t* bytes = scales + r * scale_step;
      expand_scales<C::kLaneBlocks>(
          C::kLaneBlocks == 2 ? *reinterpret_cast<const uint16_t*>(bytes) : *bytes, scale[r]);
    }
#pragma unroll
    for (int j = 0; j < C::kWords; ++j) {
      uint32_t x[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) expand_codes(codes[r][j], scale[r][j / 2], x[r]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a[4] = {x[0][2 * half], x[1][2 * half], x[0][2 * half + 1],
                               x[1][2 * half + 1]};
#pragma unroll
        for (int n = 0; n < C::kTiles; ++n) {
          const int step = 2 * j + half;
          uint2 b;
          if constexpr (C::kQueryInRegisters) {
            b = q.fragment[step][n];
          } else {
            b = fragments[(step * C::kTiles + n) * 32 + 4 * g + t];
          }
          ptx::mma_f16(s[n], a, b.x, b.y);
        }
      }
    }
  }

  // Adds the channels that K and Q keep in bf16 (paper equation 11). Slots at or above c may hold
  // the next row's values or anything behind the last one.
  __device__ void add_channels(const Slice& slice, float (&s)[C::kTiles][4]) const {
    const int32_t count = p.a.channels;
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t row = g + i % 2 * 8, slot = 2 * t + i / 2 * 8;
      // why words: of an odd count, every second row starts in the middle of one.
      const int32_t at = (row * count + slot) * 2;
      const bool split = at % 4 != 0, low_used = slot < count, high_used = slot + 1 < count;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(base + slice.channels) + at / 4;
      const uint32_t first = low_used ? words[0] : 0;
      const uint32_t second = split && high_used ? words[1] : 0;
      a[i] = __byte_perm(first, second, split ? 0x5432 : high_used ? 0x3210 : 0x4410);
    }
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
      const uint2 b = tables.channels[n][4 * g + t];
      ptx::mma_bf16(s[n], a, b.x, b.y);
    }
  }

  // Undoes the factors, adds Delta, then soft cap and mask.
  __device__ void finish_scores(const Slice& slice, const Tile& tile, bool edge, int32_t first_key,
                                float (&s)[C::kTiles][4]) const {
    constexpr bool kAsk = kPath == Path::kAny || kPath == Path::kPlainChannels;
    if (kPath == Path::kPlainDelta || (kAsk && p.delta_heads > 0)) {
#pragma unroll
      for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t bits = *reinterpret_cast<const uint16_t*>(base + slice.delta +
                                                                   at.delta[n][i % 2] + i / 2 * 16);
          s[n][i] = fmaf(s[n][i], q.factor[n][i % 2], bf16_to_float(bits));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= q.factor[n][i % 2];
      }
    }
    if constexpr (kPath != Path::kAny) return;
    if (p.a.logits_soft_cap > 0.0f) {
#pragma unroll
      for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = soft_cap(s[n][i] + tables.row_term[8 * n + 2 * t + i % 2], p.a.logits_soft_cap,
                             p.a.soft_cap_ratio);
        }
      }
    }
    if (!edge) return;
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t row = min(tile.pass * C::kColumns + 8 * n + 2 * t + c, tile.packing.rows - 1);
        const KeyRange r = visible_keys(tile.mask, tile.item.q_begin + tile.packing.token(row));
#pragma unroll
        for (int i = c; i < 4; i += 2) {
          const int32_t key = first_key + g + i / 2 * 8;
          if (key < r.begin || key >= r.end) s[n][i] = -INFINITY;
        }
      }
    }
  }

  // P of scores s, in place. m moves only when a score passes it by 2^8 in the exponent: fp16 holds
  // the values up to there with all their bits, and O is hardly ever rescaled.
  __device__ void probabilities(State<C>& state, float (&s)[C::kTiles][4]) const {
    float y[C::kTiles][4];
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[n][i] = fmaf(s[n][i] - state.peak[n][i % 2], exponent_scale(), kProbBias);
        top = fmaxf(top, y[n][i]);
      }
    }
    if (__any_sync(kFullWarp, top > kProbLimit)) raise_peaks(state, s, y);
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = ptx::ex2(y[n][i]);
        state.total[n][i % 2] += s[n][i];
      }
    }
  }

  // To the slice's maximum, in the columns that passed the limit.
  __device__ void raise_peaks(State<C>& state, const float (&s)[C::kTiles][4],
                              float (&y)[C::kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = fmaxf(s[n][c], s[n][c + 2]);
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
          top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, bit));
        }
        const float before = state.peak[n][c];
        const bool raise = fmaf(top - before, exponent_scale(), kProbBias) > kProbLimit;
        const float peak = raise ? top : before;
        const float alpha = raise ? ptx::ex2(exponent_scale() * (before - peak)) : 1.0f;
        state.peak[n][c] = peak;
        state.total[n][c] *= alpha;
#pragma unroll
        for (int i = c; i < 4; i += 2) {
          y[n][i] = fmaf(s[n][i] - peak, exponent_scale(), kProbBias);
#pragma unroll
          for (int k = 0; k < C::kSteps; ++k) state.out[k][n][i] *= alpha;
        }
      }
    }
  }

  // A lane's keys 2t, 2t+1, 2t+8 and 2t+9 of its channels of V.
  static constexpr int kWordsV = C::kLaneDims / 4;
  __device__ void load_values(const Slice& slice, uint32_t (&v)[4][kWordsV]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      // The swizzle of row 2t + 1 is that of row 2t with one bit of the piece turned over (with
      // rows of 64 bytes it is the same), and row + 8 has the swizzle of its row.
      const uint32_t from = C::kRowV == 128 && r % 2 == 1 ? at.v ^ 16 : at.v;
      load_words(base + slice.v + from + (r % 2 + r / 2 * 8) * C::kRowV, v[r]);
    }
  }

  // why: P is 0 for a key that no row sees, but 0 * NaN is NaN, and V of a page's unwritten tail or
  // of a page outside the window may hold anything.
  __device__ void clear_hidden(const Tile& tile, int32_t first_key,
                               uint32_t (&v)[4][kWordsV]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t key = first_key + 2 * t + r % 2 + r / 2 * 8;
      const bool seen = key >= tile.outer.begin && key < tile.outer.end;
#pragma unroll
      for (int j = 0; j < kWordsV; ++j) v[r][j] = seen ? v[r][j] : 0;
    }
  }

  // O^T += V^T P^T.
  __device__ void accumulate(const uint32_t (&v)[4][kWordsV], const uint32_t (&b)[C::kTiles][2],
                             State<C>& state) const {
#pragma unroll
    for (int j = 0; j < kWordsV; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pick = half == 0 ? 0x5140 : 0x7362;
        const uint32_t low = __byte_perm(v[0][j], v[1][j], pick);
        const uint32_t high = __byte_perm(v[2][j], v[3][j], pick);
        const uint32_t a[4] = {ptx::cvt_f16x2_e4m3x2(low), ptx::cvt_f16x2_e4m3x2<true>(low),
                               ptx::cvt_f16x2_e4m3x2(high), ptx::cvt_f16x2_e4m3x2<true>(high)};
#pragma unroll
        for (int n = 0; n < C::kTiles; ++n) {
          ptx::mma_f16(state.out[2 * j + half][n], a, b[n][0], b[n][1]);
        }
      }
    }
  }

  // `edge`: some key of the block is hidden from some column.
  __device__ void run(const Slice& slice, const Tile& tile, bool edge, int32_t first_key,
                      State<C>& state) const {
    float s[C::kTiles][4] = {};
    scores(slice, s);
    if (kPath == Path::kPlainChannels || (kPath == Path::kAny && p.a.channels > 0))
      add_channels(slice, s);
    finish_scores(slice, tile, edge, first_key, s);
    uint32_t v[4][kWordsV];
    // Under way while the softmax runs, where there are registers for it.
    constexpr bool kEarly = C::kTiles == 1 && (kPath == Path::kPlain || kPath == Path::kPlainDelta);
    if constexpr (kEarly) load_values(slice, v);
    probabilities(state, s);
    uint32_t b[C::kTiles][2];
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
      b[n][0] = ptx::transpose_8x8(ptx::cvt_f16x2(s[n][0], s[n][1]));
      b[n][1] = ptx::transpose_8x8(ptx::cvt_f16x2(s[n][2], s[n][3]));
    }
    if constexpr (!kEarly) load_values(slice, v);
    if (kPath == Path::kAny && edge) clear_hidden(tile, first_key, v);
    accumulate(v, b, state);
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
