// SPDX-License-Identifier: Apache-2.0
// End of a pass: the warps' states become one, O / l goes to the output or the partial buffers.
#pragma once

#include "mpfa/core/sink.cuh"
#include "mpfa/ptx/fence.cuh"
#include "mpfa/sm90/decode/step.cuh"

namespace mpfa::sm90::decode {

#if defined(__CUDACC__)

constexpr uint32_t kConsumerBarrier = 1;  // named barrier of the consumer warps
template <class C>
__device__ __forceinline__ void sync_consumers() {
  ptx::named_barrier_sync(kConsumerBarrier, C::kConsumers);
}

// Float of channel d of a merged column. A lane writes its 16 (or 8) channels of a column as
// vectors; the exclusive or spreads the lanes over the banks.
template <class C>
__device__ __forceinline__ int32_t merge_index(int32_t d) {
  constexpr int kVectors = C::kLaneDims / 4;
  const int32_t g = d / C::kLaneDims, vector = d % C::kLaneDims / 4;
  return g * C::kLaneDims + (vector ^ (g / 2 % kVectors)) * 4 + d % 4;
}

template <class C>
struct Epilogue {
  const Params& p;
  const Tile& tile;
  const Tables<C>& tables;
  Statistics<C>& statistics;
  float* merge;  // [kWarps][kMergeColumns][D]
  int32_t columns, warp, g, t;

  // A column over all warps.
  struct Column {
    float peak;   // m
    float total;  // l, 2^7 too large as P is
  };

  __device__ int64_t partial_row(int32_t column) const {
    return tile.item.partial_row +
           static_cast<int64_t>(tables.token[column]) * tile.item.partial_stride;
  }

  static __device__ void load_floats(const float* from, float (&x)[C::kWarps]) {
#pragma unroll
    for (int w = 0; w < C::kWarps; w += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + w);
      x[w] = v.x, x[w + 1] = v.y, x[w + 2] = v.z, x[w + 3] = v.w;
    }
  }

  static __device__ float common_peak(const float (&peaks)[C::kWarps]) {
    float peak = kLowest;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) peak = fmaxf(peak, peaks[w]);
    return peak;
  }

  __device__ Column join(int32_t column) const {
    const float exponent_scale = exponent_factor(p.a);
    float peaks[C::kWarps], totals[C::kWarps];
    load_floats(statistics.peak[column], peaks);
    load_floats(statistics.total[column], totals);
    Column all = {common_peak(peaks), 0.0f};
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      all.total += ptx::ex2(exponent_scale * (peaks[w] - all.peak)) * totals[w];
    }
    return all;
  }

  // LSE of a finished or partial row, without a sink. The row term that centring dropped is added
  // here, to partial rows too.
  __device__ float lse_of(int32_t column, const Column& all) const {
    // A NaN among the inputs is not an empty column: it must reach the output.
    if (all.total == 0.0f) return -INFINITY;
    const float lse = exponent_factor(p.a) * all.peak + log2f(all.total * (1.0f / (1 << 7)));
    return p.a.logits_soft_cap == 0.0f ? lse + p.a.sm_scale_log2 * tables.row_term[column] : lse;
  }

  __device__ void store_lse(int32_t column) const {
    const AttentionParams& a = p.a;
    const int32_t head = tables.head[column];
    const float lse = lse_of(column, join(column));
    if (tile.item.partial_row >= 0) {
      a.partial_lse[partial_row(column) * a.num_qo_heads + head] = lse;
      return;
    }
    a.lse[(tile.first_token + tables.token[column]) * a.lse_token + head * a.lse_head] =
        a.sinks == nullptr ? lse : join_sink(lse, __ldg(a.sinks + head)).lse;
  }

  // Channels d and d + 1 of a column.
  __device__ void store(int32_t column, int32_t d, float2 y) const {
    const AttentionParams& a = p.a;
    const int32_t head = tables.head[column];
    const Column all = join(column);
    float factor = all.total == 0.0f ? 0.0f : __fdiv_rn(1.0f, all.total);
    if (tile.item.partial_row >= 0) {
      float* to = a.partial_o + (partial_row(column) * a.num_qo_heads + head) * C::kHeadDim + d;
      *reinterpret_cast<float2*>(to) = scaled(y, factor);
      return;
    }
    if (a.sinks != nullptr) {
      factor *= join_sink(lse_of(column, all), __ldg(a.sinks + head)).keep;
    }
    y = scaled(y, factor);
    uint8_t* out =
        a.out + (tile.first_token + tables.token[column]) * a.out_token + head * a.out_head;
    if (a.out_type == OutType::kFp32) {
      reinterpret_cast<float*>(out)[d] = y.x;
      reinterpret_cast<float*>(out)[d + 1] = y.y;
    } else {
      const bool bf16 = a.out_type == OutType::kBf16;
      uint16_t* to = reinterpret_cast<uint16_t*>(out) + d;
      to[0] = bf16 ? ptx::cvt_rn_bf16(y.x) : ptx::cvt_rn_f16(y.x);
      to[1] = bf16 ? ptx::cvt_rn_bf16(y.y) : ptx::cvt_rn_f16(y.y);
    }
  }

  // why a choice: a column without keys has as O a sum over garbage.
  static __device__ float2 scaled(float2 y, float factor) {
    return factor == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(y.x * factor, y.y * factor);
  }

  // Every warp's m and l; `scale` becomes this warp's factor to the common maximum.
  __device__ void share_totals(const State<C>& state, float (&scale)[C::kTiles][2]) {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = state.total[n][c];
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) total += __shfl_xor_sync(kFullWarp, total, bit);
        if (g == 0) {
          statistics.peak[8 * n + 2 * t + c][warp] = state.peak[n][c];
          statistics.total[8 * n + 2 * t + c][warp] = total;
        }
      }
    }
    sync_consumers<C>();
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float peaks[C::kWarps];
        load_floats(statistics.peak[8 * n + 2 * t + c], peaks);
        scale[n][c] = ptx::ex2(exponent_factor(p.a) * (state.peak[n][c] - common_peak(peaks)));
      }
    }
  }

  // This warp's O of the columns from `first`, scaled, for all to read.
  __device__ void share_output(const State<C>& state, const float (&scale)[C::kTiles][2],
                               int first) const {
    const int lanes_begin = first % 8 / 2;
    if (t < lanes_begin || t >= lanes_begin + C::kMergeColumns / 2) return;
    const int n = first / 8;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int32_t slot = 2 * (t - lanes_begin) + c;
      float* row = merge + (warp * C::kMergeColumns + slot) * C::kHeadDim;
#pragma unroll
      for (int i = 0; i < C::kLaneDims; i += 4) {
        float4 x;
        x.x = state.out[i / 2][n][c] * scale[n][c];
        x.y = state.out[i / 2][n][c + 2] * scale[n][c];
        x.z = state.out[i / 2 + 1][n][c] * scale[n][c];
        x.w = state.out[i / 2 + 1][n][c + 2] * scale[n][c];
        *reinterpret_cast<float4*>(row + merge_index<C>(g * C::kLaneDims + i)) = x;
      }
    }
  }

  // invariant: no barrier at the end. What is read behind the last one (sums, m, l, row term,
  // token, head) is next written behind a barrier that every warp reaches after these reads: m and
  // l and sums behind the first one of the next pass, the rest behind the one ahead of its query. m
  // and l have two places in turn, as they are written ahead of that barrier.
  __device__ void run(const State<C>& state) {
    float scale[C::kTiles][2];
    share_totals(state, scale);
#pragma unroll
    for (int first = 0; first < C::kColumns; first += C::kMergeColumns) {
      if (first >= columns) break;
      share_output(state, scale, first);
      sync_consumers<C>();
      const int32_t count = min(columns - first, C::kMergeColumns) * (C::kHeadDim / 2);
      for (int32_t i = threadIdx.x; i < count; i += C::kConsumers) {
        const int32_t slot = i / (C::kHeadDim / 2), d = i % (C::kHeadDim / 2) * 2;
        const float* from = merge + slot * C::kHeadDim + merge_index<C>(d);
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
          const float2 x =
              *reinterpret_cast<const float2*>(from + w * C::kMergeColumns * C::kHeadDim);
          sum.x += x.x, sum.y += x.y;
        }
        store(first + slot, d, sum);
      }
      if (first + C::kMergeColumns < columns) sync_consumers<C>();
    }
    // The last threads: they have no sums where a pass has few columns.
    const int32_t column = C::kConsumers - 1 - static_cast<int32_t>(threadIdx.x);
    if (column < columns) store_lse(column);
  }
};

#endif  // __CUDACC__

}  // namespace mpfa::sm90::decode
